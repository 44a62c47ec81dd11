"""The one-step effects of fixed policies: what is measured, results/mechanism/, the figure and docs/mechanism.md."""

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import correlation, fmean
from typing import Any

from gtpo.errors import UsageError
from gtpo.paper.figures import WIDTH, mean_of
from gtpo.paper.matrix import RUNS, Experiment, Matrix, experiment, with_earlier
from gtpo.paper.results import rounded
from gtpo.paper.runner import run_all, slots_of
from gtpo.paper.states import state_of
from gtpo.reports.curves import LEAST_SEEDS, grid
from study.rendering import render

SPLITS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "all groups": lambda line: True,
    "correct longer": lambda line: line["longer"] > 0,
    "correct shorter": lambda line: line["longer"] < 0,
    "format decides": lambda line: line["decided_by"] == ["format_reward"],
    "answer decides": lambda line: line["decided_by"] == ["accuracy_reward"],
    "both decide": lambda line: len(line["decided_by"]) == 2,
}
TARGETS = {"tags": "tags of reference solutions", "own tags": "tags of its own completions"}  # of the figure of updates
OBJECTIVES = ("GRPO", "GTPO", "correction", "GRPO, A > 0", "GRPO, A < 0")
MEASURED = RUNS / "mechanism"  # one JSON Lines file per policy
DIRECTORY, PAGE = Path("results") / "mechanism", Path("docs") / "mechanism.md"


@dataclass(frozen=True)
class Policy:
    """A policy whose one-step effects are measured: a run at one of its steps, with the settings of the run.

    Attributes:
        name: Of its file, and for readers.
        run: The run.
        step: Of the checkpoint; 0: before training.
        groups: How many are sampled.
        taken: Objectives of which every tenth update is taken; None for all.
    """

    name: str
    run: Experiment
    step: int
    groups: int
    taken: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        return self.name.replace(" ", "-")

    def __str__(self) -> str:
        return (
            f"{self.name:16} {'finished' if self.is_finished else 'missing':9} {self.groups} groups of {self.run.label}"
        )

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
    def command(self) -> str:
        return f"python {shlex.join(self.argv)}"

    @property
    def is_finished(self) -> bool:
        return self.path.is_file() and self.path.read_bytes().count(b"\n") >= self.groups

    def remaining(self) -> tuple[str, ...]:
        """The script and flags that are left to run."""
        return () if self.is_finished else self.argv


def policies_of(matrix: Matrix, only: Sequence[str] = ("",)) -> list[Policy]:
    """The policies of configs/experiments.yaml whose name has one of some parts.

    Raises:
        UsageError: If there is none.
    """
    found = [
        Policy(
            name,
            experiment(matrix, spec["scale"], spec["run"], spec["seed"]),
            spec["step"],
            spec["groups"],
            tuple(spec["taken"]) if "taken" in spec else None,
        )
        for name, spec in matrix["mechanism"].items()
        if any(part in name for part in only)
    ]
    if not found:
        raise UsageError(
            f"no policy is called {' or '.join(only)}: expected a part of {', '.join(matrix['mechanism'])}."
        )
    return found


def measure(matrix: Matrix, name: str, rewards_in: Callable[..., Any]) -> None:
    """Measure the missing groups of one policy, with a progress bar.

    Raises:
        UsageError: If the name is unknown, or its run is not there.
    """
    from tqdm import tqdm

    from study.one_step import OBJECTIVES, trainer_of, write_effects

    policy = next((policy for policy in policies_of(matrix) if policy.name == name), None)
    if policy is None:
        raise UsageError(f"no policy is called {name!r}: pick from {', '.join(matrix['mechanism'])}.")
    run, checkpoint = policy.run.run, policy.run.run.checkpoint(policy.step) if policy.step else None
    if not (checkpoint or run.config).exists():
        raise UsageError(
            f"{checkpoint or run.config} does not exist: `python -m study mechanism --only {shlex.quote(name)}` "
            "makes the run first."
        )
    trainer = trainer_of(run.read_config(), checkpoint, rewards_in)
    effects = write_effects(trainer, policy.path, policy.groups, policy.taken or OBJECTIVES)
    for _ in tqdm(effects, policy.name, policy.groups, unit=" groups"):
        pass


