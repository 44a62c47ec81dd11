"""A script under FSDP2 on a CPU: ``accelerate launch --config_file configs/accelerate/fsdp2.yaml fsdp_cpu.py SCRIPT``

Accelerate's state takes FSDP on accelerators alone, and DDP on a CPU; its wrapping, saving and loading work on both.
Without the state of this file the launch is refused, which each process checks before it goes on.
"""

import functools
import runpy
import sys
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from gtpo import processes
from gtpo.errors import UsageError

plain = AcceleratorState.__init__
refuse = processes.check_launched


@functools.wraps(plain)
def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    is_first = not AcceleratorState._shared_state
    plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if is_first:
        assert fsdp_plugin is not None, "start it with accelerate launch and fsdp2.yaml"
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # each state is a copy of it


def check_is_refused(args: Any) -> None:
    """That FSDP without a GPU, and nothing else, is refused."""
    try:
        refuse(args)
    except UsageError as error:
        assert str(error).startswith("FSDP shards over GPUs"), error
    else:
        raise AssertionError("FSDP without a GPU was not refused")


if __name__ == "__main__":
    AcceleratorState.__init__ = with_fsdp  # type: ignore[method-assign]
    processes.check_launched = check_is_refused
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
