"""First light's report, its limits, and what is written from it; tests/backends/ runs the stages."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.scripts import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import first_light
from first_light import Bench, Fault

EXPERIMENTS = ROOT / "configs" / "experiments.yaml"
STEP = {
    "seconds": {"generation": 20.0, "loss": 3.0, "backward": 3.0, "other": 1.0},
    "seconds_of_a_step": 27.0,
    "longest": 500,
    "tokens_per_second": 200.0,
    "micro_batches": 12,
    "plan_gib": {"weights": 5.0, "KV cache": 8.0},
    "peak_gib": 14.5,
}
REPORT: dict[str, Any] = {
    "environment": {"gpu": "NVIDIA L4"},
    "stages": {
        "head": {"outcome": "FAILED", "verdict": "the gradient is off by 200.0%"},
        "paper_step": {
            "outcome": "passed",
            "verdict": "27.0 s",
            "numbers": {
                "model": "llama-8b",
                "runs": {"ours, unsloth, 1": STEP, "ours, unsloth, 12": {"failed": "no memory"}},
            },
        },
    },
}


def good(bench: Bench) -> str:
    bench.numbers["value"] = 1
    return "good"


def wrong(bench: Bench) -> str:
    bench.numbers["value"] = 2
    raise Fault("one is not two")


def broken(bench: Bench) -> str:
    raise OSError("no disk")


def slow(bench: Bench) -> str:
    bench.deadline = time.monotonic() - 1
    bench.run(ROOT / "evaluate.py", name="late")
    return "unreachable"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    stages = {stage.__name__: (stage, 1) for stage in (good, wrong, broken, slow)}
    monkeypatch.setattr(first_light, "STAGES", stages)
    return Bench("cpu", tmp_path, first_light.launch_process, deadline=time.monotonic() + 60)


def test_each_stage_is_stored_with_its_outcome(bench: Bench, tmp_path: Path) -> None:
    said: list[str] = []
    report = tmp_path / "report.json"
    first_light.first_light(bench, report, say=said.append)
    stages = json.loads(report.read_text())["stages"]
    assert {name: (entry["outcome"], entry["verdict"], entry["numbers"]) for name, entry in stages.items()} == {
        "good": ("passed", "good", {"value": 1}),
        "wrong": ("FAILED", "one is not two", {"value": 2}),
        "broken": ("FAILED", "OSError: no disk", {}),
        "slow": ("timeout", "stopped after 1 minutes: --stages slow runs it again", {}),
    }
    assert [line.split(" in ")[0] for line in said] == [
        "good: passed",
        "wrong: FAILED",
        "broken: FAILED",
        "slow: timeout",
    ]


def test_a_stage_that_passed_is_run_again_only_if_it_is_named(bench: Bench, tmp_path: Path) -> None:
    report, ran = tmp_path / "report.json", []
    first_light.first_light(bench, report, ["good"], say=ran.append)
    assert list(json.loads(report.read_text())["stages"]) == ["good"]
    first_light.first_light(bench, report, ["good"], say=ran.append)
    assert [line.partition(" in ")[0] for line in ran] == ["good: passed"] * 2
    ran.clear()
    first_light.first_light(bench, report, say=ran.append)
    assert ran[0] == "good: passed before: good" and ran[1].startswith("wrong: FAILED")


def test_no_stage_starts_after_the_minutes(bench: Bench, tmp_path: Path) -> None:
    said: list[str] = []
    first_light.first_light(bench, tmp_path / "report.json", minutes=0, say=said.append)
    assert said == [f"{name}: not run, 0 minutes are over" for name in ("good", "wrong", "broken", "slow")]
    assert not (tmp_path / "report.json").exists()


def test_a_process_has_the_rest_of_the_time_of_its_stage(bench: Bench, tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time\ntime.sleep(60)")
    bench.deadline = time.monotonic() + 1
    with pytest.raises(first_light.subprocess.TimeoutExpired):
        bench.run(script, name="sleep")


def test_source_that_runs_before_a_script_finds_the_package_and_the_arguments(bench: Bench, tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text("import sys\nprint(sys.argv[1:], sys.modules['gtpo.errors'].__name__)")
    before = "import gtpo.errors, sys\nassert sys.argv[1:] == ['--G', '4']"
    assert bench.succeed(script, "--G", 4, name="say", before=before) == "['--G', '4'] gtpo.errors\n"


def test_a_script_that_fails_is_named_with_its_last_line(bench: Bench, tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import sys\nprint(sys.argv[1:])\nsys.exit('no memory')")
    with pytest.raises(Fault, match=r"^run: exit code 1: no memory$"):
        bench.succeed(script, "--G", 4, name="run")
    assert (tmp_path / "run.txt").read_text().splitlines()[0] == "['--G', '4']"


def test_the_page_is_what_the_reports_say() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert first_light.gpu_page(page, first_light.stored_reports()) == page, (
        "run `python benchmarks/first_light.py --page`"
    )


def test_the_table_without_a_report_says_not_run() -> None:
    lines = first_light.measured_table([]).splitlines()
    assert lines[0] == "Nothing has been run on a GPU yet."
    assert len(lines) == 4 + len(first_light.STAGES) and all(line.endswith("| not run |") for line in lines[4:])


def test_the_table_of_a_report() -> None:
    lines = first_light.measured_table([REPORT]).splitlines()
    assert lines[0] == "| stage | NVIDIA L4 |"
    (head,) = (line for line in lines if line.startswith("| `head`"))
    assert head.endswith("| FAILED: the gradient is off by 200.0% |")
    assert sum(line.endswith("| not run |") for line in lines) == len(first_light.STAGES) - 2
    phases = "generation 20.0, loss 3.0, backward 3.0, other 1.0"
    assert lines[-2:] == [
        f"| NVIDIA L4 | llama-8b | ours, unsloth, 1 | 27.0 ({phases}) | 200 | 14.5 | 13.0 |",
        "| NVIDIA L4 | llama-8b | ours, unsloth, 12 |  | no memory |  |  |",
    ]


def test_the_rates_of_a_measured_step(tmp_path: Path) -> None:
    """40 ms per token (20 s for 500) and 0.5 s per micro-batch (6 s for 12)."""
    results = {"paper_step": REPORT["stages"]["paper_step"]["numbers"]}
    bench = Bench("cpu", tmp_path, first_light.launch_process, results=results)
    assert "for llama in configs/experiments.yaml" in first_light.hours(bench)
    assert bench.numbers == {"seconds_per_token": 0.04, "seconds_per_micro_batch": 0.5}


def test_rates_of_a_small_model_are_not_stored(bench: Bench) -> None:
    numbers: dict[str, Any] = {"model": "llama", "runs": {"ours": STEP}}
    bench.results["paper_step"] = numbers
    assert first_light.hours(bench).endswith("the model is small")
