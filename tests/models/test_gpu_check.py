"""The GPU tests without a GPU: the parts that run on a CPU, the report, and that `make test` does not collect it."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scripts import ROOT

GPU = ROOT / "tests" / "gpu"


def pytest_run(*argv: str | Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run pytest with the settings of this repository and without a GPU; the report goes to ``directory``."""
    output = ("--gpu-check-output", directory / "report") if "--gpu-check-device" in argv else ()
    options = ("-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--basetemp", directory / "pytest")
    command = [sys.executable, "-m", "pytest", *map(str, (*argv, *output, *options))]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        command, cwd=ROOT, env=variables | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=900
    )


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report on a CPU: all parts except three of the four small training runs."""
    directory = tmp_path_factory.mktemp("gpu-check")
    chosen = "not (qwen and transformers) and not (grpo and transformers)"
    ended = pytest_run(GPU, "--gpu-check-device", "cpu", "-k", chosen, directory=directory)
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert sorted(path.name for path in (directory / "report").iterdir()) == ["cpu.json"]
    report = json.loads((directory / "report" / "cpu.json").read_text())
    assert report.keys() == {"environment", "parts"}
    environment = report["environment"]
    assert environment["device"] == "cpu" and environment["packages"]["torch"] == torch.__version__
    for part in report["parts"].values():
        assert part["git_revision"] == environment["git_revision"]
        assert part["outcome"] in ("passed", "skipped") and part["seconds"] >= 0
    return report["parts"]


@pytest.mark.slow
def test_parts_that_need_a_gpu_are_skipped_with_a_reason(parts: dict[str, Any]) -> None:
    skipped = {name: part["reason"] for name, part in parts.items() if part["outcome"] == "skipped"}
    unsloth = "needs a GPU: bitsandbytes, unsloth, vllm run there only"
    names = ("steps[llama-gtpo-unsloth]", "adapter[unsloth]", "resume[unsloth]")
    assert [skipped[name] for name in names] == [unsloth] * 3
    assert skipped["adapter[transformers-vllm]"] == "needs a GPU: vllm run there only"
    passed = {name for name, part in parts.items() if part["outcome"] == "passed"}
    heads = {f"head[{dtype}]" for dtype in ("bfloat16", "float16", "float32", "float64")}
    runs = {"steps[llama-gtpo-transformers]", "resume[transformers]"}
    assert heads | runs | {"environment"} <= passed


@pytest.mark.slow
def test_errors_of_the_head_are_in_the_report(parts: dict[str, Any]) -> None:
    exact, half = (parts[f"head[{dtype}]"]["numbers"]["40x64x4096"] for dtype in ("float64", "bfloat16"))
    assert exact["confident_rows"] >= 13
    assert exact["ours"]["gradient"] < 1e-12 < 1e-5 < half["ours"]["gradient"] < 0.01
    assert exact["logits_path"] == dict.fromkeys(exact["logits_path"], 0.0)  # the reference itself
    assert half["ours"]["gradient_confident"] < 0.03 < half["logits_path"]["gradient_confident"]


@pytest.mark.slow
def test_numbers_of_the_training_run(parts: dict[str, Any]) -> None:
    numbers = parts["steps[llama-gtpo-transformers]"]["numbers"]
    assert len(numbers["loss"]) == len(numbers["grad_norm"]) == len(numbers["entropy"]) == 4
    assert numbers["sampler_logp_gap"] == []
    # A random model is nearly uniform: its entropy is about ln V with V = 1024.
    assert numbers["initial_entropy"] == pytest.approx(math.log(1024), abs=0.2)
    for loss, entropy in zip(numbers["loss"], numbers["entropy"], strict=True):
        # Eq. 11: gamma <H>; the advantages of a group sum to 0, but for the conflict correction
        assert loss == pytest.approx(0.1 * entropy, rel=0.15)


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_run(parts: dict[str, Any]) -> None:
    numbers = parts["resume[transformers]"]["numbers"]
    assert numbers["same_completions"] and numbers["difference_over_distance"] < 1e-3
    assert numbers["entropy"][0] == pytest.approx(numbers["entropy"][1], rel=1e-4)


@pytest.mark.slow
def test_the_adapter_changes_greedy_completions(parts: dict[str, Any]) -> None:
    part = parts["adapter[transformers]"]
    assert part["reason"] == "needs a GPU: vllm run there only"  # after the PEFT half has run
    assert part["numbers"]["changed_by_the_adapter"] > 0.5


PARTS = """
import pytest

def test_good(numbers): numbers["value"] = 1
def test_bad(numbers):
    numbers["value"] = 2
    assert 1 == 2, "one is not two"
