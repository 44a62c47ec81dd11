"""What a comparison of objectives has found: differences paired by seed, runs that were lost, a page with a figure."""

import subprocess
from collections.abc import Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import fmean

import numpy as np

from gtpo.files import write_atomically
from gtpo.reports.curves import add_legend, grid, half_width_of
from gtpo.runs.directory import completions_of_step
from paper.figures import LABELS, WIDTH, plot_curves
from paper.results import GREEDY
from study import Numbers, Row, Seeds, Words
from study.comparison import Arm, Comparison
from study.found import Found, every_found, every_view
from study.measures import LOST, has_fallen
from study.pairs import Pair, add_holm, difference_row
from study.rate_curve import draw_rate_curves
from study.rendering import render
from study.runs import works_of

PAGE, PLAN, FIGURE, RATES = "comparison.md", "plan.md", "comparison.png", "rates.png"
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
TABLE = ("pass@1 sampled", "pass@1 greedy", "formatting late", "entropy late", "step_time mean")


def state_text(comparison: Comparison, seeds: Seeds) -> str:
    """What the comparison will take, what is finished, and what difference its seeds can show."""
    tables = [table_of(comparison, found) for found in every_view(comparison, every_found(comparison))]
    return render("state.txt", page_values(comparison, tables) | works_of(comparison, seeds)._asdict())


def page_values(comparison: Comparison, tables: Sequence[Row]) -> Row:
    """``unit``: the half width of an interval of these seeds, or of the least that give a verdict, for pairs with a
    standard deviation of 1."""
    unit = half_width_of(1, max(LEAST, len(comparison.seeds)))
    return {"comparison": comparison, "tables": tables, "unit": unit, "least": LEAST}


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
        rows = [
            {**pair.row(measure), "where": where_of(comparison, view)} for pair, view in zip(pairs, views, strict=True)
        ]
    if len(rows) < len(every):  # of all bases
        useless = [all(useless)]
    shared = {"measure": measure, "arm": arm, "minus": minus, "needs_p": comparison.needs_p}
    return [{**row, **shared, "are_useless": is_useless} for row, is_useless in zip(rows, useless, strict=True)]


def table_of(comparison: Comparison, found: Found) -> Row:
    """Of a base, at a view: its scores before training, and each arm minus the first one in every measure."""
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
    shared = {"base": found.base, "where": where_of(comparison, found), "rates": found.rates, "chosen": found.chosen}
    return shared | {"untrained": untrained, "rows": rows}


def where_of(comparison: Comparison, found: Found) -> str:
    """A base, and the view of a comparison that has some."""
    return ", ".join([found.base.name, *([next(iter(found.rates.values()))] if comparison.views else [])])


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
    step = "generation" if comparison.counts_generations else "training step"
    figure, axes = grid(rows, columns, width=WIDTH / min(3, columns), height=2.4)
    for found, column in zip(every, axes.reshape(len(panels), -1).T, strict=True):
        column[0].set_title(found.base.title, loc="left", fontsize=10)
        rates_differ = len({*found.rates.values()}) > 1
        for metric, axis in zip(panels, column, strict=True):
            axis.set(xlabel=step, ylabel=LABELS[metric])
            for arm in comparison.arms:
                curves = found.results.smoothed(found.name(arm), metric, comparison.window)
                label = f"{arm.label} at {found.rates[arm.name]}" if rates_differ else arm.label
                plot_curves(axis, label, curves, {"color": arm.color, "linewidth": 1.6})
    add_legend(figure, f"mean over seeds of the last {comparison.window} {step.split()[-1]}s; band: its 95 % interval")
    write_atomically(path, partial(figure.savefig, dpi=100, format="png"))
