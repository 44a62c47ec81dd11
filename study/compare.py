"""What a comparison of objectives has found: differences paired by seed, runs that were lost, a page with a figure."""

import hashlib
import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gtpo.errors import UsageError
from gtpo.files import CONFIGS, write_atomically
from gtpo.reports.curves import add_legend, grid, plot_mean
from gtpo.runs.provenance import git_revision
from paper.figures import LABELS, WIDTH
from paper.matrix import Evaluation, Experiment
from paper.results import GREEDY, Results, read_results
from paper.runner import run_all
from study import Row, Seeds, Values, Words
from study.bench import Arm, Base, Comparison
from study.comparison import Pair, add_holm, compare
from study.measures import LOST, has_fallen
from study.rendering import render
from study.storage import origins_in, read_json, read_origins

PANELS = ("accuracy", "formatting")
PAGE, PLAN, FIGURE, COMMANDS = "comparison.md", "plan.md", "comparison.png", "commands.json"


class Found(NamedTuple):
    """The results from one base, condensed or of this machine; ``origins`` by run, ``rates`` by arm."""

    base: Base
    results: Results
    origins: Values
    rates: Mapping[str, str]

    def name(self, arm: Arm) -> str:
        """The name of an arm's runs."""
        return arm.run_name(self.rates.get(arm.name))

    def pair(self, comparison: Comparison, arm: Arm) -> Pair:
        """An arm and the first one, at the seeds that both have from one revision and machine."""
        names = [self.name(comparison.arms[0]), self.name(arm)]
        same = []
        mixed = 0
        runs = self.results.runs
        for seed in comparison.seeds:
            if not all((name, seed) in runs for name in names):
                continue
            first, second = (self.origins.get(f"{name}-s{seed}") for name in names)
            if first == second:
                same.append(seed)
            else:
                mixed += 1
        base = self.base
        return Pair(self.results, names, same, comparison.window, base.benchmark_name, base.name, mixed)


def found_of(comparison: Comparison, base: Base) -> Found:
    """Everything that is there from a base."""
    stored = comparison.stored(base)
    place = comparison.place(base)
    places = dict.fromkeys((stored, place))
    results = read_results([directory for directory in places if directory.is_dir()])
    origins = {}
    for label, origin in (read_origins(stored) | origins_in(place)).items():
        name, _, _ = label.rpartition("-s")
        if any(name in comparison.rate_names(arm) for arm in comparison.arms):
            origins[label] = origin
    return Found(base, results, origins, comparison.chosen_rates(results))


# The runs


class Works(NamedTuple):
    """The runs and evaluations of a comparison, and the number of runs that are stored in results/."""

    runs: list[Experiment]
    evaluations: list[Evaluation]
    stored: int


def run_comparison(comparison: Comparison, seeds: Seeds, slots: Sequence[Mapping[str, str]]) -> list[str]:
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
    runs: list[Experiment] = []
    evaluations = []
    planned = 0
    for base in comparison.bases:
        rates = found_of(comparison, base).rates
        stored = read_results([] if comparison.repeats else [comparison.stored(base)]).runs
        compared = []
        choosing = []
        for arm in comparison.arms:
            if arm.name in rates:
                compared += [comparison.run(base, arm, rates[arm.name], seed) for seed in seeds]
                continue
            for rate, seed in product(comparison.rates, comparison.rate_seeds):
                choosing.append(comparison.run(base, arm, rate, seed))
        planned += len(compared) + len(choosing)
        missing = set()
        for run in compared:
            if (run.name, run.seed) not in stored or run.run.path.exists():
                missing.add(run.seed)
        compared = [run for run in compared if run.seed in missing]
        runs += compared
        runs += [run for run in choosing if (run.name, run.seed) not in stored]
        if compared:
            evaluations += comparison.evaluations(base, compared)
    runs.sort(key=attrgetter("seed"))
    return Works(runs, evaluations, planned - len(runs))


def state_line(comparison: Comparison, seeds: Seeds) -> str:
    """What the comparison will take: runs, those that are finished, and hours of one core or GPU that remain."""
    works = works_of(comparison, seeds)
    return render("state.txt", {"comparison": comparison, **works._asdict()})


def check_commands(comparison: Comparison, runs: Sequence[Experiment]) -> None:
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
        before: list[str] = stored.get(place.as_posix(), words)
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


