"""The families at the best rates: their runs are those of the stored results."""

from pathlib import Path

from helpers.settings import parsed

from gtpo.files import CONFIGS, read_yaml
from gtpo.runs.directory import to_argv
from study.comparison import known_comparison


def test_a_family_has_the_runs_of_its_results() -> None:
    """Each arm has the name of its stored runs, and the settings that differ from the base's."""
    losing = known_comparison("losing")
    assert losing.stored(losing.bases[0]) == Path("results/collapse")
    command = command_of("losing", "1.2e-3", 311)
    assert command.endswith("--output_dir outputs/study/losing/wrong-mode/gtpo-headroom-1.2e-3-s311")
    assert " --adam_beta1 0.999999 " in command and " --max_steps 1000 " in command and " --G 8 " in command


def command_of(title: str, rate: str, seed: int) -> str:
    """That of the second arm's run."""
    comparison = known_comparison(title)
    return " ".join(comparison.run(comparison.bases[0], comparison.arms[1], rate, seed).argv)


def test_smollm2_starts_from_its_warm_start() -> None:
    """study/warm_start.yaml, which `make smol` runs, makes the model of the base."""
    warm_start = read_yaml(CONFIGS.parent / "study" / "warm_start.yaml")
    resolved = parsed(*to_argv(warm_start), "--dry_run", "true", method="sft").to_dict()
    assert warm_start.items() <= resolved.items() and resolved["max_seq_length"] == 512  # of configs/sft/smol.yaml
    command = command_of("smol", "3e-4", 1)
    assert f" --model {warm_start['output_dir']}/merged " in command
    assert " --config configs/gtpo/smol.yaml " in command and " --initial_entropy 0.42 " in command
    assert known_comparison("smol").settings_of["grpo"].keys() == {"save_steps", "save_total_limit"}
