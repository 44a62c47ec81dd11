"""First light: `pytest -m gpu` runs its stages on a GPU; without one its report, its limits and its page.

tests/backends/ runs the stages in miniature.
"""

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.files import read_json
from helpers.scripts import ROOT

from gtpo.files import CONFIGS, read_yaml
from gtpo.models.hours import hours_of_steps

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "benchmarks/gpu"))
import page
import stages
from stages import STAGES, Bench, Stage, run_stage, stored


@pytest.fixture(scope="module")
def on_gpu() -> Bench:
    """Models, runs and logs lie in outputs/first-light/, and stay."""
    torch.set_num_threads(os.cpu_count() or 1)  # tests/conftest.py sets one; the reference gradient is a CPU's
    return Bench("cuda", ROOT / "outputs/first-light", stages.launch_process)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU")
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_on_this_gpu(name: str, on_gpu: Bench, request: pytest.FixtureRequest) -> None:
    """A stage that has passed runs again if ``-k`` names it."""
    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")
    report = ROOT / f"results/gpu/{gpu}.json"
    before = stored(report).get(name, {})
    if before.get("outcome") == "passed" and not request.config.option.keyword:
        pytest.skip(f"passed before: {before['verdict']}")
    print(f"\nabout {STAGES[name].minutes:g} minutes")
    entry = run_stage(name, on_gpu, report)
    print(f"{entry['seconds'] / 60:.1f} minutes: {entry['verdict']}")
    assert entry["outcome"] == "passed", entry["verdict"]


def good(bench: Bench) -> str:
    bench.numbers["value"] = 1
    return "good"


def wrong(bench: Bench) -> str:
    bench.numbers["value"] = 2
    raise AssertionError("one is not two")


def broken(bench: Bench) -> str:
    raise OSError("no disk")


def slow(bench: Bench) -> str:
    bench.deadline = time.monotonic() - 1
    bench.run(ROOT / "evaluate.py", name="late")
    return "unreachable"


def stopped(bench: Bench) -> str:
    bench.numbers["value"] = 3
    raise KeyboardInterrupt


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    for stage in (good, wrong, broken, slow, stopped):
        monkeypatch.setitem(STAGES, stage.__name__, Stage(stage, 1))
    return Bench("cpu", tmp_path, stages.launch_process, deadline=time.monotonic() + 60)


def test_each_stage_is_stored_with_its_outcome(bench: Bench, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    for name in ("good", "wrong", "broken", "slow"):
        assert run_stage(name, bench, report) == read_json(report)["stages"][name]
    with pytest.raises(KeyboardInterrupt):
        run_stage("stopped", bench, report)
    found = {name: (entry["outcome"], entry["verdict"], entry["numbers"]) for name, entry in stored(report).items()}
    assert found == {
        "good": ("passed", "good", {"value": 1}),
        "wrong": ("FAILED", "one is not two", {"value": 2}),
        "broken": ("FAILED", "OSError: no disk", {}),
        "slow": ("timeout", "stopped after 4 minutes", {}),
        "stopped": ("interrupted", "not finished", {"value": 3}),
    }
    assert read_json(report)["environment"]["device"] == "cpu"


def test_the_sizes_of_a_step_come_first() -> None:
    assert next(iter(STAGES)) == "step_prompts" and sorted(stages.PROMPTS) == [1, 2, 4, 8]
    assert stages.SIZES["cuda"].group == 12  # 12, 24, 48 and 96 sequences


def test_a_model_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(directory: Path, name: str, *_: Any) -> None:
        built.append(name)
        directory.mkdir(parents=True)
        (directory / "config.json").touch()

    monkeypatch.setattr(stages, "build_model", build)
    for _ in range(2):  # a later command
        bench = Bench("cpu", tmp_path, stages.launch_process)
        assert bench.model("llama") == tmp_path / "models" / "llama"
    assert built == ["llama"]


def test_a_process_has_the_rest_of_the_time(bench: Bench, tmp_path: Path) -> None:
    (script := tmp_path / "run.py").write_text("import sys, time\nprint(sys.argv[1:])\ntime.sleep(float(sys.argv[1]))")
    before = "import gtpo.errors, sys\nassert sys.argv[1:] == ['0']"
    assert bench.succeed(script, 0, name="run", before=before) == "['0']\n" == (tmp_path / "run.txt").read_text()
    with pytest.raises(AssertionError, match=r"^run: exit code 1: ValueError: .* 'x'$"):
        bench.succeed(script, "x", name="run")
    bench.deadline = time.monotonic() + 5
    with pytest.raises(stages.subprocess.TimeoutExpired):
        bench.run(script, 60, name="sleep")
    assert (tmp_path / "sleep.txt").read_text() == "['60']\n"  # how far it came


PAGE = (ROOT / "docs" / "gpu.md").read_text()


def test_the_page_is_what_the_reports_say() -> None:
    assert page.gpu_page(PAGE, page.stored_reports()) == PAGE, "run `python benchmarks/gpu/page.py`"


@pytest.mark.parametrize(("stage", "bits"), [("step_group", "4 bits"), ("step_16bit", "16 bits")])
def test_rates_of_the_h100_are_those_of_its_report(stage: str, bits: str) -> None:
    """One length was measured: what generation takes is by token, the rest by completion."""
    paper = read_yaml(CONFIGS / "experiments.yaml")["paper"]
    [report] = [report for report in page.stored_reports() if "H100" in report["environment"]["gpu"]]
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
    entry = run_stage("step_trl", Bench("cpu", tmp_path, stages.launch_process), tmp_path / "report.json")
    assert entry["outcome"] == "passed", entry
    assert {"generation", "loss", "backward", "optimizer"} <= entry["numbers"]["seconds"].keys()
    [phases] = tmp_path.glob("step-*/phases.json")
    assert len(read_json(phases)["steps"]) == 3 and read_json(phases)["open"] == []
    assert entry["numbers"]["seconds_of_a_step"] > 0 and entry["numbers"]["longest"] == 12


@pytest.mark.slow
def test_a_step_of_four_prompts_has_their_tokens(tmp_path: Path) -> None:
    bench = Bench("cpu", tmp_path, stages.launch_process, deadline=time.monotonic() + 300)
    step = stages.Step("gsm8k", backend="transformers", micro_batch="G", prompts=4)
    found = step.measure(bench)
    assert (found["G"], found["longest"]) == (4, 6)
    rate = found["tokens_per_second"] * found["seconds_of_a_step"]
    assert 4 * 4 <= rate <= 4 * 4 * 6  # four groups of four completions of 1 to 6 tokens
