"""What a comparison of objectives has found: differences paired by seed, runs that were lost, a page with a figure."""

import hashlib
import json
import subprocess
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from gtpo.errors import UsageError
from gtpo.files import write_atomically
from gtpo.reports.curves import add_legend, grid
from gtpo.runs.provenance import git_revision
from paper.figures import LABELS, WIDTH, plot_curves
from paper.matrix import Evaluation
from paper.results import GREEDY, Results, Run, read_results
from paper.runner import run_all
from study import Numbers, Row, Seeds, Values, Words
from study.bench import Arm, Base, Comparison, Runs
from study.comparison import Pair, add_holm, compare
from study.measures import LOST, has_fallen
from study.rendering import render
from study.storage import origins_in, read_json, read_origins

PAGE, PLAN, FIGURE, COMMANDS = "comparison.md", "plan.md", "comparison.png", "commands.json"


class Found(NamedTuple):
    """The results from one base, condensed or of this machine; ``origins`` by run, ``rates`` by arm."""

    base: Base
    results: Results
    origins: Values
    rates: Values

    def name(self, arm: Arm) -> str:
        """The name of an arm's runs."""
        return arm.run_name(self.rates.get(arm.name))

    def pair(self, comparison: Comparison, arm: Arm) -> Pair:
        """An arm and the first one, at the seeds that both have from one revision and machine."""
        names = [self.name(comparison.arms[0]), self.name(arm)]
        same = []
        mixed = 0
        for seed in comparison.seeds:
            if {(name, seed) for name in names} <= self.results.runs.keys():
                labels = [f"{name}-s{seed}" for name in names]
                first, second = map(self.origins.get, labels)
                if first == second:
                    same.append(seed)
                mixed += first != second
        return Pair(self.results, names, same, comparison.window, self.base.benchmark_name, self.base.name, mixed)


def found_of(comparison: Comparison, base: Base) -> Found:
    """Everything that is there from a base."""
    stored = comparison.stored(base)
    place = comparison.place(base)
    results = read_results([stored, place])
    origins = {}
    for label, origin in (read_origins(stored) | origins_in(place)).items():
        name, _, _ = label.rpartition("-s")
        if name in comparison.run_names:
            origins[label] = origin
    return Found(base, results, origins, comparison.chosen_rates(results))


def every_found(comparison: Comparison) -> list[Found]:
    return [found_of(comparison, base) for base in comparison.bases]


# The runs


class Works(NamedTuple):
    """The runs and evaluations of a comparison, and the number of runs that are stored in results/."""

    runs: Runs
    evaluations: list[Evaluation]
    stored: int


def run_comparison(comparison: Comparison, seeds: Seeds, slots: Sequence[Values]) -> Words:
    """Choose the rates if there are several, then train and score what is missing; a message for each failure."""
    failures = []
    for _ in comparison.rates[:2]:  # of several rates the first round chooses
        works = works_of(comparison, seeds)
        check_commands(comparison, works.runs)
        failures += run_all(works.runs, works.evaluations, slots)
    return failures


def works_of(comparison: Comparison, seeds: Seeds) -> Works:
    """All arms of a seed before the next seed; of an arm without a rate the runs that choose it.

    A seed of which all runs are stored in results/ is left out, unless ``--output_dir`` names a place to repeat it.
    """
    runs = []
    evaluations = []
    needed = 0
    for base in comparison.bases:
        rates = found_of(comparison, base).rates
        compared = []
        choosing = []
        for arm in comparison.arms:
            if arm.name in rates:
                compared += comparison.runs(base, [arm], [rates[arm.name]], seeds)
            else:
                choosing += comparison.runs(base, [arm], comparison.rates, comparison.rate_seeds)
        condensed = read_results([] if comparison.repeats else [comparison.stored(base)]).runs
        needed += len(compared) + len(choosing)
        left = _left(compared, condensed)
        runs += [*left, *_left(choosing, condensed)]
        if left:
            evaluations += comparison.evaluations(base, left)
    runs.sort(key=attrgetter("seed"))
    return Works(runs, evaluations, needed - len(runs))


def _left(runs: Runs, condensed: Collection[Run]) -> Runs:
    """The runs of the seeds of which a run is not stored, or is also here, perhaps without its scores."""
    seeds = {run.seed for run in runs if (run.name, run.seed) not in condensed or run.run.path.exists()}
    return [run for run in runs if run.seed in seeds]


def state_line(comparison: Comparison, seeds: Seeds) -> str:
    """What the comparison will take: runs, those that are finished, and hours of one core or GPU that remain."""
    return render("state.txt", {"comparison": comparison, **works_of(comparison, seeds)._asdict()})


def check_commands(comparison: Comparison, runs: Runs) -> None:
    """UsageError if a run in the directory was made by another command: it would be taken for this one.

    commands.json has the command of each run, with the digest of a file of the user's that is a part of it.
    """
    path = comparison.directory / COMMANDS
    stored = read_json(path)
    for run in runs:
        words = list(run.argv)
        for word in run.argv:
            file, _, _ = word.rpartition(":")
            if file.endswith(".py"):
                words.append(hashlib.sha256(Path(file).read_bytes()).hexdigest())
        place = run.run.path
        before: Words = stored.get(place.as_posix(), words)
        if place.exists() and before != words:
            other = " ".join((Counter(before) - Counter(words)).elements())
            raise UsageError(f"{place} was made with other settings ({other}): name another --output_dir.")
        stored[place.as_posix()] = words
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(stored, indent=1))


def refuse_dirty(allowed: bool) -> None:
    """UsageError if files of this checkout differ from its commit: the runs could not be made again."""
    if str(git_revision()).endswith("-dirty") and not allowed:
        raise UsageError("files differ from the last commit: commit them, or add --dirty, which the page then says.")


