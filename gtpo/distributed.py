"""Agreement and sharded parameters across the processes of a run."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gtpo.errors import UsageError


def any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any process of the run; every process has to call it."""
    if not torch.distributed.is_initialized():
        return flag
    shared = torch.tensor(int(flag), device=device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
    return bool(shared)


def gather_full_parameter(parameter: Any) -> Any:
    """The full parameter, where FSDP2 or DeepSpeed ZeRO-3 has sharded it; every process has to call it.

    Raises:
        UsageError: For a trainable head under ZeRO-3, where a gathered copy has no gradient.
    """
    if isinstance(parameter, DTensor):
        return parameter.full_tensor()
    if parameter is not None and hasattr(parameter, "ds_id"):
        from deepspeed.zero import GatheredParameters

        if parameter.requires_grad and torch.is_grad_enabled():
            raise UsageError("a trainable lm_head under DeepSpeed ZeRO-3 is not supported: train LoRA, or use FSDP2.")
        with GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter
