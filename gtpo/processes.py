"""The processes of a run: which one this is, whether it trains, agreement between them, sharded parameters, threads."""

import atexit
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, NoReturn

from gtpo.errors import UsageError

_training = False


def rank() -> int:
    """The number of this process among those of the run, of which Accelerate knows the same (:func:`check_launch`)."""
    return int(os.environ.get("RANK") or 0)


def world_size() -> int:
    """The processes of the run."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def local_rank() -> int:
    """The number of this process among those of its machine, and of its GPU there; -1 is Accelerate's "none"."""
    return max(0, int(os.environ.get("LOCAL_RANK") or 0))


def is_main_process() -> bool:
    """Whether this process writes the files of the run and speaks for it."""
    return rank() == 0


_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_OF_LAUNCHERS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # which Accelerate reads on a CPU
_OFF = {"", "0", "1", "no", "none", "false"}  # 1 is no accumulation
# What no result depends on, what a launcher sets for a plugin that is named apart, and what is compared with settings.
_NOT_REFUSED = re.compile(
    r"ACCELERATE_(MIXED_PRECISION|USE_FSDP|USE_DEEPSPEED|DEEPSPEED_.*|CONFIG_DS_FIELDS|DYNAMO_(MODE|USE_.*)|DEBUG_MODE|"
    r"DEBUG_RDV_FILE|LOG_LEVEL|(EN|DIS)ABLE_RICH|CPU_AFFINITY|NUM_PROCESSES|FP8_.*)"
)
_OF_DEEPSPEED = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING"}
_INSTEAD = {
    "ACCELERATE_USE_CPU": "`accelerate launch --cpu` starts one process for any --num_processes: leave out --cpu, or "
    "start the script itself with --use_cpu true",
    "ACCELERATE_DYNAMO_BACKEND": "unset it, or set it to no: --torch_compile true is the setting",
}


def check_launch(environment: Mapping[str, str]) -> None:
    """UsageError where the environment contradicts itself, or asks Accelerate for what no setting of the run says."""
    _check_ranks(environment)
    of_deepspeed = environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    for name, value in environment.items():
        if not name.startswith("ACCELERATE_") or _NOT_REFUSED.fullmatch(name) or value.lower() in _OFF:
            continue
        if not (of_deepspeed and name in _OF_DEEPSPEED):
            instead = _INSTEAD.get(name, "unset it")
            raise UsageError(f"{name}={value} in the environment changes what a run computes: {instead}.")


def _check_ranks(environment: Mapping[str, str]) -> None:
    """UsageError where the environment names a process that no launcher has started.

    Rank and number of the processes are read by the launcher's variables alone, so all have to be there.
    """
    found = {name: environment[name] for name in _RANKS if environment.get(name)}
    for name, value in found.items():
        if not value.isdecimal() and (name, value) != ("LOCAL_RANK", "-1"):  # which is Accelerate's "none"
            raise UsageError(f"{name}={value} in the environment: expected a number; unset it.")
    size, this = int(found.get("WORLD_SIZE", 1)), int(found.get("RANK", 0))
    is_launched = found.get("LOCAL_RANK", "-1") != "-1"
    missing = set(_RANKS).difference(found)
    for name in _OF_LAUNCHERS:
        if "WORLD_SIZE" in missing and environment.get(name, "1") not in ("", "1"):
            found[name] = environment[name]
            size = int(environment[name]) if environment[name].isdecimal() else 2
    is_complete = not missing or (size <= 1 and not is_launched)
    if this < size and is_complete:
        return
    known = " ".join(f"{name}={value}" for name, value in found.items())
    without = f" without {' and '.join(sorted(missing))}" if missing else ""
    raise UsageError(
        f"{known}{without} in the environment is no process of a run: unset {' and '.join(found)}, or start it "
        "with `accelerate launch` or `torchrun`."
    )


def check_launched(args: Any) -> None:
    """UsageError where Accelerate has started something else than the environment and the settings say.

    ``args``: TRL's config, which has started it.
    """
    state = args.distributed_state
    if (state.num_processes, state.process_index) != (world_size(), rank()):
        raise UsageError(
            f"this is process {rank()} of {world_size()} by RANK and WORLD_SIZE, and {state.process_index} of "
            f"{state.num_processes} by Accelerate: start it with `accelerate launch` or `torchrun`."
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and state.distributed_type in ("NO", "MULTI_CPU"):
        raise UsageError(
            "FSDP shards over GPUs, and here every process would have the whole model: remove --fsdp, or start it with "
            "configs/accelerate/ddp.yaml."
        )
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    if args.mixed_precision != precision:
        raise UsageError(
            f"ACCELERATE_MIXED_PRECISION={args.mixed_precision} in the environment, as of `accelerate launch "
            "--mixed_precision`, is not what --bf16 and --fp16 say: set one of them, or unset it."
        )


def launched_with(environment: Mapping[str, str]) -> dict[str, str]:
    """What a launcher has set for Accelerate, FSDP among it."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(("ACCELERATE_", "FSDP_"))}


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
    processes = os.environ.get("WORLD_SIZE", "")  # of a start that is refused anything
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
