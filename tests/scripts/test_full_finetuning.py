"""--lora_rank 0 trains all weights: what the run saves, how it resumes, and what it refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.runs import metrics_of
from helpers.scripts import Ended, RunScript
from helpers.weights import Weights, same_weights
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

FLAGS = ("--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1", "--max_completion_length", "12")
FLAGS += ("--lora_rank", "0", "--learning_rate", "1e-4", "--save_steps", "1", "--logging_steps", "1")

FLAGS += ("--reward", "mine.py:remainder")
REWARD = """def remainder(completion_ids, **columns):
    return [float(sum(ids) % 3) for ids in completion_ids]
"""

Train = Callable[..., tuple[Ended, Path]]


@pytest.fixture(scope="module")
def train(tiny: Path, run_script: RunScript, tmp_path_factory: pytest.TempPathFactory) -> Train:
    directory = tmp_path_factory.mktemp("work")
    (directory / "mine.py").write_text(REWARD)

    def start(name: str, *argv: str, script: str = "train_gtpo.py", code: int = 0) -> tuple[Ended, Path]:
        method = ("--initial_entropy", "0.5", "--entropy_filter", "off") if script == "train_gtpo.py" else ()
        flags = (*FLAGS, *method, "--model", str(tiny), "--run_name", name, "--output_dir", name, *argv)
        return run_script(directory, script, *flags, code=code), directory / name

    return start


def weights(directory: Path) -> Weights:
    return load_file(directory / "model.safetensors")


def test_every_weight_is_trained_saved_and_resumed(train: Train, tiny: Path, run_script: RunScript) -> None:
    _, run = train("all", "--max_steps", "3")
    base = weights(tiny)
    trained = weights(run / "model")
    unmoved = [name for name, weight in base.items() if torch.equal(weight, trained[name])]
    assert base.keys() == trained.keys() and unmoved == []
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert not (run / "adapter").exists() and weights(run / "best").keys() == base.keys()
    assert "library_name: transformers" in (run / "model" / "README.md").read_text()

    train("half", "--max_steps", "1")
    _, half = train("half", "--max_steps", "3", "--resume")
    resumed = weights(half / "model")
    assert same_weights(trained, resumed)

    ended = run_script(run.parent, "evaluate.py", "--runs", "all", "--benchmarks", "arithmetic", code=2)
    assert "--model all/model" in ended.stderr
    small = ("--benchmarks", "arithmetic", "--limit", "2", "--k", "1", "--max_new_tokens", "4")
    run_script(run.parent, "evaluate.py", "--model", "all/model", *small)


def test_the_reference_of_grpo_is_the_base_model(train: Train) -> None:
    _, run = train("kl", "--max_steps", "3", "--beta", "0.04", script="train_grpo.py")
    first, *_, last = (line["kl"] for line in metrics_of(run))
    assert first == pytest.approx(0, abs=1e-7) and last > 1e-6
