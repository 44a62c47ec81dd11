"""The processes of a run: which one this is, whether it trains, agreement between them, sharded parameters, threads."""

import atexit
import os
import sys
from collections.abc import MutableMapping
from typing import Any, NoReturn

from gtpo.errors import UsageError

_training = False


def is_main_process() -> bool:
    """Whether this process writes the files of the run and speaks for it."""
    return os.environ.get("RANK", "0") == "0"


def training_begins() -> None:
    """From here on an error ends the script with exit code 1."""
    global _training
    _training = True


def training_has_begun() -> bool:
    return _training


def leave(code: Any) -> NoReturn:
    """Exit; one of several processes after the handlers of atexit, before the end of the interpreter.

    There a thread of Gloo may abort: it holds tensors for a moment after its last collective, and needs the interpreter
    to free them (pytorch#190489). The exit code is that of SIGABRT then, and the launcher reports a failed run.
    """
    processes = os.environ.get("WORLD_SIZE", "")
    if processes.isdecimal() and int(processes) > 1 and isinstance(code, int | None):  # sys.exit prints others
        atexit._run_exitfuncs()
        for stream in sys.stdout, sys.stderr:
            if stream:  # None where it is closed
                stream.flush()
        os._exit(code or 0)
    sys.exit(code)


def refuse_data_parallel(args: Any) -> None:
    """Refuse several GPUs in one process, which Transformers trains with DataParallel."""
    if args.n_gpu > 1:
        raise UsageError(
            f"{args.n_gpu} GPUs are visible to one process and DataParallel is not supported: start a process per GPU "
            "(`accelerate launch --config_file configs/accelerate/ddp.yaml`), or set CUDA_VISIBLE_DEVICES=0."
        )


def any_process(flag: bool, device: Any) -> bool:
    """Whether the flag is set on any process of the run; every process has to call it."""
    from accelerate import PartialState
    from accelerate.utils import reduce
    from torch import tensor

    if PartialState().num_processes == 1:
        return flag
    return bool(reduce(tensor(int(flag), device=device), "max"))


def gather_full_parameter(parameter: Any) -> Any:
    """The full parameter, where FSDP2 or DeepSpeed ZeRO-3 has sharded it; every process has to call it.

    A trainable head under ZeRO-3, where a gathered copy has no gradient, is a UsageError.
    """
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(parameter, DTensor):
        return parameter.full_tensor()
    if hasattr(parameter, "ds_id"):
        from deepspeed.zero import GatheredParameters

        if parameter.requires_grad and torch.is_grad_enabled():
            raise UsageError("a trainable lm_head under DeepSpeed ZeRO-3 is not supported: train LoRA, or use FSDP2.")
        with GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter


def limit_openmp_spinning(environment: MutableMapping[str, str]) -> None:
    """Let idle threads spin for a moment, then sleep; a policy of the user is kept. Before PyTorch is imported.

    To wake a thread takes longer than a parallel region of a small model. GNU OpenMP's own limit is a hundred times
    this one: threads then spin instead of working where another program uses a core.
    """
    if "OMP_WAIT_POLICY" not in environment:  # GOMP_SPINCOUNT would override it
        environment.setdefault("GOMP_SPINCOUNT", "3000")  # about a tenth of a millisecond
