"""The examples of docs/use_in_your_code.md, run as written except for the model and what a CPU needs."""

import re
import shutil
import sys
from pathlib import Path

from helpers.files import read_json
from helpers.scripts import ROOT, run_process, user_environment
from pytest import TempPathFactory, fixture, mark

pytestmark = mark.slow

PAGE = (ROOT / "README.md").read_text() + (ROOT / "docs/use_in_your_code.md").read_text()
CPU = 'POConfig(bf16=False, use_cpu=True, report_to="none", per_device_train_batch_size=4, '
CPU += "logging_steps=1, log_completions=True, save_steps=2, "


def section(title: str) -> list[str]:
    """The Python blocks under a heading."""
    text = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(folder: Path, script: str, model: Path, packages: str = "") -> str:
    """What a script prints, with this model on a CPU, where these packages can be imported."""
    small = script.replace("Qwen/Qwen2.5-0.5B-Instruct", str(model)).replace("POConfig(", CPU)
    (folder / "mine.py").write_text(small)
    environment = user_environment() | {"PYTHONPATH": packages}
    return run_process([sys.executable, "mine.py"], cwd=folder, env=environment).stdout


@fixture(scope="module")
def installed(tmp_path_factory: TempPathFactory) -> str:
    """A directory with what `pip install` adds: the package and the module, without scripts, rewards and presets."""
    directory = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "gtpo", directory / "gtpo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "gtpo_loss.py", directory)
    return str(directory)


def test_gtpo_in_a_trl_script_under_15_lines(tiny: Path, tmp_path: Path, installed: str) -> None:
    script, load, inspect = section("A TRL script")
    assert len([line for line in script.splitlines() if line and "import" not in line]) < 15
    run(tmp_path, f"{load}\n{script}\n{inspect}", tiny, installed)
    assert read_json(tmp_path / "outputs/trl/initial_entropy.json")["prompts"] == 4
    assert (tmp_path / "group.html").read_text().count("<tr>") == 1 + 4


def test_the_single_file_next_to_a_script(tiny: Path, tmp_path: Path) -> None:
    (script,) = section("In a TRL script")
    for name in ("examples/gtpo_trl.py", "gtpo_loss.py"):
        shutil.copy(ROOT / name, tmp_path)
    run(tmp_path, script, tiny)
    state = read_json(tmp_path / "outputs/trl/checkpoint-2/trainer_state.json")
    assert [row["step"] for row in state["log_history"] if row.get("initial_entropy", 0) > 0] == [0]


def test_callbacks_of_any_grpo_run(tiny: Path, tmp_path: Path, installed: str) -> None:
    script = section("A TRL script")[0].replace("from gtpo import", "from trl import").replace("GTPO", "GRPO")
    (callbacks,) = section("Diagnose any GRPO run")
    callbacks = callbacks.replace("rewards/right/mean", "rewards/<lambda>/mean")
    script = script.replace("trainer.train()", f"{callbacks}trainer.train()")
    shutil.copy(ROOT / "examples/collapse_alarm.py", tmp_path)
    shown = run(tmp_path, f"{script}print(sorted(trainer.state.log_history[0]))\n", tiny, installed)
    assert "'rewards/<lambda>/mean'" in shown and "'conflict_tokens'" not in shown  # TRL's own trainer


def test_the_loss_alone(tmp_path: Path, installed: str) -> None:
    script = (ROOT / "examples/own_loop.py").read_text()
    checks = "\nassert (weights[:2, :2] == 2).all() and (weights[2:, :2] == 0).all() and hidden.grad.norm() > 0\n"
    checks += "assert (hidden.grad[2:, :2] == 0).all() and hidden.grad[:, 2:].any()\n"
    checks += "import sys\nassert not sys.modules.keys() & {'trl', 'transformers', 'peft'}\n"  # only PyTorch
    assert "filtered_fraction" in run(tmp_path, script + checks, tmp_path, installed)
