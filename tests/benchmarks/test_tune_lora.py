"""The search for block sizes of vLLM's LoRA kernels, with kernels that a formula replaces."""

import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from helpers.files import read_json
from helpers.scripts import ROOT
from pytest import CaptureFixture

from gtpo.models.memory import KNOWN

sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))

from tune_lora import Case, all_cases, cases_of, search, tune, write

SHRINK = Case("shrink", 12, 4096, (128, 128, 128))
EXPAND = Case("expand", 12, 128, (4096, 1024, 1024))
START = {"block_m": 32, "block_n": 16, "block_k": 256, "split_k": 64, "num_warps": 4, "num_stages": 2, "max_nreg": None}
BEST = {"block_n": 64, "split_k": 8, "num_warps": 8}


class Formula:
    """Kernels whose time is the distance from ``BEST``; ``block_k`` of 512 gives a wrong output, 32 fails."""

    def default(self, case: Case) -> dict[str, Any]:
        return dict(START)

    def error(self, case: Case, config: dict[str, Any]) -> float:
        return 1.0 if config["block_k"] == 512 else 0.1

    def milliseconds(self, case: Case, most_error: float, config: dict[str, Any]) -> float:
        if config["block_k"] == 32 or self.error(case, config) > most_error:
            return math.inf
        far = sum(abs(math.log2(config[name] / best)) for name, best in BEST.items())
        return far + 1 / config["block_k"]


def test_the_calls_of_a_layer() -> None:
    """Llama-8B: q, k, v of 4,096, 1,024 and 1,024 outputs; o; gate and up; down."""
    found = cases_of(KNOWN["llama"], rank=128, rows=12)
    assert found[:2] == [SHRINK, EXPAND]
    assert found[4:] == [
        Case("shrink", 12, 4096, (128, 128)),
        Case("expand", 12, 128, (14336, 14336)),
        Case("shrink", 12, 14336, (128,)),
        Case("expand", 12, 128, (4096,)),
    ]
    every = all_cases()
    assert len(every) == len({*every}) and every[0] == SHRINK
    assert {len(case.outputs) for case in every} == {1, 2, 3}  # vLLM looks these up without a nearest one


def test_a_search_in_which_nothing_runs_keeps_the_start() -> None:
    assert search(SHRINK, START, lambda config: math.inf)[0] == START


def test_the_files_have_the_keys_that_vllm_looks_up(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    """config[max_loras][slices][m][k][n]: for shrink k is the hidden size and n the rank, for expand the reverse.

    Each is the fastest right one, at block_k = 256: 512 would be faster and is wrong, 32 cannot be compiled.
    """
    store = partial(write, tmp_path, "NVIDIA_H100")
    layer = [*dict.fromkeys(cases_of(KNOWN["llama"], rank=128, rows=12))]
    tune(Formula(), layer, time.monotonic() + 60, store)
    shrink = read_json(tmp_path / "NVIDIA_H100_SHRINK.json")["2"]
    assert shrink["3"] == shrink["2"] == {"12": {"4096": {"128": START | BEST}}}
    expand = read_json(tmp_path / "NVIDIA_H100_EXPAND_TRUE.json")["2"]
    assert {slices: [*of["12"]["128"]] for slices, of in expand.items()} == {
        "3": ["4096"],
        "1": ["4096"],
        "2": ["14336"],
    }
    # 7 x 6.0039 before; expand has no split_k, which leaves 3 of its 6.0039
    assert "7 of 7 shapes, a call of each: 42.027 -> 9.027 ms" in capsys.readouterr().out


def test_nothing_is_written_before_all_slices_are_measured(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    """vLLM would end in a KeyError; without time nothing is measured."""
    for seconds, measured in ((60, 2), (-1, 0)):
        tune(Formula(), [SHRINK, EXPAND], time.monotonic() + seconds, partial(write, tmp_path, "NVIDIA_H100"))
        assert f"{measured} of 2 shapes" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]