def slope_row(x: Sequence[float], pairs: Sequence[Pair], measure: str) -> Row:
    """The slope of a difference over the ``x`` of the bases, per seed that has all of them."""
    by_base = [pair.differences(measure) for pair in pairs]
    slopes = []
    for seed in sorted(set.intersection(*map(set, by_base))):
        of_seed = [differences[seed] for differences in by_base]
        slope, _ = np.polyfit(x, of_seed, 1)
        slopes.append(float(slope))
    return compare(slopes) | {"means": [], "where": "slope over x"}


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
        else:
            found_rows = [{**pair.row(measure), "where": pair.base} for pair in pairs]
        rows += [{**row, "measure": measure, "arm": arm} for row in found_rows]
    if len(rows) > 1:
        add_holm(rows)
    return rows


def table_of(comparison: Comparison, found: Found) -> Row:
    """Of a base: its scores before training, and each arm minus the first one in every measure."""
    untrained = {}
    if not comparison.is_shared:  # the results there are from several bases
        for kind, suffix in (("sampled", ""), ("greedy", GREEDY)):
            scored = found.results.scored("base", found.base.benchmark_name + suffix)
            if not scored.empty:
                untrained[f"pass@1 {kind}"] = float(scored["pass@1"].iloc[0])
    rows = []
    for arm in comparison.arms[1:]:
        pair = found.pair(comparison, arm)
        measures = {name: pair.row(name) for name in comparison.measures}
        counts = {"seeds": len(pair.seeds), "mixed": pair.mixed}
        rows.append({"arm": arm, **counts, "lost": pair.lost(has_fallen), "measures": measures})
    return {"base": found.base, "rates": found.rates, "untrained": untrained, "rows": rows}


# The plan and the page


def plan_text(comparison: Comparison) -> str:
    """plan.md: arms, seeds, primary, rule. Nothing in it depends on the machine or the day."""
    return render("plan.template.md", {"comparison": comparison, "lost": LOST})


def plan_state(comparison: Comparison, revisions: Words) -> str:
    """Whether plan.md is in the revisions that the runs were made from: absent, uncommitted, another, or committed."""
    path = (comparison.results / PLAN).resolve()
    root = CONFIGS.parent.resolve()
    if not path.is_file():
        return "absent"
    if not revisions or not path.is_relative_to(root):
        return "uncommitted"
    for revision in revisions:
        name = f"{revision.removesuffix('-dirty')}:{path.relative_to(root).as_posix()}"
        done = subprocess.run(["git", "show", name], cwd=root, capture_output=True, text=True, encoding="utf-8")
        if done.returncode:
            return "uncommitted"
        if done.stdout != plan_text(comparison):
            return "another"
    return "committed"


def write_page(comparison: Comparison, directory: Path, command: str) -> list[Path]:
    """The page of a comparison, made by ``command``, and its figure; the files."""
    every = [found_of(comparison, base) for base in comparison.bases]
    origins = [origin for found in every for origin in found.origins.values()]
    revisions = sorted({str(origin[0]) for origin in origins})
    machines = {str(origin[1:]) for origin in origins}
    values = {
        "comparison": comparison,
        "lost": LOST,
        "primary": primary_rows(comparison, every),
        "tables": [table_of(comparison, found) for found in every],
        "command": command,
        "revisions": revisions,
        "machines": len(machines),
        "plan": plan_state(comparison, revisions),
        "plan_path": comparison.results / PLAN,
        "figure": FIGURE,
    }
    directory.mkdir(parents=True, exist_ok=True)
    drawn = draw_comparison(comparison, every)
    write_atomically(directory / FIGURE, partial(drawn.savefig, dpi=100, format="png"))
    write_atomically(directory / PAGE, render("comparison.template.md", values))
    return [directory / PAGE, directory / FIGURE]


def draw_comparison(comparison: Comparison, every: Sequence[Found], panels: Words = PANELS) -> Any:
    """A column per base, a row per metric, or a row of a single base.

    Colour is the arm; line and band are the mean over seeds and its interval.
    """
    rows, columns = len(panels), len(every)
    if columns == 1:
        rows, columns = columns, rows
    figure, axes = grid(rows, columns, width=WIDTH / min(3, columns), height=2.4)
    by_base = axes.reshape(len(panels), -1).T
    for found, column in zip(every, by_base, strict=True):
        column[0].set_title(found.base.name, loc="left", fontsize=10)
        window = comparison.window
        for metric, axis in zip(panels, column, strict=True):
            axis.set_xlabel("training step")
            axis.set_ylabel(LABELS[metric])
            for arm in comparison.arms:
                name = found.name(arm)
                curves = found.results.smoothed(name, metric, window)
                if curves.empty:
                    continue
                style = {"color": arm.color, "linewidth": 1.6}
                steps = curves.index.tolist()
                by_seed = curves.T.to_numpy().tolist()
                plot_mean(axis, arm.label, steps, by_seed, style)
    add_legend(figure, f"mean over seeds of the last {comparison.window} steps; band: its 95 % interval")
    return figure
