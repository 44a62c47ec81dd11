"""The one-step effects of fixed policies: what is measured, and results/mechanism/."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gtpo.errors import UsageError
from gtpo.reports.curves import LEAST_SEEDS
from paper.figures import mean_of
from paper.matrix import RUNS, Experiment, Matrix, experiment, with_earlier
from paper.runner import run_all, slots_of
from paper.states import state_of
from study.measures import rounded

MEASURED = RUNS / "mechanism"  # one JSON Lines file per policy
DIRECTORY = Path("results") / "mechanism"
Summary = dict[str, Any]


@dataclass(frozen=True)
class Policy:
    """A kind of work: the one-step effects of a policy, a run at one of its steps (0: before training)."""

    name: str
    run: Experiment
    step: int
    groups: int

    @property
    def label(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def path(self) -> Path:
        return MEASURED / f"{self.label}.jsonl"

    @property
    def log(self) -> Path:
        return MEASURED / "logs" / f"{self.label}.log"

    @property
    def experiments(self) -> tuple[Experiment, ...]:
        return (self.run,)

    @property
    def argv(self) -> tuple[str, ...]:
        return ("-m", "study", "mechanism", "--policy", self.name)

    @property
    def is_finished(self) -> bool:
        return self.path.is_file() and self.path.read_bytes().count(b"\n") >= self.groups

    def remaining(self) -> tuple[str, ...]:
        return () if self.is_finished else self.argv


def policies_of(matrix: Matrix, only: Sequence[str] = ("",)) -> list[Policy]:
    """The policies of configs/experiments.yaml whose name has one of some parts."""
    found = [
        Policy(name, experiment(matrix, spec["scale"], spec["run"], spec["seed"]), spec["step"], spec["groups"])
        for name, spec in matrix["mechanism"].items()
        if any(part in name for part in only)
    ]
    if not found:
        known = ", ".join(matrix["mechanism"])
        raise UsageError(f"no policy is called {' or '.join(only)}: expected a part of {known}.")
    return found


def measure(matrix: Matrix, name: str, rewards_in: Callable[..., Any]) -> None:
    """Measure the missing groups of one policy, with a progress bar."""
    from tqdm import tqdm

    from study.one_step import trainer_of, write_effects

    (policy,) = [policy for policy in policies_of(matrix, [name]) if policy.name == name]
    run = policy.run.run
    trainer = trainer_of(run.read_config(), run.checkpoint(policy.step) if policy.step else None, rewards_in)
    for _ in tqdm(write_effects(trainer, policy.path, policy.groups), name, policy.groups, unit=" groups"):
        pass


def run_policies(matrix: Matrix, only: Sequence[str], jobs: int | None) -> tuple[list[Policy], list[str]]:
    """Measure policies, after their runs; they, and a message for each failure."""
    policies = policies_of(matrix, only)
    return policies, run_all(with_earlier(policy.run for policy in policies), policies, slots_of("tiny", None, jobs))


def policy_list(policies: Sequence[Policy]) -> list[str]:
    """A line per policy whose updates are measured, and per run that they are checkpoints of."""
    lines = []
    for policy in policies:
        state = "finished" if policy.is_finished else "missing"
        lines.append(f"{policy.name:16} {state:9} {policy.groups} groups of {policy.run.label}")
    runs = dict.fromkeys(policy.run for policy in policies)
    return [*lines, *(f"{run.label:16} {state_of(run):9} {run.cost:g} CPU minutes" for run in runs)]


# What was measured


def summarize(lines: Sequence[dict[str, Any]]) -> Summary:
    """Counts, and for each objective and target the mean change with its 95 % interval over groups.

    Args:
        lines: The groups of a policy, as :meth:`study.one_step.OneStep.of_group` returns them; at least
            ``LEAST_SEEDS`` have a variance of the rewards.

    Returns:
        ``groups``, ``informative`` (with a variance of the rewards), means of the rewards, and ``rows``: objective,
        target, and number, mean and half_width of the change, and of its difference from GRPO's.
    """
    effects, rows = [line["effects"] for line in lines if line["effects"]], []
    for objective, changes in effects[0].items():
        acted = [of_group for of_group in effects if objective in of_group]
        for target in [name for name in changes if name != "norm"]:
            mean, half_width = map(rounded, mean_of([of_group[objective][target] for of_group in acted]))
            over_grpo = mean_of([of_group[objective][target] - of_group["GRPO"][target] for of_group in acted])
            row = {"objective": objective, "target": target, "number": len(acted), "mean": mean}
            rows.append(row | {"half_width": half_width, "minus_grpo": [*map(rounded, over_grpo)]})
    rewards = {name: fmean(line[name] for line in lines) for name in lines[0] if name.endswith("_reward")}
    return {"groups": len(lines), "informative": len(effects), "rewards": rewards, "rows": rows}


def store_mechanism() -> dict[str, Summary]:
    """Copy what is measured to results/mechanism/.

    Returns:
        Policy -> :func:`summarize`; empty if nothing is measured.
    """
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for path in MEASURED.glob("*.jsonl"):
        if sum(bool(line["effects"]) for line in _groups_in(path)) >= LEAST_SEEDS:
            shutil.copyfile(path, DIRECTORY / path.name)
    return summaries_in(DIRECTORY)


def summaries_in(directory: Path) -> dict[str, Summary]:
    """Policy -> :func:`summarize` of its stored groups, the bases first."""
    found = sorted(directory.glob("*.jsonl"), key=lambda path: ("base" not in path.stem, len(path.stem), path.stem))
    return {path.stem: summarize(_groups_in(path)) for path in found}


def _groups_in(path: Path) -> list[dict[str, Any]]:
    """The groups of a file; a last line that is being written is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def effect_of(summary: Summary, objective: str, target: str) -> dict[str, Any]:
    """A row of a summary; empty for a policy that writes no tags."""
    rows = (row for row in summary["rows"] if (row["objective"], row["target"]) == (objective, target))
    return next(rows, {"number": 0, "mean": None, "half_width": None, "minus_grpo": [None, None]})


def policy_title(name: str) -> str:
    """The name of a measured policy as a reader sees it, ``smol-step-20``: SmolLM2 at step 20."""
    model, _, state = name.partition("-")
    title = {"smol": "SmolLM2", "tiny": "the tiny model"}.get(model, model)
    return f"{title} at {'its start' if state == 'base' else state.replace('-', ' ')}"
