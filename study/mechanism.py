"""The one-step effects of fixed policies: what is measured, and results/mechanism/."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from gtpo.errors import UsageError
from gtpo.reports.curves import LEAST_SEEDS
from paper.figures import mean_of
from paper.matrix import RUNS, Experiment
from paper.runner import run_all, slots_of
from paper.states import state_of
from study import Row, Words
from study.bench import Comparison, read_experiments
from study.measures import rounded

MEASURED = RUNS / "mechanism"  # one JSON Lines file per policy
DIRECTORY = Path("results") / "mechanism"


@dataclass(frozen=True)
class Policy:
    """A kind of work: the one-step effects of a policy, a run at one of its steps (0: before training)."""

    name: str
    run: Experiment
    step: int
    groups: int
    label: str
    path: Path
    log: Path
    argv: tuple[str, ...]
    experiments: tuple[Experiment, ...]

    @property
    def is_finished(self) -> bool:
        if not self.path.is_file():
            return False
        lines = self.path.read_bytes().count(b"\n")
        return lines >= self.groups

    def remaining(self) -> tuple[str, ...]:
        return () if self.is_finished else self.argv


def policies_of(only: Words = ("",)) -> list[Policy]:
    """The policies of study/experiments.yaml whose name, ``tiny step 40``, has one of some parts."""
    every = []
    for model, spec in read_experiments()["mechanism"].items():
        comparison = Comparison(model, spec["comparison"])
        arm, base = comparison.arms[0], comparison.bases[0]
        [rate] = comparison.rates
        run = comparison.run(base, arm, rate, comparison.seeds[0])
        for step in spec["steps"]:
            name = f"{model} step {step}" if step else f"{model} base"
            label = name.replace(" ", "-")
            log = MEASURED / "logs" / f"{label}.log"
            argv = ("-m", "study", "mechanism", "--policy", name)
            every.append(Policy(name, run, step, spec["groups"], label, MEASURED / f"{label}.jsonl", log, argv, (run,)))
    found = []
    for policy in every:
        if any(part in policy.name for part in only):
            found.append(policy)
    if not found:
        known = ", ".join(policy.name for policy in every)
        raise UsageError(f"no policy is called {' or '.join(only)}: expected a part of {known}.")
    return found


def measure(name: str, rewards_in: Callable[..., Any]) -> None:
    """Measure the missing groups of one policy, with a progress bar."""
    from tqdm import tqdm

    from study.one_step import one_step_of, write_effects

    policies = {policy.name: policy for policy in policies_of([name])}
    policy = policies[name]
    checkpoint = policy.run.run.checkpoint(policy.step) if policy.step else None
    flags = policy.run.argv[3:]  # of -m study.train train_grpo.py
    make = partial(one_step_of, flags, checkpoint, rewards_in)
    done = write_effects(make, policy.path, policy.groups)
    for _ in tqdm(done, name, policy.groups, unit=" groups"):
        pass


def run_policies(policies: Sequence[Policy], jobs: int | None) -> list[str]:
    """Measure policies, after their runs; a message for each failure."""
    runs = dict.fromkeys(policy.run for policy in policies)
    return run_all([*runs], policies, slots_of("tiny", None, jobs))


def policy_list(policies: Sequence[Policy]) -> list[str]:
    """A line per policy whose updates are measured, and per run that they are checkpoints of."""
    lines = []
    for policy in policies:
        state = "finished" if policy.is_finished else "missing"
        what = f"{policy.groups} groups of {policy.run.label}"
        lines.append(f"{policy.name:16} {state:9} {what}")
    for run in dict.fromkeys(policy.run for policy in policies):
        lines.append(f"{run.label:16} {state_of(run):9} {run.cost:g} CPU minutes")
    return lines


# What was measured


def summarize(lines: Sequence[Row]) -> Row:
    """Counts, and for each objective and target the mean change with its 95 % interval over groups.

    Args:
        lines: The groups of a policy, as :meth:`study.one_step.OneStep.of_group` returns them; at least
            ``LEAST_SEEDS`` have a variance of the rewards.

    Returns:
        ``groups``, ``informative`` (with a variance of the rewards), means of the rewards, and ``rows``: objective,
        target, and number, mean and half_width of the change, and of its difference from GRPO's.
    """
    effects = [line["effects"] for line in lines if line["effects"]]
    rows = []
    for objective, changes in effects[0].items():
        acted = [of_group for of_group in effects if objective in of_group]
        for target in changes:
            if target == "norm":
                continue
            of_objective = []
            over_grpo = []
            for of_group in acted:
                change = of_group[objective][target]
                of_objective.append(change)
                over_grpo.append(change - of_group["GRPO"][target])
            row = {"objective": objective, "target": target, "number": len(acted)}
            row["mean"], row["half_width"] = map(rounded, mean_of(of_objective))
            row["minus_grpo"] = [*map(rounded, mean_of(over_grpo))]
            rows.append(row)
    rewards = {}
    for name in lines[0]:
        if name.endswith("_reward"):
            rewards[name] = fmean(line[name] for line in lines)
    return {"groups": len(lines), "informative": len(effects), "rewards": rewards, "rows": rows}


def store_mechanism() -> dict[str, Row]:
    """Copy what is measured to results/mechanism/.

    Returns:
        Policy -> :func:`summarize`; empty if nothing is measured.
    """
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for path in MEASURED.glob("*.jsonl"):
        if sum(bool(line["effects"]) for line in _groups_in(path)) >= LEAST_SEEDS:
            shutil.copyfile(path, DIRECTORY / path.name)
    return summaries_in(DIRECTORY)


def summaries_in(directory: Path) -> dict[str, Row]:
    """Policy -> :func:`summarize` of its stored groups, the bases first."""
    stems = [path.stem for path in directory.glob("*.jsonl")]
    stems.sort(key=lambda stem: ("base" not in stem, len(stem), stem))
    return {stem: summarize(_groups_in(directory / f"{stem}.jsonl")) for stem in stems}


def _groups_in(path: Path) -> list[Row]:
    """The groups of a file; a last line that is being written is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def effect_of(summary: Row, objective: str, target: str) -> Row:
    """A row of a summary; empty for a policy that writes no tags."""
    for row in summary["rows"]:
        if (row["objective"], row["target"]) == (objective, target):
            return dict(row)
    return {"number": 0, "mean": None, "half_width": None, "minus_grpo": [None, None]}


def policy_title(name: str) -> str:
    """The name of a measured policy as a reader sees it, ``smol-step-20``: SmolLM2 at step 20."""
    model, _, state = name.partition("-")
    title = {"smol": "SmolLM2", "tiny": "the tiny model"}.get(model, model)
    when = "its start" if state == "base" else state.replace("-", " ")
    return f"{title} at {when}"
