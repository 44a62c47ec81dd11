"""The one-step effects of fixed policies: what is measured, and results/mechanism/."""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from pandas import json_normalize

from gtpo.errors import UsageError
from paper.matrix import RUNS, Experiment
from study import Row, Words
from study.bench import Comparison, read_experiments
from study.comparison import rounded_mean
from study.storage import complete_lines

MEASURED = RUNS / "mechanism"  # one JSON Lines file per policy
DIRECTORY = Path("results/mechanism")


class Policy(NamedTuple):
    """A run at one of its steps (0: before training), of which so many groups are measured."""

    name: str
    run: Experiment
    step: int
    groups: int

    @property
    def path(self) -> Path:
        return MEASURED / f"{self.name.replace(' ', '-')}.jsonl"

    @property
    def is_finished(self) -> bool:
        return len(complete_lines(self.path)) >= self.groups


def policies_of(only: Words = ("",)) -> list[Policy]:
    """The policies of study/experiments.yaml whose name, ``tiny step 40``, has one of some parts."""
    known = read_experiments()["mechanism"]
    found = []
    for name, spec in known.items():
        if any(part in name for part in only):
            model, *_ = name.split()
            comparison = Comparison(model, spec["comparison"])
            run, *_ = comparison.runs(comparison.bases[0], comparison.arms, comparison.rates, comparison.seeds)
            found.append(Policy(name, run, spec["step"], spec["groups"]))
    if not found:
        raise UsageError(f"no policy is called {' or '.join(only)}: expected a part of {', '.join(known)}.")
    return found


def measure(policy: Policy) -> None:
    """Measure the missing groups of a policy, with a progress bar."""
    from study.one_step import one_step_of, write_effects

    checkpoint = None
    if policy.step:
        checkpoint = policy.run.run.checkpoint(policy.step)
    flags = policy.run.argv[3:]  # of -m study.train train_grpo.py
    make = partial(one_step_of, flags, checkpoint)
    write_effects(make, policy.path, policy.groups)


def summarize(lines: Sequence[Row]) -> Row:
    """Counts, and for each objective and target the mean change with its 95 % interval over groups.

    Args:
        lines: The groups of a policy, as :meth:`study.one_step.OneStep.of_group` returns them.

    Returns:
        ``groups``, ``informative`` (with a variance of the rewards), means of the rewards, and ``rows``: objective,
        target, and number, mean and half_width of the change, and of its difference from GRPO's.
    """
    informative = [line["effects"] for line in lines if line["effects"]]
    effects = json_normalize(informative, sep="|")
    rows = []
    for column in effects:
        objective, target = column.split("|")
        if target == "norm":  # of earlier measurements
            continue
        changes = effects[column].dropna()
        over_grpo = (changes - effects[f"GRPO|{target}"]).dropna()
        row = {"objective": objective, "target": target, "number": len(changes)}
        row["mean"], row["half_width"] = rounded_mean(changes.tolist())
        row["minus_grpo"] = rounded_mean(over_grpo.tolist())
        rows.append(row)
    names = [name for name in lines[0] if name.endswith("_reward")]
    return {
        "groups": len(lines),
        "informative": len(informative),
        "rewards": {name: fmean(line[name] for line in lines) for name in names},
        "rows": rows,
    }


def store_mechanism() -> Row:
    """Copy what is measured to results/mechanism/; policy -> :func:`summarize`, empty if nothing is measured."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for path in MEASURED.glob("*.jsonl"):
        shutil.copyfile(path, DIRECTORY / path.name)
    return summaries_in(DIRECTORY)


def summaries_in(directory: Path) -> Row:
    """Policy -> :func:`summarize` of its stored groups, the bases first."""
    found = {}
    for path in directory.glob("*.jsonl"):
        lines = complete_lines(path)
        found[path.stem] = summarize([*map(json.loads, lines)])
    return dict(sorted(found.items(), key=lambda item: ("base" not in item[0], len(item[0]), item[0])))
