"""What a comparison of objectives has found: differences paired by seed, runs that were lost, a page with a figure."""

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, product
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from gtpo.errors import UsageError
from gtpo.files import write_atomically
from gtpo.reports.curves import add_legend, grid, half_width_of
from gtpo.runs.directory import RunDirectory, completions_of_step
from gtpo.runs.provenance import code_of, git_revision, hashes_of, provenance, why_unlike
from paper.figures import LABELS, WIDTH, plot_curves
from paper.matrix import Evaluation, Experiment
from paper.results import GREEDY, Results, read_results
from paper.runner import run_all
from study import Numbers, Row, Seeds, Values, Words
from study.choices import by_generation, chosen_by_halves, with_copies
from study.comparison import Arm, Base, Comparison, Runs
from study.measures import LOST, has_fallen
from study.pairs import Pair, add_holm, difference_row, made_differently
from study.rate_curve import draw_rate_curves
from study.rendering import render
from study.storage import origin_of, origins_in, read_json, read_origins

PAGE, PLAN, FIGURE, RATES, COMMANDS = "comparison.md", "plan.md", "comparison.png", "rates.png", "commands.json"
LEAST = 5  # seeds that give a verdict
SETTINGS_SHOWN = {  # of every arm, in config.yaml -> on the page
    "learning_rate": "learning rate",
    "lr_scheduler_type": "schedule",
    "warmup_steps": "warmup steps",
    "num_generations": "G",
    "max_completion_length": "tokens of a completion",
    "lora_rank": "LoRA rank",
    "beta": "β",
    "temperature": "temperature",
    "reward": "reward",
    "dataset": "dataset",
}
OF_PROBLEMS = ["completions/clipped_ratio", "frac_reward_zero_std", "reward", "reward_std"]  # metrics that show them
TABLE = ("pass@1 sampled", "pass@1 greedy", "formatting late", "entropy late", "step_time mean")


class Found(NamedTuple):
    """The results from one base, condensed or of this machine, in ``place``; ``origins`` by run, ``rates`` by arm.

    ``chosen``: name of a choice -> arm -> seed -> rate; the runs at these are also there under the choice's name.
    """

    base: Base
    results: Results
    origins: Values
    rates: Values
    place: Path = Path()
    chosen: Mapping[str, Row] = MappingProxyType({})

    def at(self, view: str) -> "Found":
        """With every arm at a rate, or as a choice gives it."""
        return self._replace(rates=dict.fromkeys(self.rates, view))

    def name(self, arm: Arm) -> str:
        """The name of an arm's runs."""
        return arm.run_name(self.rates.get(arm.name))

    def pair(self, comparison: Comparison, arm: Arm, minus: Arm | None = None) -> Pair:
        """An arm and the one that is subtracted, the first, at seeds that both have from one revision and machine."""
        first = minus or comparison.arms[0]
        names = [self.name(first), self.name(arm)]
        own: list[str] = []
        for each in (first, arm) if self.place.is_dir() else ():
            own += code_of(each.settings.get("objective", ""))
        same: list[int] = []
        mixed: list[int] = []
        unlike: dict[int, Words] = {}
        for seed in comparison.seeds:
            if all((name, seed) in self.results.runs for name in names):
                labels = [f"{name}-s{seed}" for name in names]
                one, other = map(self.made_from, labels)
                if changed := made_differently(one, other, own):
                    unlike[seed] = changed
                else:
                    (mixed if why_unlike(*map(self.origins.get, labels)) else same).append(seed)
        window, base = comparison.window, self.base
        made_from = sorted({name for changed in unlike.values() for name in changed})
        where = (base.benchmark_name, base.name)
        prompts = {self.name(each): each.prompts for each in comparison.arms}
        return Pair(self.results, names, same, window, *where, len(mixed), prompts, len(unlike), made_from)

    def made_from(self, label: str) -> Row:
        """Hashes of the rows and files that a run of this machine was made from."""
        return dict(self.run(label).read_environment().get("made_from", {}))

    def run(self, label: str) -> RunDirectory:
        """A run of this machine."""
        return RunDirectory(self.place / label)

    def problems(self, comparison: Comparison, arm: Arm) -> dict[int, dict[str, str]]:
        """Seed -> what makes a run of an arm useless, as its own last lines say; empty for a run without problems."""
        from gtpo.reports.summary import find_problems  # it imports Transformers

        found = {}
        for seed in comparison.seeds:
            run = (self.name(arm), seed)
            if run in self.results.runs:
                rows = self.results.runs[run].filter(OF_PROBLEMS).reset_index().to_dict("records")
                stored = self.run("{}-s{}".format(*run)).read_config()
                found[seed] = find_problems(rows, stored.get("max_completion_length"))
        return found

    def are_useless(self, arms: Sequence[Arm], comparison: Comparison) -> bool:
        """Whether every run of two arms has a problem: their difference says nothing."""
        every = (self.problems(comparison, each) for each in arms)
        return all(of_arm and all(of_arm.values()) for of_arm in every)


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
    if comparison.choices:
        return with_choices(comparison, Found(base, results, origins, comparison.chosen_rates(results), place))
    chooser = comparison.chooser(base)
    rated = results if chooser is base else read_results([comparison.stored(chooser), comparison.place(chooser)])
    return Found(base, results, origins, comparison.chosen_rates(rated), place)


def with_choices(comparison: Comparison, found: Found) -> Found:
    """With metrics by generation, and the runs at the rates of each choice."""
    results = by_generation(found.results, comparison.arms, comparison.rates)
    chosen: dict[str, Row] = {}
    copies = {}
    origins = dict(found.origins)
    for name, choice in comparison.choices.items():
        chosen[name] = {
            arm.name: chosen_by_halves(comparison, choice, results, found.base, arm) for arm in comparison.arms
        }
        for arm in comparison.arms:
            for seed, rate in chosen[name][arm.name].items():
                copies[arm.run_name(name), seed] = arm.run_name(rate)
                origins[f"{arm.run_name(name)}-s{seed}"] = found.origins.get(f"{arm.run_name(rate)}-s{seed}")
    return found._replace(results=with_copies(results, copies), origins=origins, chosen=chosen)


def every_found(comparison: Comparison) -> list[Found]:
    return [found_of(comparison, base) for base in comparison.bases]


def every_view(comparison: Comparison, every: Sequence[Found]) -> list[Found]:
    """From each base, at each of the comparison's views if it has some."""
    if not comparison.views:
        return [*every]
    return [found.at(view) for found, view in product(every, comparison.views)]


# The runs


class Works(NamedTuple):
    """The runs and evaluations of a comparison.

    Attributes:
        stored: How many runs are taken from results/.
        again: Why stored runs make no pairs with those of here, and are made again.
    """

    runs: Runs
    evaluations: list[Evaluation]
    stored: int
    again: Words


def run_comparison(comparison: Comparison, seeds: Seeds, slots: Sequence[Values]) -> Words:
    """Choose the rates if there are several, then train and score what is missing; a message for each failure."""
    failures = []
    for _ in comparison.rates[:2]:  # the first round chooses of several rates
        works = works_of(comparison, seeds)
        check_commands(comparison, works.runs)
        failures += run_all(works.runs, works.evaluations, slots)
    return failures


