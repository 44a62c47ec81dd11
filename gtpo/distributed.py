from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gtpo.errors import UsageError


def on_any_process(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any process of the run."""
    if not torch.distributed.is_initialized():
        return flag
    shared = torch.tensor(int(flag), device=device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
    return bool(shared)


def in_one_piece(parameter: Any) -> Any:
    """A parameter gathered from the processes, where FSDP2 or DeepSpeed ZeRO-3 has cut it; every process has to ask.

    Raises:
        UsageError: If it is a head that is trained under ZeRO-3, which knows no gradient of a gathered copy.
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
