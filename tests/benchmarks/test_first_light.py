"""First light's report, its limits, and what is written from it; tests/backends/ runs the stages."""

import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.files import read_json
from helpers.scripts import ROOT

from gtpo.files import CONFIGS, read_yaml
from gtpo.models.memory import hours_of_steps

sys.path.insert(0, str(ROOT / "benchmarks"))
import first_light
from first_light import STAGES, Bench, Fault, Stage


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
    stages = {stage.__name__: Stage(stage, 1) for stage in (good, wrong, broken, slow)}
    monkeypatch.setattr(first_light, "STAGES", stages)
    return Bench("cpu", tmp_path, first_light.launch_process, deadline=time.monotonic() + 60)


def test_each_stage_is_stored_with_its_outcome(bench: Bench, tmp_path: Path) -> None:
    said: list[str] = []
    report = tmp_path / "report.json"
    first_light.first_light(bench, report, say=said.append)
    stages = read_json(report)["stages"]
    assert {name: (entry["outcome"], entry["verdict"], entry["numbers"]) for name, entry in stages.items()} == {
        "good": ("passed", "good", {"value": 1}),
        "wrong": ("FAILED", "one is not two", {"value": 2}),
        "broken": ("FAILED", "OSError: no disk", {}),
        "slow": ("timeout", "stopped after 4 minutes: --stages slow runs it again", {}),
    }
    assert [line.split(" in ")[0] for line in said] == [
        *("good: about 1 minutes", "good: passed", "wrong: about 1 minutes", "wrong: FAILED"),
        *("broken: about 1 minutes", "broken: FAILED", "slow: about 1 minutes", "slow: timeout"),
    ]


def test_a_passed_stage_runs_again_only_if_named(bench: Bench, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ran = []
    first_light.first_light(bench, report, ["good"], say=ran.append)
    assert list(read_json(report)["stages"]) == ["good"]
    first_light.first_light(bench, report, ["good"], say=ran.append)
    assert [line.partition(" in ")[0] for line in ran] == ["good: about 1 minutes", "good: passed"] * 2
    ran.clear()
    first_light.first_light(bench, report, say=ran.append)
    assert ran[0] == "good: passed before: good" and ran[2].startswith("wrong: FAILED")


def test_no_stage_starts_that_does_not_fit_the_minutes(bench: Bench, tmp_path: Path) -> None:
    said: list[str] = []
    first_light.first_light(bench, tmp_path / "report.json", minutes=0, say=said.append)
    assert said == [f"{name}: not run, it does not fit 0 minutes" for name in ("good", "wrong", "broken", "slow")]
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("minutes", "planned"),
    [
        (3, ["step_group"]),
        (10, ["gradient", "learning", "step_group"]),  # rollouts would take 8 of them
        (16, ["gradient", "rollouts", "learning"]),
        (math.inf, list(STAGES)),
    ],
)
def test_the_plan_has_the_first_stages_that_fit(minutes: float, planned: list[str]) -> None:
    assert first_light.plan(list(STAGES), minutes) == planned


def test_a_model_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(directory: Path, name: str, *_: Any) -> None:
        built.append(name)
        directory.mkdir(parents=True)
        (directory / "config.json").touch()

    monkeypatch.setattr(first_light, "build_model", build)
    bench = Bench("cpu", tmp_path, first_light.launch_process)
    bench.model("llama")
    again = Bench("cpu", tmp_path, first_light.launch_process)  # a later command with the same --work
    assert again.model("llama") == tmp_path / "models" / "llama" and built == ["llama"]


def test_a_process_has_the_rest_of_the_time(bench: Bench, tmp_path: Path) -> None:
    (script := tmp_path / "run.py").write_text("import sys, time\nprint(sys.argv[1:])\ntime.sleep(float(sys.argv[1]))")
    before = "import gtpo.errors, sys\nassert sys.argv[1:] == ['0']"
    assert bench.succeed(script, 0, name="run", before=before) == "['0']\n" == (tmp_path / "run.txt").read_text()
    bench.deadline = time.monotonic() + 5
    with pytest.raises(first_light.subprocess.TimeoutExpired):
        bench.run(script, 60, name="sleep")
    assert (tmp_path / "sleep.txt").read_text() == "['60']\n"  # how far it came


def test_a_failed_script_is_named_with_its_last_line(bench: Bench, tmp_path: Path) -> None:
    (script := tmp_path / "fail.py").write_text("import sys\nprint(1)\nsys.exit('no memory')")
    with pytest.raises(Fault, match=r"^run: exit code 1: no memory$"):
        bench.succeed(script, name="run")


def test_the_page_is_what_the_reports_say() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert first_light.gpu_page(page, first_light.stored_reports()) == page, (
        "run `python benchmarks/first_light.py --page`"
    )


def test_rates_of_the_h100_are_those_of_its_report() -> None:
    """One length was measured: what generation takes is by token, the rest by completion."""
    paper = read_yaml(CONFIGS / "experiments.yaml")["paper"]
    hours = {}
    [report] = [report for report in first_light.stored_reports() if "H100" in report["environment"]["gpu"]]
    for stage, bits in (("step_group", "4 bits"), ("step_16bit", "16 bits")):
        step = report["stages"][stage]["numbers"]
        rates = paper["measured"][bits]
        generation = step["seconds"]["generation"]
        assert rates["seconds_per_token"]["llama"] == pytest.approx(generation / step["longest"], rel=1e-3)
        rest = (step["seconds_of_a_step"] - generation) / step["G"]
        assert rates["seconds_per_micro_batch"]["llama"] == pytest.approx(rest, rel=1e-2)
        length = paper["longest_completion"]["gsm8k"][12]
        hours[bits] = hours_of_steps(rates, "llama", 12, length, paper["steps"]["gsm8k"])
    page = (ROOT / "docs" / "gpu.md").read_text()
    [row] = re.findall(r"^\| llama, gsm8k \|.*", page, re.MULTILINE)
    assert row.endswith(f"| {hours['4 bits']:.0f} h | {hours['16 bits']:.0f} h |")


@pytest.mark.slow
def test_a_step_of_trl_is_measured_on_a_cpu(tmp_path: Path) -> None:
    """TRL's trainer in the train script, with its phases: the one stage that needs no other package."""
    bench = Bench("cpu", tmp_path, first_light.launch_process)
    (entry,) = first_light.first_light(bench, tmp_path / "report.json", ["step_trl"])["stages"].values()
    assert entry["outcome"] == "passed" and "failed" not in entry["numbers"], entry
    assert {"generation", "loss", "backward", "optimizer"} <= entry["numbers"]["seconds"].keys()
    [phases] = tmp_path.glob("step-*/phases.json")
    assert len(read_json(phases)["steps"]) == 3 and read_json(phases)["open"] == []
    assert entry["numbers"]["seconds_of_a_step"] > 0 and entry["numbers"]["longest"] == 12