def works_of(comparison: Comparison, seeds: Seeds) -> Works:
    """All arms of a seed before the next seed; of an arm without a rate the runs that choose it.

    A run that is stored in results/ is left out, unless ``--output_dir`` names a place to repeat it, or it makes no
    pair with one of its seed that is missing: it is of another machine or trainer, and made again. An arm without a
    rate misses every seed.
    """
    runs: list[Experiment] = []
    evaluations = []
    again: list[str] = []
    stored = 0
    for base in comparison.bases:
        found = found_of(comparison, base)
        base = base.timed(found.results)
        every = planned_runs(comparison, found, base, seeds)
        condensed = read_results([] if comparison.repeats else [comparison.stored(base)]).runs
        missing = {run for run in every if (run.name, run.seed) not in condensed or run.directory.exists()}
        has_all_rates = all(arm.name in found.rates for arm in comparison.arms)
        incomplete = {run.seed for run in missing}.intersection(seeds) if has_all_rates else set(seeds)
        unlike = unlike_here(found, [run for run in every if run not in missing and run.seed in incomplete])
        again += sorted({f"{base.name}, {run.name} is run again: stored runs are {why}" for run, why in unlike.items()})
        left = [run for run in every if run in missing or run in unlike]
        runs += left
        stored += len(every) - len(left)
        if compared := [run for run in left if run.seed in seeds]:
            evaluations += comparison.evaluations(base, compared)
    runs.sort(key=attrgetter("seed"))
    return Works(runs, evaluations, stored, again)


def planned_runs(comparison: Comparison, found: Found, base: Base, seeds: Seeds) -> list[Experiment]:
    """The runs of all arms from a base, made or not; of an arm without a rate those that choose it."""
    every: list[Experiment] = []
    for arm in comparison.arms:
        if arm.name in comparison.rates_as:
            for seed in seeds:
                rates = {of[arm.name][seed] for of in found.chosen.values() if seed in of[arm.name]}
                every += comparison.runs(base, [arm], sorted(rates), [seed])
        elif comparison.choices:
            every += comparison.runs(base, [arm], comparison.rates_for(arm), seeds)
        elif arm.name in found.rates:
            every += comparison.runs(base, [arm], [found.rates[arm.name]], seeds)
        elif comparison.chooser(found.base) is found.base:
            every += comparison.runs(base, [arm], comparison.rates, comparison.rate_seeds)
    return every


def unlike_here(found: Found, runs: Runs) -> dict[Experiment, str]:
    """Those of some stored runs that make no pair with a run of here -> why."""
    here = origin_of(provenance())
    whys = {run: why_unlike(found.origins.get(run.label), here) for run in runs}
    return {run: why for run, why in whys.items() if why}


def state_text(comparison: Comparison, seeds: Seeds) -> str:
    """What the comparison will take, what is finished, and what difference its seeds can show."""
    tables = [table_of(comparison, found) for found in every_view(comparison, every_found(comparison))]
    return render("state.txt", page_values(comparison, tables) | works_of(comparison, seeds)._asdict())


def page_values(comparison: Comparison, tables: Sequence[Row]) -> Row:
    """``unit``: the half width of an interval of these seeds, or of the least that give a verdict, for pairs with a
    standard deviation of 1."""
    unit = half_width_of(1, max(LEAST, len(comparison.seeds)))
    return {"comparison": comparison, "tables": tables, "unit": unit, "least": LEAST}


def check_commands(comparison: Comparison, runs: Runs) -> None:
    """UsageError if a run in the directory was made by another command: it would be taken for this one.

    commands.json has the command of each run, then a hash of each file and model of the user's that it names.
    """
    path = comparison.directory / COMMANDS
    stored = read_json(path)
    for run in runs:
        argv = [*run.argv]
        words = argv + [f"{name}#{digest}" for name, digest in hashes_of(argv[argv.index("--model") :]).items()]
        place = run.run.path
        before: Words = stored.get(place.as_posix(), words)
        gone = [word for word in (Counter(before) - Counter(words)).elements() if len(word) != 64]  # a hash of before
        if place.exists() and (gone or before[: len(argv)] != argv):
            changed = [word.partition("#")[0] for word in gone if "#" in word]
            why = f"was made with other settings ({' '.join(gone)})"
            if changed:
                why = f"was made with another {changed[0]}, which has changed since"
            raise UsageError(f"{place} {why}: name another --output_dir.")
        stored[place.as_posix()] = words
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(stored, indent=1))


def refuse_dirty(allowed: bool) -> None:
    """UsageError if files of this checkout differ from its commit: the runs could not be made again."""
    if str(git_revision()).endswith("-dirty") and not allowed:
        raise UsageError("files differ from the last commit: commit them, or add --dirty, which the page then says.")


# What was found