# What was found


def slope_row(x: Numbers, pairs: Sequence[Pair], measure: str) -> Row:
    """The slope of a difference over the ``x`` of the bases, per seed that has all of them."""
    by_base = [pair.differences(measure) for pair in pairs]
    slopes = []
    for seed in sorted(set.intersection(*map(set, by_base))):
        slope, _ = np.polyfit(x, [differences[seed] for differences in by_base], 1)
        slopes.append(float(slope))
    return compare(slopes) | {"means": [], "where": "slope over x"}


def pooled_row(pairs: Sequence[Pair], measure: str, bound: float) -> Row:
    """The mean of a difference over the bases, per seed that has all of them; p is of its distance from a bound."""
    by_base = [pair.differences(measure) for pair in pairs]
    means = []
    for seed in sorted(set.intersection(*map(set, by_base))):
        means.append(fmean(differences[seed] for differences in by_base))
    row = compare([mean - bound for mean in means])
    if row["mean"] is not None:
        row["mean"] += bound
    return row | {"means": [], "where": "mean over bases", "bound": bound}


def primary_rows(comparison: Comparison, every: Sequence[Found]) -> list[Row]:
    """The planned differences; Holm's correction is over all of them."""
    rows = []
    for primary, arm in product(comparison.primary, comparison.arms[1:]):
        if arm.name not in primary.get("arms", [arm.name]):
            continue
        measure = primary["measure"]
        pairs = [found.pair(comparison, arm) for found in every]
        if primary.get("slope"):
            shares = [found.base.x or 0.0 for found in every]
            found_rows = [slope_row(shares, pairs, measure)]
        elif primary.get("over_bases"):
            found_rows = [pooled_row(pairs, measure, primary.get("above", 0.0))]
        else:
            found_rows = [{**pair.row(measure), "where": pair.base} for pair in pairs]
        shared = {"measure": measure, "arm": arm, "needs_p": comparison.needs_p}
        rows += [{**row, **shared} for row in found_rows]
    if len(rows) > 1:
        add_holm(rows)
    return rows


def table_of(comparison: Comparison, found: Found) -> Row:
    """Of a base: its scores before training, and each arm minus the first one in every measure."""
    untrained = {}
    for kind, suffix in (("sampled", ""), ("greedy", GREEDY)):
        scored = found.results.scored("base", found.base.benchmark_name + suffix)
        if len(scored) == 1:  # shared results can be from several bases
            untrained[f"pass@1 {kind}"] = float(scored["pass@1"].iloc[0])
    rows = []
    for arm in comparison.arms[1:]:
        pair = found.pair(comparison, arm)
        row = {
            "arm": arm,
            "seeds": len(pair.seeds),
            "mixed": pair.mixed,
            "lost": pair.lost(has_fallen),
            "measures": {name: pair.row(name) for name in comparison.measures},
        }
        rows.append(row)
    return {"base": found.base, "rates": found.rates, "untrained": untrained, "rows": rows}


# The plan and the page


def plan_text(comparison: Comparison) -> str:
    """plan.md: arms, seeds, primary, rule. Nothing in it depends on the machine or the day."""
    return render("plan.template.md", {"comparison": comparison, "lost": LOST})


def plan_state(comparison: Comparison, revisions: Words) -> str:
    """Whether plan.md is in the revisions that the runs were made from: absent, uncommitted, another, or committed."""
    if not (comparison.results / PLAN).is_file():
        return "absent"
    for revision in revisions:
        show = ["git", "show", f"{revision.removesuffix('-dirty')}:./{PLAN}"]
        done = subprocess.run(show, cwd=comparison.results, capture_output=True, text=True, encoding="utf-8")
        if done.returncode:
            return "uncommitted"
        if done.stdout != plan_text(comparison):
            return "another"
    return "committed" if revisions else "uncommitted"


def write_page(comparison: Comparison, directory: Path, command: str) -> list[Path]:
    """The page of a comparison, made by ``command``, and its figure; the files."""
    every = every_found(comparison)
    origins = [origin for found in every for origin in found.origins.values()]
    revisions = sorted({str(revision) for revision, *_ in origins})
    machines = {str(machine) for _, *machine in origins}
    values = {
        "comparison": comparison,
        "lost": LOST,
        "primary": primary_rows(comparison, every),
        "tables": [table_of(comparison, found) for found in every],
        "command": command,
        "revisions": revisions,
        "machines": len(machines),
        "plan": plan_state(comparison, revisions),
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_figure(comparison, every, directory / FIGURE)
    write_atomically(directory / PAGE, render("comparison.template.md", values))
    return [directory / PAGE, directory / FIGURE]


def write_figure(comparison: Comparison, every: Sequence[Found], path: Path) -> None:
    """A column per base, a row per metric, or a row of a single base.

    Colour is the arm; line and band are the mean over seeds and its interval.
    """
    panels = comparison.panels
    rows, columns = len(panels), len(every)
    if columns == 1:
        rows, columns = columns, rows
    figure, axes = grid(rows, columns, width=WIDTH / min(3, columns), height=2.4)
    for found, column in zip(every, axes.reshape(len(panels), -1).T, strict=True):
        column[0].set_title(found.base.name, loc="left", fontsize=10)
        for metric, axis in zip(panels, column, strict=True):
            axis.set(xlabel="training step", ylabel=LABELS[metric])
            for arm in comparison.arms:
                curves = found.results.smoothed(found.name(arm), metric, comparison.window)
                plot_curves(axis, arm.label, curves, {"color": arm.color, "linewidth": 1.6})
    add_legend(figure, f"mean over seeds of the last {comparison.window} steps; band: its 95 % interval")
    write_atomically(path, partial(figure.savefig, dpi=100, format="png"))
