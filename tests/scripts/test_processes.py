"""Several processes (gloo, CPU) give the same updates and metrics as one, for any split of a group."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.canned import GROUP, batch_of, trained_weights
from helpers.files import read_json
from helpers.runs import metrics_of
from helpers.scripts import ROOT, run_process
from helpers.weights import Weights, adapter_of, same_weights
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SPEED = ("runtime", "samples_per_second", "steps_per_second")
TIMES = {"step_time", "tokens_per_second", *(f"{split}_{name}" for split in ("train", "eval") for name in SPEED)}
OF_BATCHES = ("std", "min_", "max_")  # of held-out rows: of each batch, then the mean over them


def torchrun(processes: int, *argv: object, cwd: Path = ROOT) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    run_process([sys.executable, *launch, *map(str, argv)], cwd=cwd, env=os.environ | {"PYTHONPATH": path})


def train(processes: int, method: str, tiny: Path, out: Path, settings: Any, *flags: str) -> Path:
    """Train a canned trainer in ``processes`` processes; the directory with the weights and the log of rank 0."""
    out.mkdir()
    torchrun(processes, ROOT / "tests/helpers/canned.py", method, tiny, out, json.dumps(settings), *flags)
    return out


def assert_close(found: Weights, expected: Weights) -> None:
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def untimed(rows: list[dict[str, Any]], *without: str) -> list[dict[str, Any]]:
    """Without what the clock determines, and without names that contain one of these words."""
    return [
        {name: value for name, value in row.items() if name not in TIMES and not any(map(name.count, without))}
        for row in rows
    ]


def assert_as_one_process(out: Path, single: Any, *without: str) -> None:
    """The weights and the log of several processes are those of one, which is trained here."""
    assert_close(load_file(out / "weights.safetensors"), trained_weights(single))
    log = untimed(read_json(out / "log.json"), *without)
    for row, other in zip(log, untimed(single.state.log_history, *without), strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("method", "beta", "processes", "batch"),
    [("gtpo", 0.0, 4, 1), ("gtpo_trl", 0.0, 2, 3), ("grpo", 0.04, 4, 1), ("rloo", 0.0, 2, 3)],
)
def test_steps_match_one_process(
    method: str, beta: float, processes: int, batch: int, build: Any, tiny: Path, tmp_path: Path
) -> None:
    settings = {"max_steps": 4, "beta": beta, "num_train_epochs": 2}
    split = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": GROUP // (processes * batch)}
    out = train(processes, method, tiny, tmp_path / "several", settings | split)
    assert_as_one_process(out, build(method, "single", **settings))


def test_held_out_metrics_match_one_process(build: Any, tiny: Path, tmp_path: Path) -> None:
    """Five rows over two processes: four of them in an even batch, and one that both processes evaluate."""
    settings = {"held_out": 5, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "num_generations_eval": 1}
    split = {"per_device_train_batch_size": GROUP // 2, "per_device_eval_batch_size": 2}
    out = train(2, "gtpo", tiny, tmp_path / "several", settings | split)
    single = build("gtpo", "single", per_device_eval_batch_size=5, **settings)
    assert_as_one_process(out, single, *OF_BATCHES)
    entropies = [row["eval_entropy"] for row in single.state.log_history if "eval_entropy" in row]
    assert len(entropies) == len({*entropies}) == 2


def test_every_aggregation_matches_one_process(build: Any, tiny: Path, tmp_path: Path) -> None:
    """bnpo depends on the micro-batches, so with one completion each it is grpo."""
    halves = {"per_device_train_batch_size": GROUP // 4, "gradient_accumulation_steps": 2}
    ones = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": GROUP // 2}
    splits = {"grpo": halves, "dr_grpo": halves, "dapo": halves, "bnpo": ones}
    steps = {"max_steps": 3, "num_generations": GROUP // 2}
    each = [steps | {"loss_type": loss_type} | split for loss_type, split in splits.items()]
    out = train(2, "gtpo", tiny, tmp_path / "several", each)
    for number, loss_type in enumerate(["grpo", "dr_grpo", "dapo", "grpo"]):
        single = build("gtpo", "one", loss_type=loss_type, **steps)
        assert_close(load_file(out / f"weights-{number}.safetensors"), trained_weights(single))


def test_fsdp2_gradients_match_one_process(build: Any, tiny: Path, tmp_path: Path) -> None:
    single = build("gtpo", "single")
    batch = batch_of(single)
    single.compute_loss(single.model, batch).backward()
    expected = {name: weight.grad for name, weight in single.model.named_parameters() if weight.requires_grad}
    settings = {"per_device_train_batch_size": GROUP // 2}
    out = train(2, "gtpo", tiny, tmp_path / "sharded", settings, "--sharded")
    assert_close(load_file(out / "weights.safetensors"), expected)


def launch_fsdp2(*argv: object, cwd: Path = ROOT) -> None:
    """A script in two processes, with configs/accelerate/fsdp2.yaml and Accelerate's FSDP2 on a CPU."""
    launch = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "configs/accelerate/fsdp2.yaml"]
    launch += ["--num_processes", "2", "--main_process_port", "0"]
    command = [sys.executable, *launch, ROOT / "tests/helpers/fsdp_cpu.py", *argv]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    run_process([*map(str, command)], cwd=cwd, env=os.environ | {"PYTHONPATH": path})