def run_policies(matrix: Matrix, only: Sequence[str], jobs: int | None) -> tuple[list[Policy], list[str]]:
    """Measure policies, after their runs; they, and a message for each failure."""
    policies = policies_of(matrix, only)
    return policies, run_all(with_earlier(policy.run for policy in policies), policies, slots_of("tiny", None, jobs))


def policy_list(policies: Sequence[Policy]) -> list[str]:
    """A line per policy whose updates are measured, and per run that they are checkpoints of."""
    runs = dict.fromkeys(policy.run for policy in policies)
    return [*map(str, policies), *(f"{run.label:16} {state_of(run):9} {run.cost:g} CPU minutes" for run in runs)]


# The page


def draw_mechanism(summaries: dict[str, dict[str, Any]]) -> Any:
    """A row per policy, a panel per measure of the tags: the mean change of some objectives with its interval.

    Args:
        summaries: Title of a policy -> :func:`study.mechanism.summarize`.
    """
    figure, axes = grid(len(summaries), len(TARGETS), width=WIDTH / len(TARGETS), height=1.5)
    for (title, summary), panels in zip(summaries.items(), axes, strict=True):
        for (target, label), axis in zip(TARGETS.items(), panels, strict=True):
            rows = [row for row in summary["rows"] if row["target"] == target and row["split"] == "all groups"]
            shown = [row for objective in OBJECTIVES for row in rows if row["objective"] == objective]
            for place, row in enumerate(shown):
                color = "#009E73" if row["mean"] - row["half_width"] > 0 else "#D55E00"
                color = color if abs(row["mean"]) > row["half_width"] else "#999999"
                axis.errorbar(1000 * row["mean"], place, xerr=1000 * row["half_width"], fmt="o", color=color)
            axis.axvline(0, color="black", linewidth=1)
            axis.locator_params(axis="x", nbins=5)
            axis.set_yticks(range(len(shown)), [row["objective"] for row in shown] if axis is panels[0] else [])
            axis.set_ylim(len(shown) - 0.5, -0.5)
            axis.set_title(f"{title}: {label}", loc="left", fontsize=9)
    figure.supxlabel("change of ln π by an update of unit norm (10⁻³ nats), 95 % interval over groups", fontsize=9)
    return figure


