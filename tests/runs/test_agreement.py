"""Agreement of processes: a fault of one is known to all; two GPUs in one process are refused."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from helpers.refusals import refused

from gtpo.processes import any_process, refuse_data_parallel


def start_process(rank: int, flag: bool, store: Path) -> int:
    """A fork of this process, one of two; its exit code is what it learns."""
    child = os.fork()
    if not child:
        code = 9
        try:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, and not used
            torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
            PartialState._reset_state()  # of the tests before
            PartialState(cpu=True)  # as TRL's config
            code = int(any_process(flag, torch.device("cpu")))
        finally:
            os._exit(code)
    return child


@pytest.mark.parametrize("flags", [(False, True), (True, False), (True, True), (False, False)])
def test_a_fault_of_one_process_is_known_to_both(flags: tuple[bool, bool], tmp_path: Path) -> None:
    children = [start_process(rank, flag, tmp_path / "store") for rank, flag in enumerate(flags)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [any(flags)] * 2


@pytest.mark.parametrize("flag", [True, False])
def test_one_process_agrees_with_itself(flag: bool) -> None:
    assert any_process(flag, torch.device("cpu")) is flag


def test_several_gpus_in_one_process_are_refused() -> None:
    for count in (0, 1):
        refuse_data_parallel(SimpleNamespace(n_gpu=count))
    with refused("2 GPUs are visible to one process and DataParallel is not supported"):
        refuse_data_parallel(SimpleNamespace(n_gpu=2))