@pytest.mark.parametrize(("method", "beta"), [("gtpo", 0.0), ("grpo", 0.04)])
def test_fsdp2_steps_match_one_process(method: str, beta: float, build: Any, tiny: Path, tmp_path: Path) -> None:
    """Through Accelerate, every parameter sharded; DDP equals one process, too."""
    settings = {"max_steps": 3, "beta": beta}
    half = {"per_device_train_batch_size": GROUP // 2}
    out = tmp_path / "sharded"
    out.mkdir()
    launch_fsdp2(ROOT / "tests/helpers/canned.py", method, tiny, out, json.dumps(settings | half))
    kinds = read_json(out / "parameters.json")
    assert len(kinds) == (37 if beta else 29) and {*kinds.values()} == {"DTensor"}
    assert_as_one_process(out, build(method, "single", **settings))


def test_a_run_under_fsdp2_resumes(tiny: Path, tmp_path: Path) -> None:
    argv = ["--model", tiny, "--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1", "--max_steps", "4"]
    argv += ["--limit", "100", "--save_steps", "2", "--max_completion_length", "8", "--initial_entropy", "0.5"]
    launch_fsdp2(ROOT / "train_gtpo.py", *argv, cwd=tmp_path)
    (run,) = (tmp_path / "outputs").iterdir()
    expected = adapter_of(run / "adapter")
    metrics = metrics_of(run)
    of_checkpoint = {path.name for path in (run / "checkpoint-2").iterdir()}
    assert {"pytorch_model_fsdp.bin", "optimizer.bin", "adapter_model.safetensors"} <= of_checkpoint
    shutil.rmtree(run / "checkpoint-4")
    shutil.rmtree(run / "adapter")
    launch_fsdp2(ROOT / "train_gtpo.py", *argv, "--resume", run, cwd=tmp_path)
    assert same_weights(adapter_of(run / "adapter"), expected)
    assert untimed(metrics_of(run)) == untimed(metrics)


def test_two_processes_resume_in_one_directory(tiny: Path, tmp_path: Path) -> None:
    """In the second of three epochs, each of two steps."""
    argv = ["--model", tiny, "--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "2", "--max_steps", "6"]
    argv += ["--limit", "5", "--save_steps", "3", "--max_completion_length", "8", "--initial_entropy", "0.5"]
    torchrun(2, ROOT / "train_gtpo.py", *argv, cwd=tmp_path)
    (run,) = (tmp_path / "outputs").iterdir()  # one directory for both processes
    expected = adapter_of(run / "adapter")
    metrics = metrics_of(run)
    shutil.rmtree(run / "checkpoint-6")
    shutil.rmtree(run / "adapter")
    assert {path.name for path in (run / "checkpoint-3").glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    torchrun(2, ROOT / "train_gtpo.py", *argv, "--resume", run, cwd=tmp_path)
    assert same_weights(adapter_of(run / "adapter"), expected)
    assert untimed(metrics_of(run)) == untimed(metrics)
