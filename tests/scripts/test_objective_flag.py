"""``train_grpo.py --objective file.py:Class``: somebody's objective in the harness, as a user starts it."""

import re
from pathlib import Path

import pytest
import torch
from helpers.scripts import RunScript
from helpers.weights import adapter_of, same_weights

from gtpo.runs.directory import RunDirectory, command_of, method_of

MINE = """
from dataclasses import dataclass

from gtpo import GRPOTrainer


@dataclass
class ModelArguments:  # any name, one of ours too
    share: float = 0.5

    def __post_init__(self):
        self.double = 2 * self.share


class Halved(GRPOTrainer):
    Settings = ModelArguments

    def objective(self, logps, token_entropy, inputs):
        loss, measured = super().objective(logps, token_entropy, inputs)
        return self.settings.share * loss, measured


class Broken(GRPOTrainer):
    def objective(self, logps, token_entropy, inputs):
        return undefined
"""
STEPS = ["--dataset", "arithmetic", "--limit", "100", "--G", "4", "--prompts_per_step", "1", "--max_steps", "2"]
STEPS += ["--save_steps", "1"]
SGD = ["--optim", "sgd", "--max_grad_norm", "0", "--weight_decay", "0", "--lr_scheduler_type", "constant"]


@pytest.fixture
def mine(here: Path) -> Path:
    (here / "mine.py").write_text(MINE)
    return here


def test_a_scaled_loss_is_a_scaled_rate(mine: Path, tiny: Path, run_script: RunScript) -> None:
    """Under SGD, without clipping and decay."""
    runs = {
        "plain": ["--learning_rate", "0.25"],
        "quarter": ["--learning_rate", "1.0", "--objective", "mine.py:Halved", "--share", "0.25"],
    }
    for name, argv in runs.items():
        common = ["--model", str(tiny), *STEPS, *SGD, "--output_dir", name]
        run_script(mine, "train_grpo.py", *common, *argv)
    expected, start = (adapter_of(mine / "plain" / name) for name in ("adapter", "checkpoint-1"))
    assert not same_weights(expected, start)
    torch.testing.assert_close(adapter_of(mine / "quarter" / "adapter"), expected, atol=1e-7, rtol=1e-5)
    run = RunDirectory(mine / "quarter")
    settings = run.read_config()
    assert (settings["objective"], settings["share"]) == ("mine.py:Halved", 0.25) and "double" not in settings
    assert re.fullmatch("[0-9a-f]{16}", run.read_environment()["made_from"]["mine.py:Halved"])
    assert method_of(run) == "grpo"
    card = (run.adapter / "README.md").read_text()
    assert "trained with Halved" in card and "objective: mine.py:Halved" in card
    assert settings["objective"] in run.report.read_text()

    shown = f"--resume {mine / 'quarter'} --objective mine.py:Halved"
    assert command_of(run, "--resume", str(run.path)) == f"python train_grpo.py {shown}"
    other = run_script(mine, "train_grpo.py", "--resume", "quarter", code=2)  # its Settings are no flags then
    assert "if you trust its code, add --objective mine.py:Halved." in other.stderr
    more = ["--resume", "quarter", "--objective", "mine.py:Halved", "--max_steps"]
    run_script(mine, "train_grpo.py", *more, "3")
    assert run.read_metrics()[-1]["step"] == 3
    (mine / "mine.py").write_text(MINE + "\n")
    other = run_script(mine, "train_grpo.py", *more, "4", code=2)
    assert "quarter cannot be resumed with changed mine.py:Halved: undo it" in other.stderr


def test_what_a_script_says_about_an_objective(mine: Path, tiny: Path, run_script: RunScript) -> None:
    common = ["--model", str(tiny), *STEPS]
    (mine / "c.yaml").write_text("objective: mine.Halved\n")
    stored = run_script(mine, "train_grpo.py", *common, "--config", "c.yaml", "--dry_run", code=2)
    assert "c.yaml names the objective mine.Halved" in stored.stderr
    broken = run_script(mine, "train_grpo.py", *common, "--objective", "mine.py:Broken", code=1)
    line = 1 + MINE.splitlines().index("        return undefined")
    assert f"Broken.objective (mine.py, line {line}) raised NameError: name 'undefined' is not defined" in broken.stderr
    assert [path.name.startswith("Broken-") for path in (mine / "outputs").iterdir()] == [True]
