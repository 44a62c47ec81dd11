"""Several processes (gloo, CPU) give the same updates and metrics as one, for any split of a group."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

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


def launch_fsdp2(*argv: object, cwd: Path = ROOT) -> None:
    """A script in two processes, with configs/accelerate/fsdp2.yaml and Accelerate's FSDP2 on a CPU."""
    launch = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "configs/accelerate/fsdp2.yaml"]
    launch += ["--num_processes", "2", "--main_process_port", "0"]
    command = [sys.executable, *launch, ROOT / "tests/helpers/fsdp_cpu.py", *argv]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    run_process([*map(str, command)], cwd=cwd, env=os.environ | {"PYTHONPATH": path})


Train = Callable[[str], Path]


@pytest.fixture(scope="module")
def train(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """``train("two")``: the directory with weights and logs of ``CASES["two"]``, trained in one launch."""
    launchers = {"two": partial(torchrun, 2), "four": partial(torchrun, 4), "fsdp2": launch_fsdp2}

    @cache
    def train(launcher: str) -> Path:
        out = tmp_path_factory.mktemp("several")
        each = []
        for name, case in CASES[launcher].items():
            settings = case.settings | case.split
            each.append({"name": name, "method": case.method, "settings": settings, "is_sharded": name == "sharded"})
        launchers[launcher](ROOT / "tests/helpers/canned.py", tiny, out, json.dumps(each))
        return out

    return train


class Case(NamedTuple):
    """A trainer of one process, and what divides its groups among several."""

    method: str
    settings: dict[str, Any]
    split: dict[str, Any]


def split(processes: int, batch: int) -> dict[str, int]:
    return {"per_device_train_batch_size": batch, "gradient_accumulation_steps": GROUP // (processes * batch)}


EPOCHS = {"max_steps": 4, "num_train_epochs": 2, "beta": 0.0}
EVALUATED = {"held_out": 5, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "num_generations_eval": 1}
SMALL = {"max_steps": 3, "num_generations": GROUP // 2}
# bnpo depends on the micro-batches, so with one completion each it is grpo
AGGREGATIONS = {"grpo": GROUP // 4, "dr_grpo": GROUP // 4, "dapo": GROUP // 4, "bnpo": 1}
CASES = {
    "four": {
        "gtpo": Case("gtpo", EPOCHS, split(4, 1)),
        "grpo": Case("grpo", EPOCHS | {"beta": 0.04}, split(4, 1)),
    },
    "two": {
        "gtpo_trl": Case("gtpo_trl", EPOCHS, split(2, 3)),
        "rloo": Case("rloo", EPOCHS, split(2, 3)),
        "held_out": Case("gtpo", EVALUATED, split(2, GROUP // 2) | {"per_device_eval_batch_size": 2}),
        **{loss: Case("gtpo", SMALL | {"loss_type": loss}, split(2, batch)) for loss, batch in AGGREGATIONS.items()},
        "sharded": Case("gtpo", {}, split(2, GROUP // 2)),
    },
    "fsdp2": {
        "gtpo": Case("gtpo", {"max_steps": 3, "beta": 0.0}, split(2, GROUP // 2)),
        "grpo": Case("grpo", {"max_steps": 3, "beta": 0.04}, split(2, GROUP // 2)),
    },
}


def assert_close(found: Weights, expected: Weights) -> None:
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def untimed(rows: list[dict[str, Any]], *without: str) -> list[dict[str, Any]]:
    """Without what the clock determines, and without names that contain one of these words."""
    return [
        {name: value for name, value in row.items() if name not in TIMES and not any(map(name.count, without))}
        for row in rows
    ]


def assert_as_one_process(out: Path, name: str, single: Any, *without: str) -> None:
    """The weights and the log of several processes are those of one, which is trained here."""
    assert_close(load_file(out / f"weights-{name}.safetensors"), trained_weights(single))
    log = untimed(read_json(out / f"log-{name}.json"), *without)
    for row, other in zip(log, untimed(single.state.log_history, *without), strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("case", ["four gtpo", "four grpo", "two gtpo_trl", "two rloo", "fsdp2 gtpo", "fsdp2 grpo"])
def test_steps_match_one_process(case: str, build: Any, train: Train) -> None:
    launcher, name = case.split()
    method, settings, _ = CASES[launcher][name]
    assert_as_one_process(train(launcher), name, build(method, "single", **settings))


def test_held_out_metrics_match_one_process(build: Any, train: Train) -> None:
    """Five rows over two processes: four of them in an even batch, and one that both processes evaluate."""
    single = build("gtpo", "single", per_device_eval_batch_size=5, **EVALUATED)
    assert_as_one_process(train("two"), "held_out", single, *OF_BATCHES)
    entropies = [row["eval_entropy"] for row in single.state.log_history if "eval_entropy" in row]
    assert len(entropies) == len({*entropies}) == 2


def test_every_aggregation_matches_one_process(build: Any, train: Train) -> None:
    for name in AGGREGATIONS:
        single = build("gtpo", "one", loss_type="grpo" if name == "bnpo" else name, **SMALL)
        assert_close(load_file(train("two") / f"weights-{name}.safetensors"), trained_weights(single))


def test_fsdp2_gradients_match_one_process(build: Any, train: Train) -> None:
    single = build("gtpo", "single")
    batch = batch_of(single)
    single.compute_loss(single.model, batch).backward()
    expected = {name: weight.grad for name, weight in single.model.named_parameters() if weight.requires_grad}
    assert_close(load_file(train("two") / "weights-sharded.safetensors"), expected)


@pytest.mark.parametrize(("name", "parameters"), [("gtpo", 29), ("grpo", 37)])
def test_fsdp2_shards_every_parameter(name: str, parameters: int, train: Train) -> None:
    """Also of the reference model, a second adapter."""
    kinds = read_json(train("fsdp2") / f"parameters-{name}.json")
    assert len(kinds) == parameters and {*kinds.values()} == {"DTensor"}


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
