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
    assert said[-1].startswith("slow: timeout")


def test_a_passed_stage_runs_again_only_if_named(bench: Bench, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    said: list[str] = []
    for names in (["good"], ["good"], []):
        first_light.first_light(bench, report, names, say=said.append)
    assert [line.partition(" in ")[0] for line in said[:4]] == ["good: about 1 minutes", "good: passed"] * 2
    assert said[4] == "good: passed before: good" and said[6].startswith("wrong: FAILED")


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
    for _ in range(2):  # a later command with the same --work
        bench = Bench("cpu", tmp_path, first_light.launch_process)
        assert bench.model("llama") == tmp_path / "models" / "llama"
    assert built == ["llama"]


def test_a_process_has_the_rest_of_the_time(bench: Bench, tmp_path: Path) -> None:
    (script := tmp_path / "run.py").write_text("import sys, time\nprint(sys.argv[1:])\ntime.sleep(float(sys.argv[1]))")
    before = "import gtpo.errors, sys\nassert sys.argv[1:] == ['0']"
    assert bench.succeed(script, 0, name="run", before=before) == "['0']\n" == (tmp_path / "run.txt").read_text()
    with pytest.raises(Fault, match=r"^run: exit code 1: ValueError: .* 'x'$"):
        bench.succeed(script, "x", name="run")
    bench.deadline = time.monotonic() + 5
    with pytest.raises(first_light.subprocess.TimeoutExpired):
        bench.run(script, 60, name="sleep")
    assert (tmp_path / "sleep.txt").read_text() == "['60']\n"  # how far it came


PAGE = (ROOT / "docs" / "gpu.md").read_text()


def test_the_page_is_what_the_reports_say() -> None:
    assert first_light.gpu_page(PAGE, first_light.stored_reports()) == PAGE, (
        "run `python benchmarks/first_light.py --page`"
    )


@pytest.mark.parametrize(("stage", "bits"), [("step_group", "4 bits"), ("step_16bit", "16 bits")])
def test_rates_of_the_h100_are_those_of_its_report(stage: str, bits: str) -> None:
    """One length was measured: what generation takes is by token, the rest by completion."""
    paper = read_yaml(CONFIGS / "experiments.yaml")["paper"]
    [report] = [report for report in first_light.stored_reports() if "H100" in report["environment"]["gpu"]]
    step = report["stages"][stage]["numbers"]
    rates = paper["measured"][bits]
    generation = step["seconds"]["generation"]
    assert rates["seconds_per_token"]["llama"] == pytest.approx(generation / step["longest"], rel=1e-3)
    rest = (step["seconds_of_a_step"] - generation) / step["G"]
    assert rates["seconds_per_micro_batch"]["llama"] == pytest.approx(rest, rel=1e-2)
    hours = hours_of_steps(rates, "llama", 12, paper["longest_completion"]["gsm8k"][12], paper["steps"]["gsm8k"])
    [*of_bits] = re.search(r"^\| llama, gsm8k \|.* (\d+) h \| (\d+) h \|$", PAGE, re.MULTILINE).groups()
    assert of_bits[bits == "16 bits"] == f"{hours:.0f}"


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