def by_seed(pairs: Sequence[Pair], measure: str) -> list[Numbers]:
    """The differences from all bases, a row for each seed that has all of them."""
    by_base = [pair.differences(measure) for pair in pairs]
    shared = sorted(set.intersection(*map(set, by_base)))
    return [[differences[seed] for differences in by_base] for seed in shared]


def slope_row(x: Numbers, pairs: Sequence[Pair], measure: str) -> Row:
    """The slope of a difference over the ``x`` of the bases."""
    slopes = [float(np.polyfit(x, row, 1)[0]) for row in by_seed(pairs, measure)]
    return difference_row(slopes) | {"means": [], "where": "slope over x"}


def pooled_row(pairs: Sequence[Pair], measure: str, bound: float) -> Row:
    """The mean of a difference over the bases; p is of its distance from a bound."""
    row = difference_row([fmean(differences) - bound for differences in by_seed(pairs, measure)])
    if row["mean"] is not None:
        row["mean"] += bound
    return row | {"means": [], "where": "mean over bases", "bound": bound}


def primary_rows(comparison: Comparison, every: Sequence[Found]) -> list[Row]:
    """The planned differences; Holm's correction is over all of them."""
    rows: list[Row] = []
    for primary, arm in product(comparison.primary, comparison.arms[1:]):
        if comparison.is_own or arm.name in primary.get("arms", [arm.name]):
            rows += rows_of_primary(comparison, every, primary, arm)
    if len(rows) > 1:
        add_holm(rows)
    return rows


def rows_of_primary(comparison: Comparison, every: Sequence[Found], primary: Row, arm: Arm) -> list[Row]:
    """A planned difference of an arm: from each base, or one over all bases, a slope or a mean."""
    measure = primary["measure"]
    name = primary.get("minus", comparison.arms[0].name)
    minus = next(each for each in comparison.arms if each.name == name)
    views = [found.at(primary["at"]) if "at" in primary else found for found in every]
    pairs = [found.pair(comparison, arm, minus) for found in views]
    useless = [found.are_useless((minus, arm), comparison) for found in views]
    if primary.get("slope"):
        rows = [slope_row([found.base.x or 0.0 for found in every], pairs, measure)]
    elif primary.get("over_bases"):
        rows = [pooled_row(pairs, measure, primary.get("above", 0.0))]
    else:
        rows = [{**pair.row(measure), "where": pair.base} for pair in pairs]
    if len(rows) < len(every):  # of all bases
        useless = [all(useless)]
    shared = {"measure": measure, "arm": arm, "minus": minus, "needs_p": comparison.needs_p}
    return [{**row, **shared, "are_useless": is_useless} for row, is_useless in zip(rows, useless, strict=True)]


def table_of(comparison: Comparison, found: Found) -> Row:
    """Of a base: its scores before training, and each arm minus the first one in every measure."""
    untrained = {}
    for kind, suffix in (("sampled", ""), ("greedy", GREEDY)):
        scored = found.results.scored("base", found.base.benchmark_name + suffix)
        if len(scored) == 1:  # shared results can be from several bases
            untrained[f"pass@1 {kind}"] = float(scored["pass@1"].iloc[0])
    measures = dict.fromkeys([*comparison.measures, *TABLE])
    rows = []
    for arm in comparison.arms[1:]:
        pair = found.pair(comparison, arm)
        row = {
            "arm": arm,
            "seeds": len(pair.seeds),
            "mixed": pair.mixed,
            "unlike": pair.unlike,
            "made_from": pair.made_from,
            "lost": pair.lost(has_fallen),
            "measures": {name: pair.row(name) for name in measures},
        }
        rows.append(row)
    return {"base": found.base, "rates": found.rates, "chosen": found.chosen, "untrained": untrained, "rows": rows}


def full_tables(comparison: Comparison, every: Sequence[Found]) -> list[Row]:
    """The tables of all bases, with the problems of their runs, and what these were trained with."""
    tables = []
    for found in every:
        more = {"problems": problem_rows(comparison, found), "settings": settings_rows(comparison, found)}
        tables.append(table_of(comparison, found) | more)
    return tables


