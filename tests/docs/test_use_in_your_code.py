"""The examples of docs/use_in_your_code.md, run as written except for the model and what a CPU needs."""

import os
import re
import shutil
import sys
from pathlib import Path

from helpers.files import read_json
from helpers.scripts import ROOT, run_process
from pytest import TempPathFactory, fixture, mark

pytestmark = mark.slow

PAGE = (ROOT / "README.md").read_text() + (ROOT / "docs/use_in_your_code.md").read_text()
HUB_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"


def section(title: str, language: str) -> list[str]:
    """The code blocks of a language under a heading."""
    part = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (text,) = (text for text in part if text.startswith(title))
    return re.findall(rf"^```{language}\n(.*?)^```", text.replace("\\\n", ""), re.MULTILINE | re.DOTALL)


def run(directory: Path, *argv: str, installed: Path | None = None) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    if installed is not None:
        environment["PYTHONPATH"] = str(installed)
    done = run_process([sys.executable, *argv], cwd=directory, env=environment)
    return done.stdout


@fixture(scope="module")
def installed(tmp_path_factory: TempPathFactory) -> Path:
    """A directory with what `pip install` adds: the package and the module, without scripts, rewards and presets."""
    directory = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "gtpo", directory / "gtpo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "gtpo_loss.py", directory)
    return directory


def test_gtpo_in_a_trl_script_under_15_lines(tiny: Path, tmp_path: Path, installed: Path) -> None:
    script, load, inspect = section("A TRL script", "python")
    assert len([line for line in script.splitlines() if line and "import" not in line]) < 15
    cpu = 'GTPOConfig(bf16=False, use_cpu=True, report_to="none", per_device_train_batch_size=4, '
    cpu += "logging_steps=1, log_completions=True, "
    script = script.replace(HUB_MODEL, str(tiny)).replace("GTPOConfig(", cpu)
    (tmp_path / "mine.py").write_text(f"{load}\n{script}\n{inspect}")
    run(tmp_path, "mine.py", installed=installed)
    assert read_json(tmp_path / "outputs/trl/initial_entropy.json")["prompts"] == 4
    assert (tmp_path / "group.html").read_text().count("<tr>") == 1 + 4


def test_the_single_file_next_to_a_script(tiny: Path, tmp_path: Path) -> None:
    (script,) = section("In a TRL script", "python")
    for name in ("examples/gtpo_trl.py", "gtpo_loss.py"):
        shutil.copy(ROOT / name, tmp_path)
    cpu = 'GTPOConfig(bf16=False, use_cpu=True, report_to="none", save_steps=2, per_device_train_batch_size=4, '
    (tmp_path / "mine.py").write_text(script.replace(HUB_MODEL, str(tiny)).replace("GTPOConfig(", cpu))
    run(tmp_path, "mine.py")
    state = read_json(tmp_path / "outputs/trl/checkpoint-2/trainer_state.json")
    assert [row["step"] for row in state["log_history"] if row.get("initial_entropy", 0) > 0] == [0]


def test_callbacks_of_any_grpo_run(tiny: Path, tmp_path: Path, installed: Path) -> None:
    (script, *_) = section("A TRL script", "python")
    (callbacks,) = section("Diagnose any GRPO run", "python")
    script = script.replace("from gtpo import GTPOConfig", "from trl import GRPOConfig").replace("gamma=0.1, ", "")
    callbacks = callbacks.replace("rewards/right/mean", "rewards/<lambda>/mean")
    cpu = 'GRPOConfig(bf16=False, use_cpu=True, report_to="none", logging_steps=1, per_device_train_batch_size=4, '
    script = script.replace(HUB_MODEL, str(tiny)).replace("GTPOConfig(", cpu).replace("GTPOTrainer", "GRPOTrainer")
    script = script.replace("trainer.train()", callbacks + "trainer.train()")
    (tmp_path / "mine.py").write_text(script + "print(sorted(trainer.state.log_history[0]))\n")
    shown = run(tmp_path, "mine.py", installed=installed)
    assert "'rewards/<lambda>/mean'" in shown and "'conflict_tokens'" not in shown  # TRL's own trainer


def test_the_loss_alone(tmp_path: Path, installed: Path) -> None:
    script = (ROOT / "examples/own_loop.py").read_text()
    checks = "\nassert (weights[:2, :2] == 2).all() and (weights[2:, :2] == 0).all() and hidden.grad.norm() > 0\n"
    checks += "assert (hidden.grad[2:, :2] == 0).all() and hidden.grad[:, 2:].any()\n"
    checks += "import sys\nassert not sys.modules.keys() & {'trl', 'transformers', 'peft'}\n"  # only PyTorch
    (tmp_path / "mine.py").write_text(script + checks)
    assert "filtered_fraction" in run(tmp_path, "mine.py", installed=installed)
