"""Agreement of processes: a fault of one is known to all; two GPUs in one process are refused."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from helpers.refusals import refused

from gtpo.processes import any_process, refuse_data_parallel


def answers(flags: list[bool], store: Path) -> list[bool]:
    """What each of some processes, forks of this one, learns from its flag."""
    children = []
    for rank, flag in enumerate(flags):
        child = os.fork()
        if not child:
            code = 9
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(flags))}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, and not used
                place = f"file://{store}"
                torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=len(flags))
                PartialState._reset_state()  # of the tests before
                PartialState(cpu=True)  # as TRL's config
                code = int(any_process(flag, torch.device("cpu")))
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert {*codes} <= {0, 1}
    return [code == 1 for code in codes]


@pytest.mark.parametrize(
    ("flags", "expected"), [([False, True], True), ([True, False], True), ([True, True], True), ([False, False], False)]
)
def test_a_fault_of_one_process_is_known_to_both(flags: list[bool], expected: bool, tmp_path: Path) -> None:
    assert answers(flags, tmp_path / "store") == [expected, expected]


@pytest.mark.parametrize("flag", [True, False])
def test_one_process_agrees_with_itself(flag: bool) -> None:
    assert any_process(flag, torch.device("cpu")) is flag


@pytest.mark.parametrize(("count", "is_refused"), [(0, False), (1, False), (2, True), (8, True)])
def test_several_gpus_in_one_process_are_refused(count: int, is_refused: bool) -> None:
    args = SimpleNamespace(n_gpu=count)
    if not is_refused:
        return refuse_data_parallel(args)
    with refused(f"{count} GPUs are visible to one process and DataParallel is not supported"):
        refuse_data_parallel(args)
