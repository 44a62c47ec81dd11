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
from helpers.scripts import run_process
from helpers.weights import adapter_of, same_weights
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

STEPS = 4
SPEED = ("runtime", "samples_per_second", "steps_per_second")
TIMING_METRICS = {"step_time", *(f"{split}_{name}" for split in ("train", "eval") for name in SPEED)}


def torchrun(
    processes: int, method: str, tiny: Path, out: Path, settings: dict[str, Any] | list[dict[str, Any]], *flags: str
) -> Path:
    """Train in ``processes`` processes; return the directory with the weights and the log of rank 0."""
    out.mkdir()
    here = Path(__file__).parents[1]
    run_process(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)),
            *(str(here / "helpers" / "canned.py"), method, str(tiny), str(out), json.dumps(settings), *flags),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent), str(here)]), "OMP_NUM_THREADS": "1"},
    )
    return out


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(
            found[name], weight, atol=1e-6, rtol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("method", "beta", "processes", "batch"),
    [("gtpo", 0.0, 4, 1), ("gtpo_trl", 0.0, 2, 3), ("grpo", 0.04, 4, 1), ("rloo", 0.0, 2, 3)],
)
def test_steps_match_one_process(
    method: str, beta: float, processes: int, batch: int, build: Any, tiny: Path, tmp_path: Path
) -> None:
    settings = {"max_steps": STEPS, "beta": beta, "num_train_epochs": 2}
    single = build(method, "single", **settings)
    expected = trained_weights(single)
    split = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": GROUP // (processes * batch)}
    out = torchrun(processes, method, tiny, tmp_path / "several", settings | split)
    assert_close(load_file(out / "weights.safetensors"), expected)
    log = read_json(out / "log.json")
    assert len(log) == len(single.state.log_history) == STEPS + 1
    for mine, other in zip(log, single.state.log_history, strict=True):
        assert mine.keys() == other.keys()
        for name in mine.keys() - TIMING_METRICS:
            assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), (name, other["step"])


def test_held_out_metrics_match_one_process(build: Any, tiny: Path, tmp_path: Path) -> None:
    """Five rows over two processes: four of them in an even batch, and one that both processes evaluate."""
    settings = {"held_out": 5, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "num_generations_eval": 1}
    single = build("gtpo", "single", per_device_eval_batch_size=5, **settings)
    expected = trained_weights(single)
    split = {"per_device_train_batch_size": GROUP // 2, "per_device_eval_batch_size": 2}
    out = torchrun(2, "gtpo", tiny, tmp_path / "several", settings | split)
    assert_close(load_file(out / "weights.safetensors"), expected)
    logs = (read_json(out / "log.json"), single.state.log_history)
    mine, other = ([row for row in log if "eval_reward" in row] for log in logs)
    assert len(mine) == len(other) == 2 and len({row["eval_entropy"] for row in other}) == 2
    of_batches = ("std", "min_", "max_")  # of each batch, then the mean over them
    for found, single_row in zip(mine, other, strict=True):
        assert found.keys() == single_row.keys()
        for name in found:
            if not any(part in name for part in of_batches) and name not in TIMING_METRICS:
                assert found[name] == pytest.approx(single_row[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_every_aggregation_matches_one_process(method: str, build: Any, tiny: Path, tmp_path: Path) -> None:
    """GRPO as TRL's trainer; bnpo depends on the micro-batches, so with one completion each it is grpo."""
    halves = {"per_device_train_batch_size": GROUP // 4, "gradient_accumulation_steps": 2}
    ones = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": GROUP // 2}
    splits = {"grpo": halves, "dr_grpo": halves, "dapo": halves, "bnpo": ones}
    steps = {"max_steps": 3, "num_generations": GROUP // 2}
    each = [steps | {"loss_type": loss_type} | split for loss_type, split in splits.items()]
    out = torchrun(2, method, tiny, tmp_path / "several", each)
    for number, loss_type in enumerate(["grpo", "dr_grpo", "dapo", "grpo"]):
        single = build("trl" if method == "grpo" else method, "one", loss_type=loss_type, **steps)
        assert_close(load_file(out / f"weights-{number}.safetensors"), trained_weights(single))


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_fsdp2_gradients_match_one_process(method: str, build: Any, tiny: Path, tmp_path: Path) -> None:
    single = build(method, "single")
    batch = batch_of(single)
    single.compute_loss(single.model, batch).backward()
    expected = {name: weight.grad for name, weight in single.model.named_parameters() if weight.requires_grad}
    settings = {"per_device_train_batch_size": GROUP // 2}
    out = torchrun(2, method, tiny, tmp_path / "sharded", settings, "--sharded")
    assert_close(load_file(out / "weights.safetensors"), expected)


def test_two_processes_resume_in_one_directory(tiny: Path, tmp_path: Path) -> None:
    argv = ["--model", str(tiny), "--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1", "--max_steps", "4"]
    argv += ["--save_steps", "2", "--max_completion_length", "8", "--initial_entropy", "0.5"]
    here = Path(__file__).parents[2]

    def launch(*more: str) -> Path:
        run_process(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
                *(str(here / "train_gtpo.py"), *argv, *more),
            ],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        (run,) = (tmp_path / "outputs").iterdir()  # one directory for both processes
        return run

    run = launch()
    expected = adapter_of(run / "adapter")
    metrics = (run / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(run / "checkpoint-4")
    shutil.rmtree(run / "adapter")
    assert {path.name for path in (run / "checkpoint-2").glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    launch("--resume", str(run))
    found = adapter_of(run / "adapter")
    assert same_weights(found, expected)
    resumed_metrics = (run / "metrics.jsonl").read_text().splitlines()
    for line, other in zip(map(json.loads, resumed_metrics), map(json.loads, metrics), strict=True):
        assert {k: v for k, v in line.items() if k not in (*TIMING_METRICS, "tokens_per_second")} == {
            k: v for k, v in other.items() if k not in (*TIMING_METRICS, "tokens_per_second")
        }
