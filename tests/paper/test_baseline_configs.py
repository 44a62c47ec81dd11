"""configs/baselines: values with their sources, and every file is accepted by its script and its trainer."""

import dataclasses
import re
from pathlib import Path

import pytest
from paper_runs import CLASSES
from trl import GRPOConfig

import gtpo.cli.parse
from gtpo.cli.parse import parse
from gtpo.files import CONFIGS, read_yaml
from gtpo.training.trainer import GRPOTrainer, GTPOTrainer

FILES = sorted((CONFIGS / "baselines").glob("*.yaml"))
METHODS = {path.stem: "gtpo" if path.stem.startswith("gtpo") else "grpo" for path in FILES}
OBJECTIVES = {  # loss_type, scale_rewards, epsilon_high, weight of A > 0, G, written here from the papers
    "dr_grpo": ("dr_grpo", "none", None, 1.0, 8),
    "dapo": ("dapo", "group", 0.28, 1.0, 16),
    "w_reinforce": ("dapo", "none", None, 0.1, 8),
    "gtpo_dr_grpo": ("dr_grpo", "group", None, 1.0, 8),
    "equal_weights": ("dr_grpo", "group", None, 1.0, 8),
    **dict.fromkeys(
        ["entropy_bonus", "adaptive_entropy", "high_entropy_tokens", "overlong_filtering", "gdpo"],
        ("grpo", "group", None, 1.0, 8),
    ),
}
ENTROPY_AND_ROWS = {  # TRL's settings of the loss that differ from its defaults
    "entropy_bonus": {"entropy_coef": 0.1},
    "adaptive_entropy": {"use_adaptive_entropy": True},
    "high_entropy_tokens": {"top_entropy_quantile": 0.2},
    "overlong_filtering": {"mask_truncated_completions": True},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
}


def test_every_file_has_its_method() -> None:
    assert {path.stem for path in FILES} == METHODS.keys() == OBJECTIVES.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_accepted_with_the_values_of_its_paper(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(gtpo.cli.parse, "gpu_is_available", lambda: True)
    monkeypatch.setattr("gtpo.cli.validation.is_installed", lambda package: True)
    method = METHODS[path.stem]
    argv = ["--use_cpu", "true", "--model", "qwen", "--dataset", "math", "--config", str(path)]
    settings = parse(method, CLASSES[method], argv if "num_generations" in read_yaml(path) else [*argv, "--G", "8"])
    (GTPOTrainer if method == "gtpo" else GRPOTrainer).check_settings(settings.trainer)
    args = settings.trainer
    found = (args.loss_type, args.scale_rewards, args.epsilon_high, settings.reward.positive_advantage_weight)
    assert (*found, args.num_generations) == OBJECTIVES[path.stem]
    assert args.beta == 0 and settings.reward.negative_advantage_weight == 1
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    changed = set().union(*ENTROPY_AND_ROWS.values(), [name for name in defaults if name.startswith("entropy_")])
    expected = {name: defaults[name] for name in changed} | ENTROPY_AND_ROWS.get(path.stem, {})
    assert {name: getattr(args, name) for name in changed} == expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_value_has_a_source_of_the_header(path: Path) -> None:
    header, _, body = path.read_text().partition("\n\n")
    assert f"\n#   python train_{METHODS[path.stem]}.py --config configs/baselines/{path.name} " in header
    for line in body.splitlines():
        match = re.fullmatch(r"\w+: \S+ +# (\[[^\]]+\]) .+", line)
        assert match and f"{match[1]} " in header.replace("[ours]", "[ours] ") + "[ours] ", line
