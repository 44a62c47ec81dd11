"""Figures and Table 1: what is drawn is what the runs logged, and what is missing is reported."""

import math
import random
from pathlib import Path
from typing import Any

from helpers.files import tables_of
from helpers.refusals import refused
from helpers.results import results_of
from helpers.runs import fake_run
from helpers.scripts import Command
from pandas import read_csv
from pytest import CaptureFixture, MonkeyPatch, approx, mark

from gtpo.reports.curves import PANELS, panels_of, plot_training
from gtpo.reports.metrics import smooth
from paper.figures import draw, draw_all, table1
from paper.matrix import load_matrix, runs_of, scored_name

TABLES = tables_of(__file__)
MATRIX = load_matrix()


def lines_of(axis: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Legend label -> (x, y), of the lines of one panel that the legend has."""
    lines = [line for line in axis.lines if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def logged(**values: list[float | None]) -> list[dict[str, Any]]:
    """The rows of a run from step 1 on, by metric."""
    return [
        {"step": step, **dict(zip(values, numbers, strict=True))}
        for step, numbers in enumerate(zip(*values.values(), strict=True), 1)
    ]


def test_drawn_values_are_the_logged_ones() -> None:
    """A step without a metric is skipped."""
    gtpo = logged(accuracy=[10, None, 30, 40], entropy=[0.3, 0.2, 0.1, 0.0])
    del gtpo[3]["accuracy"]
    figure = plot_training({"GTPO": gtpo, "GRPO": logged(accuracy=[5, 6], entropy=[0.4, 0.5])}, window=1)
    accuracy, entropy = figure.axes
    assert [accuracy.get_title(), entropy.get_title()] == [PANELS["accuracy"], PANELS["entropy"]]
    assert lines_of(accuracy) == {"GTPO": ([1, 3], [10, 30]), "GRPO": ([1, 2], [5, 6])}
    assert lines_of(entropy)["GTPO"] == ([1, 2, 3, 4], [0.3, 0.2, 0.1, 0.0])


def test_smoothing_by_hand() -> None:
    assert smooth([1.0, 2.0, 6.0, 3.0], 3) == [1.0, 1.5, 3.0, approx(11 / 3)]


@mark.parametrize(
    ("row", "panels"),
    TABLES["panels_are_those_that_a_run_logged"],
    ids=["paper's rewards", "custom reward", "sft"],
)
def test_panels_are_those_that_a_run_logged(row: dict[str, Any], panels: list[str]) -> None:
    assert list(panels_of([[row | {"step": 1}]])) == panels


# figures.py --runs


def test_runs_with_the_same_name_need_labels(tmp_path: Path, run_figures: Command, monkeypatch: MonkeyPatch) -> None:
    """outputs/a/gtpo and outputs/b/gtpo: never one curve for both."""
    seen = []
    monkeypatch.setattr("gtpo.reports.curves.plot_training", lambda *a: seen.append(a) or plot_training(*a))
    rows = {"A": logged(accuracy=[1, 2], entropy=[3, 4]), "B": logged(accuracy=[5, 6], entropy=[7, 8])}
    runs = [str(fake_run(tmp_path / label / "gtpo", rows=rows[label]).path) for label in rows]
    (tmp_path / "A" / "gtpo" / "config.yaml").write_text("{model: tiny, gamma: 0.0, entropy_filter: 'off'}")
    argv = ["--runs", *runs, "--output", str(tmp_path / "curves.png")]
    with refused("2 runs have the labels gtpo, gtpo: give each its own with --labels"):
        run_figures(*argv)
    run_figures(*argv, "--labels", "A", "B", "--window", "2")
    assert seen == [(rows, 2, {"A": "correction"})]


# The paper's figures, from small runs on disk


def test_figure_2_by_hand(monkeypatch: MonkeyPatch) -> None:
    """A column per learning rate: trailing means of two steps, their mean over two seeds, scores over k."""
    monkeypatch.setitem(MATRIX["tiny"], "window", 2)
    metrics = {
        "gtpo-g8": {1: logged(accuracy=[10, 30, 50]), 2: logged(accuracy=[20, 20, 20])},
        "grpo-late-g8-beta0": {1: logged(accuracy=[0, 100, 0])},
    }
    passed = {"scores": {"pass": {"1": 40.0, "8": 60.0}, "maj": {"4": 50.0}}}
    at_end = {"scores": {"pass": {"1": 1.0}, "maj": {"4": 2.0}}}
    scores = {
        "gtpo-g8": {"arithmetic": {1: passed, 2: {"scores": {"pass": {"1": 50.0, "8": 80.0}, "maj": {"4": 60.0}}}}},
        "grpo-late-g8-beta0@best": {"arithmetic": {1: passed}},
        "grpo-late-g8-beta0": {"arithmetic": {1: at_end}},
    }
    axes = draw(MATRIX, "fig2", "tiny", results_of(metrics, scores)).axes
    assert [axis.get_title(loc="left") for axis in axes] == [
        "rate that learns, learning rate 0.001", "high rate, learning rate 0.0028",
        "", "",
        "", "GRPO at its best step",
        "", "GRPO at its best step",
    ]  # fmt: skip
    assert [axis.get_ylabel() for axis in axes[::2]] == ["accuracy (%)", "formatting (%)", "pass@k (%)", "maj@k (%)"]
    accuracy, accuracy_late, _, _, pass_at_k, pass_late, maj_at_k, _ = axes
    gtpo, grpo = "GTPO G = 8 (n = 2)", "GRPO G = 8, β = 0 (n = 1)"
    assert lines_of(accuracy) == {gtpo: ([1, 2, 3], [15, 20, 30])}
    assert lines_of(accuracy_late) == {grpo: ([1, 2, 3], [0, 50, 50])}
    assert lines_of(pass_at_k) == {gtpo: ([1, 8], [45, 70])} and lines_of(maj_at_k) == {gtpo: ([4], [55])}
    assert lines_of(pass_late) == {grpo: ([1, 8], [40, 60])}


def test_the_base_is_a_dashed_line_among_scores() -> None:
    """Not in the entropy, and not where another base model was evaluated."""
    rows = {1: logged(accuracy=[50, 50], formatting=[90, 90], entropy=[0.3, 0.3])}
    scores = {"pass": {"1": 40.0, "2": 60.0}, "maj": {"1": 41.0, "2": 42.0}, "format": 52.5}

    def base_lines(label: str) -> dict[str, list[float]]:
        base = {"arithmetic": {0: {"label": label, "scores": scores}}}
        axes = draw(MATRIX, "fig2", "tiny", results_of({"gtpo-g8": rows}, {"base": base})).axes
        lines = [(axis.get_ylabel(), line) for axis in axes for line in axis.lines]
        return {panel: list(line.get_ydata()) for panel, line in lines if line.get_label() == "base model"}

    found = base_lines("base-tiny")
    assert (found["accuracy (%)"], found["formatting (%)"]) == ([40.0, 40.0], [52.5, 52.5])
    assert (found["pass@k (%)"], found["maj@k (%)"]) == ([40.0, 60.0], [41.0, 42.0])
    assert base_lines("base-Qwen2.5-3B-Instruct") == {}


def test_band_is_the_95_percent_interval_of_the_mean() -> None:
    """Values 1, 2, 3: 2 ± 4.303 / sqrt(3); values 4, 4, 4: no width; two seeds have no band."""
    figures = {"f": {"panels": ["kl"], "tiny": {"group": {"curve": "sft"}}}}
    matrix = {"tiny": MATRIX["tiny"] | {"window": 1}, "figures": figures, "table1": {}}

    def drawn(*curves: list[float | None]) -> tuple[set[Any], list[float]]:
        """The corners of the band, and the line."""
        runs = {seed: logged(kl=curve) for seed, curve in enumerate(curves, 1)}
        [axis] = draw(matrix, "f", "tiny", results_of({"sft": runs})).axes
        corners = {tuple(point.round(3)) for band in axis.collections for point in band.get_paths()[0].vertices}
        return corners, list(axis.lines[0].get_ydata())

    band = {(1.0, -0.484), (1.0, 4.484)}
    assert drawn([1, 4], [2, 4], [3, 4]) == (band | {(2.0, 4.0)}, [2.0, 4.0])
    corners, line = drawn([1, 4], [2, None], [3, 4])  # no value of one seed: a gap
    assert corners == band and line[0] == 2.0 and math.isnan(line[1])
    assert drawn([1, 4], [2, 4]) == (set(), [1.5, 4.0])


def test_curves_say_which_runs_and_seeds_are_missing() -> None:
    rows = logged(accuracy=[50, 50], formatting=[90, 90], entropy=[0.3, 0.3])
    alone = draw(MATRIX, "fig5b", "tiny", results_of({"gtpo-g8": {1: rows}})).axes
    both = draw(MATRIX, "fig5b", "tiny", results_of({"gtpo-g8": {1: rows, 2: rows}, "gtpo-late-g8": {1: rows}})).axes
    stable, high = "rate that learns, learning rate 0.001", "high rate, learning rate 0.0028, n = 1"
    assert {axis.get_title(loc="left") for axis in alone} == {stable, ""}
    assert [axis.get_title(loc="left") for axis in both[:2]] == [stable, high]


def test_color_is_the_method_and_dash_the_condition() -> None:
    """Fig. 3: GTPO, its correction alone, GRPO with three β."""
    rows = {1: logged(accuracy=[50, 50], formatting=[90, 90])}
    found = draw(MATRIX, "fig3", "tiny", results_of(dict.fromkeys(runs_of(MATRIX, ["fig3"], "tiny"), rows)))
    assert [(line.get_color(), line.get_linestyle()) for line in found.axes[1].lines] == [
        *(("#0072B2", "-"), ("#D55E00", "-")),
        *(("#777777", "-"), ("#777777", "--"), ("#777777", "-.")),
    ]


def test_seeds_of_different_length_are_compared_at_common_steps() -> None:
    found = results_of({"run": {1: logged(kl=[1, None, 3, 4]), 2: logged(kl=[2, 2])}})
    assert found.smoothed("run", "kl", 2).to_dict() == {1: {1: 1.0, 2: 1.0}, 2: {1: 2.0, 2: 2.0}}  # the last one there
    assert found.smoothed("run", "entropy", 2).empty


def test_figure_is_drawn_without_a_missing_run(tmp_path: Path) -> None:
    rows = {1: logged(accuracy=[1, 2], formatting=[3, 4], entropy=[5, 6])}
    rest = [run for run in runs_of(MATRIX, ["fig6"], "tiny") if run != "grpo-g8-beta1e-6"]
    (png, pdf), [message] = draw_all(MATRIX, ["fig6"], "tiny", results_of(dict.fromkeys(rest, rows)), tmp_path)
    assert (png, pdf) == (tmp_path / "fig6.png", tmp_path / "fig6.pdf")
    assert png.read_bytes().startswith(b"\x89PNG") and pdf.read_bytes().startswith(b"%PDF")
    assert message == "fig6: no run of grpo-g8-beta1e-6: `python reproduce.py fig6 --scale tiny`"
    text = (tmp_path / "fig6.md").read_text()
    assert message in text and "| grpo-g8-beta1e-6 | missing |" in text


# Table 1


PRINTED = """
LLaMA GSM8K SFT 0 0 0 13.3 20 | 0 0 0 0 6.7 | 12.5 37.5 42.5 57.5 72.5 | 10 15 15 20 17.5
QWEN MATH GRPO 0 3.3 3.3 6.7 16.7 | 0 3.3 10 13.3 16.7 | 30 67.5 70 77.5 87.5 | 27.5 42.5 42.5 45 42.5
"""


def test_table_1_shows_the_best_variant_beside_the_paper() -> None:
    """Scores are drawn at random: no two are equal, and the best variant at k = 64 is not the best at another k."""
    number = random.Random(0).random
    benchmarks = MATRIX["paper"]["evaluation"]
    runs = [scored_name(MATRIX, "paper", run) for run in runs_of(MATRIX, ["table1"], "paper")]
    scores = {
        run: {name: {kind: {str(2**i): number() for i in range(7)} for kind in ("pass", "maj")} for name in benchmarks}
        for run in runs
    }
    entries = {run: {name: {3407: {"scores": scores[run][name]}} for name in benchmarks} for run in runs}
    table = table1(MATRIX, "paper", results_of({}, entries))
    assert len(table) == 12 * 20
    for line in PRINTED.strip().splitlines():
        model, dataset, method, published = line.split(maxsplit=3)
        rows = table[(table["group"] == f"{model}, {dataset}") & (table["method"] == method)]
        assert rows["paper"].tolist() == [float(number) for number in published.replace("|", " ").split()]
        variants = [run for run in runs if run.startswith(f"{method}-{model}-{dataset}".lower())]
        best = max(variants, key=lambda run: scores[run][dataset.lower()]["pass"]["64"])
        assert {*rows["run"]} == {best}
        for row in rows.itertuples():
            assert row.ours == scores[best][row.benchmark][row.score][str(row.k)]


def test_table_1_as_markdown_and_csv(tmp_path: Path) -> None:
    scored = {3407: {"scores": {"pass": {"1": 41.0, "64": 70.0}}}}
    found = results_of({}, {"gtpo-llama-gsm8k-g8": {"gsm8k": scored, "aime24": scored}})
    written, messages = draw_all(MATRIX, ["table1"], "paper", found, tmp_path)
    assert [path.name for path in written] == ["table1.md", "table1.csv"]
    text = (tmp_path / "table1.md").read_text()
    assert "| LLaMA, GSM8K | GTPO (gtpo-llama-gsm8k-g8) | 41.0 / 0.0 | - / 10.0 |" in text
    assert "| LLaMA, GSM8K | GRPO (not run) | - / 0.0 | - / 0.0 |" in text
    stored = read_csv(tmp_path / "table1.csv")
    assert len(stored) == 240 and {13.3, 72.5} <= {*stored["paper"][stored["method"] == "SFT"]}
    assert any("no evaluation on aime24 of " in text for text in messages)


# figures.py


@mark.slow
def test_command_draws_what_the_runs_allow(here: Path, run_figures: Command, capsys: CaptureFixture[str]) -> None:
    fake_run(here / "outputs" / "gtpo-g8-s1", rows=logged(accuracy=[1, 2], formatting=[3, 4], entropy=[5, 6]))
    run_figures()
    printed = capsys.readouterr().out
    drawn = {path.stem for path in Path("figures/tiny").glob("*.png")}
    assert drawn == {name for name in MATRIX["figures"] if "gtpo-g8" in runs_of(MATRIX, [name], "tiny")}
    assert "fig5a: no run of grpo-g8-beta0.04, grpo-g8-beta0, grpo-g8-beta1e-6: `python reproduce.py fig5a" in printed
    assert "No runs at paper scale" in printed and "no run of grpo-llama" not in printed
    run_figures("fig5b", "--search", "outputs", "--output", "other", "--scale", "tiny")
    assert {path.name for path in Path("other/tiny").iterdir()} == {"fig5b.png", "fig5b.pdf", "fig5b.md"}
