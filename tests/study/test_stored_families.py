"""The families at the best rates: their runs are those of the stored results."""

from itertools import pairwise
from pathlib import Path

from helpers.settings import parsed

from gtpo.files import CONFIGS, read_yaml
from gtpo.runs.directory import to_argv
from study.bench import known_comparison, known_comparisons


def test_a_family_has_the_runs_of_its_results() -> None:
    """Each arm has the name of its stored runs, and the settings that differ from the base's."""
    every = known_comparisons()
    assert {"published", "plain", "smol"} <= every.keys()
    flags, place = first_run("losing", "1.2e-3", 311)
    assert flags["--output_dir"] == "outputs/study/losing/wrong-mode/gtpo-headroom-1.2e-3-s311"
    assert (flags["--adam_beta1"], flags["--max_steps"], flags["--G"]) == ("0.999999", "1000", "8")
    assert place == Path("results/collapse")
    flags, _ = first_run("again: Dr. GRPO", "1e-3", 431)
    assert flags["--output_dir"].endswith("/grpo-control-dr-s431") and flags["--loss_type"] == "dr_grpo"
    assert "study/length_reward.py:longer" in flags and "--reward_weights" in flags


def first_run(title: str, rate: str, seed: int) -> tuple[dict[str, str], Path]:
    """The words of the second arm's run, each with the one that follows it; where the results are stored."""
    comparison = known_comparison(title)
    [base] = comparison.bases
    words = comparison.run(base, comparison.arms[1], rate, seed).argv
    return dict(pairwise(words)), comparison.stored(base)


def test_smollm2_starts_from_its_warm_start() -> None:
    """study/warm_start.yaml, which `make smol` runs, makes the model of the base."""
    warm_start = read_yaml(CONFIGS.parent / "study" / "warm_start.yaml")
    resolved = parsed(*to_argv(warm_start), "--dry_run", "true", method="sft").to_dict()
    assert warm_start.items() <= resolved.items() and resolved["max_seq_length"] == 512  # of configs/sft/smol.yaml
    flags, _ = first_run("smol", "3e-4", 1)
    assert flags["--model"] == f"{warm_start['output_dir']}/merged"
    assert (flags["--config"], flags["--initial_entropy"]) == ("configs/gtpo/smol.yaml", "0.42")
    assert known_comparison("smol").settings_of["grpo"].keys() == {"save_steps", "save_total_limit"}
