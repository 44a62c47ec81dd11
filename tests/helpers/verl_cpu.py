"""A CPU as a platform of verl's, through its registry (VERL_PLATFORM=cpu): verl has accelerators alone.

Its tests import it in every process of Ray's; memory is 0 and a capability None, as verl has them without a GPU.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def nothing(*args: Any) -> None:
    """What a CPU has no counterpart of."""


def zero(*args: Any) -> int:
    """Memory of an accelerator, in bytes."""
    return 0


def no_memory(*args: Any) -> tuple[int, int]:
    """Free memory, and all of it."""
    return 0, 0


MEMORY = dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), zero)
IGNORED = dict.fromkeys(("empty_cache", "ipc_collect", "set_per_process_memory_fraction"), nothing)
RANDOM = {name: getattr(torch, name) for name in ("manual_seed", "get_rng_state", "set_rng_state")}
MODULE = SimpleNamespace(**vars(torch.cpu), **MEMORY, **IGNORED, **RANDOM, mem_get_info=no_memory)
MODULE.get_device_name = lambda *args: "cpu"


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformBase):
    """One device, which tensors are on already."""

    device_name = vendor_name = "cpu"
    device_module = MODULE
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = nothing
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False