def test_left_out(): pytest.skip("no reason")
@pytest.fixture
def broken(): raise OSError("no disk")
def test_broken(broken): pass
"""


@pytest.fixture
def other_parts(tmp_path: Path) -> Path:
    """The conftest of tests/gpu with the parts above."""
    directory = tmp_path / "parts"
    directory.mkdir()
    for name in ("conftest.py", "checks.py"):
        shutil.copy(GPU / name, directory)
    (directory / "test_parts.py").write_text(PARTS)
    return directory


@pytest.mark.slow
def test_failed_parts_are_in_the_report_with_their_numbers(other_parts: Path, tmp_path: Path) -> None:
    ended = pytest_run(other_parts, "--gpu-check-device", "cpu", directory=tmp_path)
    assert ended.returncode == 1 and "report: " in ended.stdout
    found = json.loads((tmp_path / "report" / "cpu.json").read_text())["parts"]
    assert {name: part["outcome"] for name, part in found.items()} == {
        "good": "passed",
        "bad": "failed",
        "left_out": "skipped",
        "broken": "failed",
    }
    assert found["bad"]["message"].startswith("one is not two") and found["bad"]["numbers"] == {"value": 2}
    assert found["left_out"]["reason"] == "no reason" and found["broken"]["message"] == "no disk"

    first = found["good"] | {"git_revision": "an earlier one"}
    report = {"environment": {}, "parts": {"good": first, "bad": found["bad"]}}
    (tmp_path / "report" / "cpu.json").write_text(json.dumps(report))
    pytest_run(other_parts, "--gpu-check-device", "cpu", "-k", "bad", directory=tmp_path)
    again = json.loads((tmp_path / "report" / "cpu.json").read_text())["parts"]
    assert again.keys() == {"good", "bad"} and again["good"] == first  # a part that is not selected keeps its entry
    assert not list((tmp_path / "report").glob("*.tmp"))


@pytest.mark.slow
def test_without_a_gpu_the_check_exits_with_one_line(tmp_path: Path) -> None:
    ended = pytest_run(GPU, directory=tmp_path)
    assert ended.returncode == 4
    assert "PyTorch sees no GPU (" in ended.stderr and "Traceback" not in ended.stderr + ended.stdout


@pytest.mark.slow
def test_make_test_does_not_collect_the_check(tmp_path: Path) -> None:
    """Otherwise `make test` on a machine with a GPU would take half an hour."""
    other = [path for path in (ROOT / "tests").iterdir() if path.is_dir() and path != GPU]
    ignored = [option for path in other for option in ("--ignore", path)]
    ended = pytest_run("--collect-only", "--ignore-glob", ROOT / "tests" / "test_*.py", *ignored, directory=tmp_path)
    assert ended.returncode == 5, ended.stdout  # nothing collected


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that compares greedy tokens."""
    monkeypatch.syspath_prepend(GPU)
    import test_gpu_training

    return test_gpu_training


def test_greedy_tokens_may_differ_only_at_near_ties(training: Any, tiny: Path, tmp_path: Path) -> None:
    from greedy import greedy_tokens
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    policy = get_peft_model(policy, lora)
    policy.save_pretrained(tmp_path)
    found = greedy_tokens("transformers", str(tiny), tmp_path, 5)
    prompts, texts = found["prompts"], found["adapter"]
    assert training.differences(str(tiny), tmp_path, prompts, texts, texts) == []

    with torch.inference_mode():
        logits = policy(input_ids=torch.tensor([prompts[0] + texts[0][:2]])).logits[0, -1].double()
    best, second, *_, last = logits.argsort(descending=True).tolist()
    assert texts[0][2] == best
    for other in (second, last):
        changed = [[*texts[0][:2], other, *texts[0][3:]], *texts[1:]]
        (difference,) = training.differences(str(tiny), tmp_path, prompts, texts, changed)
        assert difference == pytest.approx(float((logits[best] - logits[other]) / logits.std()), rel=1e-4)
    assert difference > training.NEAR_TIE
    assert training.differences(str(tiny), tmp_path, prompts, texts, [texts[0][:2], *texts[1:]]) == [math.inf]
    assert training.share_of_equal(texts, changed) == 7 / 8


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_the_tokenizer_of_a_built_model_has_no_more_tokens_than_its_embedding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers loads Qwen2Tokenizer for a Qwen, which adds a token; Unsloth would resize the embedding."""
    monkeypatch.syspath_prepend(GPU)
    import checks
    from transformers import AutoTokenizer

    shape = checks.SIZES["cpu"].shapes[name]
    checks.build_model(tmp_path, name, shape, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert shape.vocab_size - 8 <= len(tokenizer) <= shape.vocab_size
