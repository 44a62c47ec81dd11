"""Run the project's scripts as a user does: without a GPU or network, in a separate directory."""

import os
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SCRIPT_SECONDS = 180  # timeout; every script takes less than a tenth of it
DROPPED = ("PYTHONPATH", "WORLD_SIZE", "RANK", "WANDB_MODE")  # set in the test process, not for a user

SERVER = f"""
import atexit, gc, json, os, runpy, signal, sys
import datasets, pandas, peft, torch, transformers, trl.trainer.grpo_trainer, trl.trainer.sft_trainer
import transformers.integrations, transformers.models.llama.modeling_llama
torch.set_num_threads(1)
gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    if (child := os.fork()) == 0:
        signal.alarm({SCRIPT_SECONDS})
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(request["stdout"], os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(os.open(request["stderr"], os.O_CREAT | os.O_WRONLY), 2)
        os.chdir(request["cwd"])
        sys.argv, sys.path[0] = request["argv"], os.path.dirname(request["argv"][0])
        code = 0
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as exit:
            code = exit.code or 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a normal interpreter exit takes longer than many of the runs
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


def user_environment() -> dict[str, str]:
    """The environment of a user: no GPU, no network, one thread."""
    kept = {key: value for key, value in os.environ.items() if key not in DROPPED}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
