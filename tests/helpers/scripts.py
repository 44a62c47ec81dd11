"""Run the project's scripts as a user does: without a GPU or network, in a separate directory."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SCRIPT_SECONDS = 180  # timeout; every script takes less than a tenth of it
# set in the test process, not for a user; each script would compile the project again
DROPPED = ("PYTHONPATH", "WORLD_SIZE", "RANK", "WANDB_MODE", "PYTHONDONTWRITEBYTECODE")

IMPORTS = """
import datasets, matplotlib.figure, pandas, peft, transformers, trl.trainer.grpo_trainer, trl.trainer.sft_trainer
import transformers.integrations, transformers.models.llama.modeling_llama
matplotlib.figure.Figure().savefig(os.devnull, format="svg")  # fills its caches
"""
SERVER = """
import atexit, gc, json, os, runpy, signal, sys
import torch
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # imports may print
exec(sys.argv[1])
torch.set_num_threads(1)
gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    if (child := os.fork()) == 0:
        signal.alarm(request["seconds"])
        atexit._clear()  # the temporary directories of the parent (wandb has one) are not the child's to delete
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(request["stdout"], os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(os.open(request["stderr"], os.O_CREAT | os.O_WRONLY), 2)
        os.chdir(request["cwd"])
        sys.argv, sys.path[0] = request["argv"], os.path.dirname(request["argv"][0])
        code = 0
        try:
            exec(request["before"])
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
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=replies, flush=True)
"""


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


RunScript = Callable[..., Ended]
Command = Callable[..., None]  # the main function of a script, with a command line


def user_environment() -> dict[str, str]:
    """The environment of a user: no GPU, no network, one thread."""
    kept = {key: value for key, value in os.environ.items() if key not in DROPPED}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run_process(
    argv: Sequence[str | Path], cwd: Path = ROOT, env: dict[str, str] | None = None, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command, by default in the root as a user, until it ends with this exit code."""
    ended = subprocess.run(argv, cwd=cwd, env=env or user_environment(), capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr[-3000:]
    return ended


class Forked:
    """The server as a fork of this process, which has imported what both need: for the workers of pytest-xdist.

    It is forked before the project and the tests are imported, with the environment of a user.
    """

    @classmethod
    def after_imports(cls) -> "Forked | None":
        """None with CUDA, which may have been initialised: then a server that sees no GPU has to import by itself."""
        exec(IMPORTS, {"os": os})
        return None if sys.modules["torch"].version.cuda else cls()

    def __init__(self) -> None:
        (asked, ask), (answer, answered) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for place, file in enumerate((asked, answered, os.open(os.devnull, os.O_WRONLY))):
                os.dup2(file, place)
            os.closerange(3, 1024)  # the pipes of the worker: the server ends with it
            self._become_a_user()
            exec(SERVER, {"__name__": "__main__"})
            os._exit(0)
        os.close(asked)
        os.close(answered)
        self.stdin, self.stdout = os.fdopen(ask, "w"), os.fdopen(answer)

    def _become_a_user(self) -> None:
        environment = user_environment()
        os.environ.clear()
        os.environ.update(environment)
        sys.dont_write_bytecode = False
        tests = str(ROOT / "tests")
        sys.path = ["", *(place for place in sys.path if place != str(ROOT) and not place.startswith(tests))]
        sys.meta_path = [finder for finder in sys.meta_path if "pytest" not in type(finder).__module__]
        for name in [*sys.modules]:
            file = str(getattr(sys.modules[name], "__file__", ""))
            if file.startswith(f"{ROOT}/") and "site-packages" not in file:
                del sys.modules[name]
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        sys.argv = ["-c", ""]  # nothing is left to import

    def wait(self, timeout: float) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ScriptServer:
    """Runs scripts in a fork of a process that has already imported trl, which saves about 8 s per run.

    The script itself and the project's modules are imported again every time.

    Args:
        logs: Directory for the output of the scripts.
        imports: Python source that the process executes first.
        seconds: Timeout of a script.
        process: Forked in place of a process that imports by itself.
    """

    def __init__(
        self, logs: Path, imports: str = IMPORTS, seconds: int = SCRIPT_SECONDS, process: Forked | None = None
    ) -> None:
        self.logs = logs
        self.runs = 0
        self.seconds = seconds
        self.process: Any = process or subprocess.Popen(
            [sys.executable, "-c", SERVER, imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=user_environment(),
            cwd=logs,
        )

    def run(self, directory: Path, script: str, *argv: str, before: str = "", code: int | None = 0) -> Ended:
        """Run a script in a directory until it ends with this exit code, or with any (None).

        Args:
            before: Python source that is executed before it.

        Raises:
            RuntimeError: If the server has died; names the signal or the exit code.
        """
        assert self.process.stdin and self.process.stdout
        self.runs += 1
        paths = {name: str(self.logs / f"{self.runs:04}.{name}") for name in ("stdout", "stderr")}
        request = {"argv": [str(ROOT / script), *argv], "cwd": str(directory), **paths}
        request |= {"before": before, "seconds": self.seconds}
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        reply = self.process.stdout.readline()
        if not reply:
            died = self.process.wait(timeout=10)
            how = f"exit code {died}" if died >= 0 else signal.Signals(-died).name
            raise RuntimeError(f"the process that runs the scripts ended with {how}: its stderr says more.")
        ended = Ended(int(reply), *(Path(path).read_text() for path in paths.values()))
        assert ended.code != -signal.SIGALRM, f"{script} {argv} hung"
        assert code in (None, ended.code), ended.stdout[-2000:] + ended.stderr[-3000:]
        return ended

    def close(self) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # it has died
            self.process.stdin.close()
        self.process.wait(timeout=10)