def summarize(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and for each objective and target the mean change with its 95 % interval over groups.

    Args:
        lines: The groups of a policy, as :meth:`study.one_step.OneStep.of_group` returns them; at least
            ``LEAST_SEEDS`` have a variance of the rewards.

    Returns:
        ``groups``, ``informative`` (with a variance of the rewards), means of the rewards, and ``rows``: objective,
        target, split, and number, mean, half_width, share below 0 of the change, and of its difference from GRPO's.
    """
    informative = _informative(lines)
    targets = [name for name in informative[0]["effects"]["GRPO"] if name != "norm"]
    rows = [
        {"objective": objective, "target": target, "split": name} | _effect(chosen, objective, target)
        for name, holds in SPLITS.items()
        for chosen in [[line for line in informative if holds(line)]]
        for objective in informative[0]["effects"]
        for target in targets
    ]
    taken = [
        (line["effects"][objective][target], change)
        for line in informative
        for objective, changes in line.get("taken", {}).items()
        for target, change in changes.items()
    ]
    return {
        "groups": len(lines),
        "informative": len(informative),
        "rewards": {name: fmean(line[name] for line in lines) for name in lines[0] if name.endswith("_reward")},
        "rows": rows,
        "taken": {"number": len(taken), "correlation": correlation(*zip(*taken, strict=True))} if taken else None,
    }


def _effect(lines: Sequence[dict[str, Any]], objective: str, target: str) -> dict[str, Any]:
    values = [line["effects"][objective][target] for line in lines if objective in line["effects"]]
    differences = [
        line["effects"][objective][target] - line["effects"]["GRPO"][target]
        for line in lines
        if objective in line["effects"]
    ]
    (mean, half_width), over_grpo = mean_of(values), mean_of(differences)
    return {
        "number": len(values),
        "mean": rounded(mean),
        "half_width": rounded(half_width),
        "below_0": rounded(sum(value < 0 for value in values) / len(values)) if values else None,
        "minus_grpo": [*map(rounded, over_grpo)] if over_grpo[1] is not None else None,
    }


def write_mechanism() -> dict[str, dict[str, Any]]:
    """Copy what is measured to results/mechanism/, and write its summary, the figure and docs/mechanism.md.

    Returns:
        Policy -> :func:`summarize`; empty if nothing is measured.
    """
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for path in MEASURED.glob("*.jsonl"):
        if len(_informative(_groups_in(path))) >= LEAST_SEEDS:
            shutil.copyfile(path, DIRECTORY / path.name)
    summaries = summaries_in(DIRECTORY)
    if summaries:
        (DIRECTORY / "summary.json").write_text(
            json.dumps(summaries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        draw_mechanism({policy_title(name): of for name, of in summaries.items()}).savefig(
            DIRECTORY / "mechanism.png", dpi=100
        )
        PAGE.write_text(page(summaries), encoding="utf-8")
    return summaries


def summaries_in(directory: Path) -> dict[str, dict[str, Any]]:
    """Policy -> :func:`summarize` of its stored groups, the bases first."""
    found = sorted(directory.glob("*.jsonl"), key=lambda path: ("base" not in path.stem, len(path.stem), path.stem))
    return {path.stem: summarize(_groups_in(path)) for path in found}


def _groups_in(path: Path) -> list[dict[str, Any]]:
    """The groups of a file; a last line that is being written is left out."""
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def _informative(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with a variance of the rewards."""
    return [line for line in lines if line["effects"]]


def overview(policies: Sequence[Policy]) -> list[str]:
    """A line per policy that is measured: the change of the tags of reference solutions, GRPO's and GTPO minus it."""

    def pair(mean: float | None, half_width: float | None) -> str:
        return "-" if mean is None or half_width is None else f"{1000 * mean:+.2f} ± {1000 * half_width:.2f}"

    lines = []
    for policy in policies:
        groups = _groups_in(policy.path) if policy.is_finished else []
        if len(_informative(groups)) < LEAST_SEEDS:
            continue
        grpo, gtpo = (effect_of(summarize(groups), objective, "tags") for objective in ("GRPO", "GTPO"))
        minus = pair(*gtpo["minus_grpo"]) if gtpo["minus_grpo"] else "-"
        title = policy_title(policy.label)
        lines.append(f"{title:28}  GRPO {pair(grpo['mean'], grpo['half_width'])}, GTPO minus GRPO {minus}")
    head = "Change of ln π of the answer tags by one update, in 10⁻³ nats, 95 % interval (docs/mechanism.md):"
    return [head, *lines] if lines else []


def effect_of(summary: dict[str, Any], objective: str, target: str, split: str = "all groups") -> dict[str, Any]:
    """A row of a summary; empty for a policy that writes no tags."""
    rows = (
        row for row in summary["rows"] if (row["objective"], row["target"], row["split"]) == (objective, target, split)
    )
    return next(rows, {"number": 0, "mean": None, "half_width": None, "minus_grpo": None})


def policy_title(name: str) -> str:
    """The name of a measured policy as a reader sees it, ``smol-step-20``: SmolLM2 at step 20."""
    model, _, state = name.partition("-")
    title = {"smol": "SmolLM2", "tiny": "the tiny model"}.get(model, model)
    return f"{title} at {'its start' if state == 'base' else state.replace('-', ' ')}"


def page(summaries: dict[str, dict[str, Any]]) -> str:
    """docs/mechanism.md, from the template next to this file."""
    values = {"policies": summaries, "effect_of": effect_of, "title": policy_title}
    return render("mechanism.template.md", values)
