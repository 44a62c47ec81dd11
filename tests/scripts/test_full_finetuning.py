"""--lora_rank 0 trains all weights: what the run saves, how it resumes, and what it refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.runs import metrics_of
from helpers.scripts import RunScript
from helpers.weights import Weights, same_weights
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

FLAGS = ("--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1", "--max_completion_length", "12")
FLAGS += ("--lora_rank", "0", "--learning_rate", "1e-4", "--save_steps", "1", "--logging_steps", "1")
FLAGS += ("--reward", "mine.py:remainder", "--max_steps", "3", "--limit", "100")
REWARD = """def remainder(completion_ids, **columns):
    return [float(sum(ids) % 3) for ids in completion_ids]
"""

Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(tiny: Path, run_script: RunScript, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """``train("train_gtpo.py", name, *flags)``: the directory of the run."""
    directory = tmp_path_factory.mktemp("work")
    (directory / "mine.py").write_text(REWARD)

    def start(script: str, name: str, *argv: str) -> Path:
        run_script(directory, script, *FLAGS, "--model", str(tiny), "--output_dir", name, *argv)
        return directory / name

    return start


def weights(directory: Path) -> Weights:
    return load_file(directory / "model.safetensors")


def test_every_weight_is_trained_saved_and_resumed(train: Train, tiny: Path, run_script: RunScript) -> None:
    gtpo = ("--initial_entropy", "0.5", "--entropy_filter", "off")
    run = train("train_gtpo.py", "all", *gtpo)
    base = weights(tiny)
    trained = weights(run / "model")
    unmoved = [name for name, weight in base.items() if torch.equal(weight, trained[name])]
    assert base.keys() == trained.keys() and unmoved == []
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert not (run / "adapter").exists() and weights(run / "best").keys() == base.keys()
    assert "library_name: transformers" in (run / "model" / "README.md").read_text()

    train("train_gtpo.py", "half", *gtpo, "--max_steps", "1")
    half = train("train_gtpo.py", "half", *gtpo, "--resume")
    assert same_weights(trained, weights(half / "model"))

    ended = run_script(run.parent, "evaluate.py", "--runs", "all", "--benchmarks", "arithmetic", code=2)
    assert "--model all/model" in ended.stderr
    small = ("--benchmarks", "arithmetic", "--limit", "2", "--k", "1", "--max_new_tokens", "4")
    run_script(run.parent, "evaluate.py", "--model", "all/model", *small)


def test_the_reference_of_grpo_is_the_base_model(train: Train) -> None:
    run = train("train_grpo.py", "kl", "--beta", "0.04")
    first, *_, last = (line["kl"] for line in metrics_of(run))
    assert first == pytest.approx(0, abs=1e-7) and last > 1e-6
