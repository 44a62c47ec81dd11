"""Parts 7 to 9: memory and time of a step at the paper's lengths, with Llama-3.1-8B's shape if it fits; the head."""

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checks import HERE, ROOT, VARIANTS, Sizes, call, metrics_of, need

from gtpo.machine.memory import GIB, estimate, shape_of
from gtpo.machine.workload import Workload

PHASES = ("generation", "scoring", "loss", "backward", "optimizer", "other")
LARGE_NEEDS = 38.0, 20.0  # GiB of GPU memory and of disk, for an 8B model in 16 bits
MEASURED_STEPS = 3  # the first is a warm-up

Measured = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def measured(work: Path, model: Callable[[str], Path], sizes: Sizes, device: str) -> Measured:
    """A GTPO run with timed phases, once per backend: (run directory, description)."""
    done: dict[str, tuple[Path, dict[str, Any]]] = {}

    def get(variant: str) -> tuple[Path, dict[str, Any]]:
        need(VARIANTS[variant][0], device)
        if variant in done:
            return done[variant]
        name, reason = which_model(sizes, device, work)
        directory = work / "measured" / variant
        if directory.is_dir():
            pytest.fail("the measured run failed: see the part that ran first")
        about = {"model": name, "why": reason, "G": sizes.group, "prompt": sizes.long_prompt}
        about["completion"] = sizes.long_completion
        argv = [
            *("--model", model(name), "--dataset", long_prompts(directory, model(name), sizes.long_prompt)),
            *("--reward", f"{HERE / 'reward.py'}:text_sum", "--G", sizes.group, "--prompts_per_step", 1),
            *("--per_device_train_batch_size", 1, "--gradient_checkpointing", "true"),
            *("--max_prompt_length", sizes.long_prompt, "--max_completion_length", sizes.long_completion),
            *("--max_seq_length", sizes.long_prompt + sizes.long_completion, "--lora_rank", sizes.measured_rank),
            *("--max_steps", MEASURED_STEPS, "--save_steps", 100, "--logging_steps", 1, "--report_to", "none"),
            *("--log_completions", "false", "--initial_entropy", 10, "--output_dir", directory / "run"),
            *VARIANTS[variant][1],
            *(("--use_cpu", "true") if device == "cpu" else ()),
        ]
        call([HERE / "timed_run.py", "train_gtpo.py", *map(str, argv)], device, directory / "launched", sizes.seconds)
        done[variant] = directory / "run", about
        return done[variant]

    return get


def which_model(sizes: Sizes, device: str, directory: Path) -> tuple[str, str]:
    """The largest model that fits this machine, and the reason."""
    if "llama-8b" not in sizes.shapes:
        return "llama", "small shapes on a CPU"
    gpu = torch.cuda.get_device_properties(0).total_memory / GIB
    disk = shutil.disk_usage(directory).free / GIB + (15 if (directory / "models" / "llama-8b").is_dir() else 0)
    for available, needed, what in ((gpu, LARGE_NEEDS[0], "GPU memory"), (disk, LARGE_NEEDS[1], "free disk space")):
        if available < needed:
            return "llama", f"{available:.0f} GiB of {what}: the 8B shape needs {needed:.0f}"
    return "llama-8b", "it fits"


def long_prompts(directory: Path, model: Path, tokens: int) -> Path:
    """A JSONL file of prompts of just under ``tokens`` tokens, with chat template and system prompt."""
    from transformers import AutoTokenizer

    from gtpo.data.arithmetic import arithmetic
    from gtpo.prompts import to_messages

    tokenizer = AutoTokenizer.from_pretrained(model)
    questions = [row["question"] for row in arithmetic("train", 400, seed=0)]
    rows = []
    for first in range(8):
        text = questions[first]
        for question in questions[first + 8 :: 8] * 20:
            longer = f"{text} {question}"
            ids = tokenizer.apply_chat_template(to_messages(longer), add_generation_prompt=True, return_dict=False)
            if len(ids) > tokens:
                break
            text = longer
        rows.append({"prompt": text})
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("variant", ["unsloth", "transformers"])
def test_step_time(variant: str, measured: Measured, sizes: Sizes, numbers: dict[str, Any]) -> None:
    """Seconds of a step by phase: medians over the steps after the first; the phases add up to the step."""
    directory, about = measured(variant)
    numbers.update(about)
    steps = json.loads((directory / "phases.json").read_text())["steps"]
    assert len(steps) == MEASURED_STEPS
    numbers["seconds"] = {name: statistics.median(step.get(name, 0.0) for step in steps[1:]) for name in PHASES}
    numbers["seconds_of_a_step"] = statistics.median(sum(step.values()) for step in steps[1:])
    rows = metrics_of(directory)
    numbers["completion_length"] = rows[-1]["completion_length"]
    numbers["tokens_per_second"] = sizes.group * numbers["completion_length"] / numbers["seconds_of_a_step"]
    assert all(set(PHASES) - {"other"} <= step.keys() <= set(PHASES) for step in steps)
    for step, row in zip(steps, rows, strict=True):  # TRL's step_time: generation, scoring, loss and backward
        ours = sum(seconds for name, seconds in step.items() if name not in ("optimizer", "other"))
        assert "step_time" not in row or ours == pytest.approx(row["step_time"], rel=0.2, abs=0.1)


@pytest.mark.parametrize("variant", ["unsloth", "transformers"])
def test_peak_memory(variant: str, measured: Measured, sizes: Sizes, device: str, numbers: dict[str, Any]) -> None:
    """Peak memory compared with the estimate of ``--dry_run``: micro-batch 1 at the maximum lengths."""
    directory, about = measured(variant)
    numbers.update(about)
    settings = yaml.safe_load((directory / "config.yaml").read_text())
    parts = estimate(shape_of(settings["model"]), Workload.of(settings))
    numbers["estimate_gib"] = parts
    if device == "cpu":
        pytest.skip("peak memory is read on a GPU")
    phases = json.loads((directory / "phases.json").read_text())
    numbers |= {"start_gib": phases["start"], "peak_gib": phases["peak"], "used_gib": phases["used_gib"]}
    # vLLM allocates its share before training, in this process or another: with it, only what a phase adds is compared.
    added = max(phases["peak"][name] for name in ("loss", "backward")) - phases["start"]["loss"]
    expected = parts["activations"] + parts["head"] + parts["gradients"]
    numbers["step_over_estimate"] = added / expected
    if not settings["use_vllm"]:
        trained = sum(parts[name] for name in ("weights", "LoRA", "optimizer"))
        numbers["held_over_estimate"] = phases["start"]["loss"] / trained
        numbers["peak_over_estimate"] = max(phases["peak"].values()) / sum(parts.values())
        if about["model"] == "llama-8b":
            assert 0.5 < numbers["peak_over_estimate"] < 1.5, numbers
    assert phases["used_gib"] < torch.cuda.get_device_properties(0).total_memory / GIB


def test_loss_benchmark(device: str, work: Path, sizes: Sizes, numbers: dict[str, Any]) -> None:
    """The results of benchmarks/bench_loss.py; on a GPU with 12 completions of 1,500 tokens of Llama-3.1-8B."""
    command = [ROOT / "benchmarks" / "bench_loss.py", "--device", device, *sizes.benchmark, "--output", "loss.json"]
    call(command, device, work / "benchmark", sizes.seconds)
    numbers.update(json.loads((work / "benchmark" / "loss.json").read_text()))
    assert numbers