def problem_rows(comparison: Comparison, found: Found) -> list[Row]:
    """Each problem of an arm's runs: how many of them have it, and what the first of these says."""
    rows = []
    for arm in comparison.arms:
        of_seeds = [*found.problems(comparison, arm).values()]
        for name in dict.fromkeys(chain(*of_seeds)):
            texts = [of_run[name] for of_run in of_seeds if name in of_run]
            rows.append({"arm": arm, "count": len(texts), "runs": len(of_seeds), "text": texts[0]})
    return rows


def settings_rows(comparison: Comparison, found: Found) -> list[Row]:
    """What the runs of each arm were trained with, by the first one that is there; a plan has it before the runs."""
    rows: list[Row] = []
    for arm in comparison.arms:
        for seed in [] if comparison.name else comparison.seeds:
            run = found.run(f"{found.name(arm)}-s{seed}")
            stored = run.read_config()
            if not stored:
                continue
            values = {label: stored[key] for key, label in SETTINGS_SHOWN.items() if key in stored}
            values["completions a step"] = completions_of_step(stored, run.read_environment())
            values |= {f"hash of {name}": text for name, text in found.made_from(run.path.name).items()}
            rows.append({"arm": arm, "values": values})
            break
    return rows


def found_text(comparison: Comparison) -> str:
    """What was found, as the screen shows it: problems of the runs, and the table of the page."""
    every = every_view(comparison, every_found(comparison))
    return render("found.txt", page_values(comparison, full_tables(comparison, every)))


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
        if done.stdout.split() != plan_text(comparison).split():  # lines may be wrapped otherwise
            return "another"
    return "committed" if revisions else "uncommitted"


def write_page(comparison: Comparison, directory: Path, command: str) -> list[Path]:
    """The page of a comparison, made by ``command``, and its figures; the files."""
    every = every_found(comparison)
    origins = [origin for found in every for origin in found.origins.values()]
    revisions = sorted({str(revision) for revision, *_ in origins})
    machines = {str(origin[1:3]) for origin in origins}
    values = {
        "lost": LOST,
        "primary": primary_rows(comparison, every),
        "command": command,
        "revisions": revisions,
        "machines": len(machines),
        "plan": plan_state(comparison, revisions),
        **page_values(comparison, full_tables(comparison, every_view(comparison, every))),
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_figure(comparison, every, directory / FIGURE)
    figures = [directory / FIGURE]
    if comparison.choices:
        draw_rate_curves(comparison, [(found.base, found.results) for found in every], directory / RATES)
        figures.append(directory / RATES)
    write_atomically(directory / PAGE, render("comparison.template.md", values))
    return [directory / PAGE, *figures]


def write_figure(comparison: Comparison, every: Sequence[Found], path: Path) -> None:
    """A column per base, a row per metric, or a row of a single base.

    Colour is the arm, named with its rate where they differ; line and band are the mean over seeds and its interval.
    """
    panels = comparison.panels
    rows, columns = len(panels), len(every)
    if columns == 1:
        rows, columns = columns, rows
    figure, axes = grid(rows, columns, width=WIDTH / min(3, columns), height=2.4)
    for found, column in zip(every, axes.reshape(len(panels), -1).T, strict=True):
        column[0].set_title(found.base.title, loc="left", fontsize=10)
        rates_differ = len({*found.rates.values()}) > 1
        for metric, axis in zip(panels, column, strict=True):
            axis.set(xlabel="training step", ylabel=LABELS[metric])
            for arm in comparison.arms:
                curves = found.results.smoothed(found.name(arm), metric, comparison.window)
                label = f"{arm.label} at {found.rates[arm.name]}" if rates_differ else arm.label
                plot_curves(axis, label, curves, {"color": arm.color, "linewidth": 1.6})
    add_legend(figure, f"mean over seeds of the last {comparison.window} steps; band: its 95 % interval")
    write_atomically(path, partial(figure.savefig, dpi=100, format="png"))
