"""Figures and Table 1: what is drawn is what the runs logged, and what is missing is reported."""

import csv
import math
import re
from pathlib import Path
from typing import Any

from fake_runs import MATRIX, make_all, make_run, rows, value
from helpers.files import tables_of
from helpers.refusals import refused
from helpers.results import results_of
from helpers.runs import fake_run
from helpers.scripts import Command
from pytest import CaptureFixture, MonkeyPatch, approx, mark

from gtpo.reports.curves import LINE_WIDTH, PANELS, panels_of, plot_training
from gtpo.reports.metrics import smooth
from paper.figures import draw, draw_all, table1
from paper.matrix import runs_of, scored_name
from paper.results import read_results

TABLES = tables_of(__file__)


def lines_of(axis: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Legend label -> (x, y), of the lines of one panel that the legend has."""
    lines = [line for line in axis.lines if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def drawn(figure: Any) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Axis title -> the lines of the panel."""
    return {axis.get_title(): lines_of(axis) for axis in figure.axes}


def test_drawn_values_are_the_logged_ones() -> None:
    """A step without a metric is skipped."""
    runs = {"GTPO": rows(5), "GRPO": rows(4, offset=7.0)}
    del runs["GTPO"][1]["accuracy"]
    runs["GTPO"][2]["accuracy"] = None
    figure = plot_training(runs, window=1)
    assert [axis.get_title() for axis in figure.axes] == list(PANELS.values())
    for metric, title in PANELS.items():
        for name, logged in runs.items():
            having = [row for row in logged if row.get(metric) is not None]
            assert drawn(figure)[title][name] == ([row["step"] for row in having], [row[metric] for row in having])


def test_smoothing_by_hand() -> None:
    assert smooth([1.0, 2.0, 6.0, 3.0], 2) == [1.0, 1.5, 4.0, 4.5]
    assert smooth([1.0, 2.0, 6.0, 3.0], 3) == [1.0, 1.5, 3.0, approx(11 / 3)]
    assert smooth([1.0, 2.0], 1) == [1.0, 2.0]
    assert smooth([4.0, 2.0], 100) == [4.0, 3.0]
    assert smooth([], 5) == []


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
    logged = {"A": rows(3), "B": rows(3, offset=9.0)}
    runs = [str(fake_run(tmp_path / label / "gtpo", rows=logged[label]).path) for label in logged]
    output = str(tmp_path / "curves.png")
    with refused("2 runs have the labels gtpo, gtpo: give each its own with --labels"):
        run_figures("--runs", *runs, "--output", output)
    run_figures("--runs", *runs, "--output", output, "--labels", "A", "B")
    (Path(runs[0]) / "config.yaml").write_text("{model: tiny, gamma: 0.0, entropy_filter: 'off'}")
    run_figures("--runs", *runs, "--output", output, "--labels", "A", "B", "--window", "2")
    assert seen == [(logged, 10, {}), (logged, 2, {"A": "correction"})]


# The paper's figures, from small runs on disk


def logged(**values: list[float]) -> list[dict[str, float]]:
    steps = range(len(next(iter(values.values()))))
    return [{"step": step + 1} | {metric: numbers[step] for metric, numbers in values.items()} for step in steps]


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
    labels = ["accuracy (%)", "formatting (%)", "pass@k (%)", "maj@k (%)"]
    assert [axis.get_ylabel() for axis in axes[::2]] == [axis.get_ylabel() for axis in axes[1::2]] == labels
    assert [axis.get_xlabel() for axis in axes[::2]] == ["training step", "training step", "k", "k"]
    accuracy, accuracy_late, _, _, pass_at_k, pass_late, maj_at_k, _ = axes
    gtpo, grpo = "GTPO G = 8 (n = 2)", "GRPO G = 8, β = 0 (n = 1)"
    assert lines_of(accuracy) == {gtpo: ([1, 2, 3], [15, 20, 30])}
    assert lines_of(accuracy_late) == {grpo: ([1, 2, 3], [0, 50, 50])}
    assert lines_of(pass_at_k) == {gtpo: ([1, 8], [45, 70])} and lines_of(maj_at_k) == {gtpo: ([4], [55])}
    assert lines_of(pass_late) == {grpo: ([1, 8], [40, 60])}
    assert [text.get_text() for text in pass_late.get_xticklabels()] == ["1", "8"]
    assert [axis.lines[0].get_color() for axis in (accuracy, accuracy_late)] == ["#0072B2", "#777777"]


def test_the_base_is_a_dashed_line_among_scores() -> None:
    """Not in the entropy, not in a task that it was not evaluated on, and not where another base model was."""
    steps = [{"step": step, "accuracy": 50.0, "formatting": 90.0, "entropy": 0.3} for step in (1, 2)]
    scores = {"pass": {"1": 40.0, "2": 60.0}, "maj": {"1": 41.0, "2": 42.0}, "format": 52.5}
    base = {"arithmetic": {0: {"label": "base-tiny", "scores": scores}}}
    metrics = {"gtpo-g8": {1: steps}, "gtpo-late-g8": {1: steps}}

    def lines(name: str, entries: Any) -> dict[str, list[list[float]]]:
        found: dict[str, list[list[float]]] = {}
        for axis in draw(MATRIX, name, "tiny", results_of(metrics, {"base": entries})).axes:
            for line in axis.lines:
                if line.get_label() == "base model":
                    assert line.get_linestyle() == "--"
                    found.setdefault(axis.get_ylabel(), []).append(list(line.get_ydata()))
        return found

    assert lines("fig2", base) == {
        "accuracy (%)": [[40.0, 40.0]] * 2,  # a group each of the stable and the high rate
        "formatting (%)": [[52.5, 52.5]] * 2,
        "pass@k (%)": [[40.0, 60.0]] * 2,
        "maj@k (%)": [[41.0, 42.0]] * 2,
    }
    assert lines("fig5b", base).keys() == {"accuracy (%)", "formatting (%)"}
    assert lines("fig2", {}) == {}
    assert lines("fig2", {"arithmetic": {0: {"label": "base-Qwen2.5-3B-Instruct", "scores": scores}}}) == {}


def test_band_is_the_95_percent_interval_of_the_mean() -> None:
    """Values 1, 2, 3: 2 ± 4.303 / sqrt(3); values 4, 4, 4: no width; two seeds have no band."""
    runs = {seed: [{"step": 1, "kl": 1.0 * seed}, {"step": 2, "kl": 4.0}] for seed in (1, 2, 3)}
    figures = {"f": {"panels": ["kl"], "tiny": {"group": {"curve": "sft"}}}}
    matrix = {"tiny": MATRIX["tiny"] | {"window": 1}, "figures": figures, "table1": {}}
    [axis] = draw(matrix, "f", "tiny", results_of({"sft": runs})).axes
    corners = {tuple(point) for path in axis.collections[0].get_paths() for point in path.vertices.round(3)}
    assert corners == {(1.0, -0.484), (1.0, 4.484), (2.0, 4.0)}
    assert list(axis.lines[0].get_ydata()) == [2.0, 4.0]
    runs[2][1]["kl"] = None  # no value of one seed: a gap
    [axis] = draw(matrix, "f", "tiny", results_of({"sft": runs})).axes
    assert {x for path in axis.collections[0].get_paths() for x, _ in path.vertices} == {1.0}
    assert axis.lines[0].get_ydata()[0] == 2.0 and math.isnan(axis.lines[0].get_ydata()[1])
    runs[2][1]["kl"] = 4.0
    del runs[3]
    [axis] = draw(matrix, "f", "tiny", results_of({"sft": runs})).axes
    assert not axis.collections and list(axis.lines[0].get_ydata()) == [1.5, 4.0]


def test_curves_say_which_runs_and_seeds_are_missing() -> None:
    rows = [{"step": step, "accuracy": 50.0, "formatting": 90.0, "entropy": 0.3} for step in (1, 2)]

    def titles(**runs: Any) -> list[str]:
        axes = draw(MATRIX, "fig5b", "tiny", results_of(runs)).axes
        return [axis.get_title(loc="left") for axis in axes if axis.get_title(loc="left")]

    first = "rate that learns, learning rate 0.001"
    assert titles(**{"gtpo-g8": {1: rows}}) == [first]
    both = titles(**{"gtpo-g8": {1: rows, 2: rows}, "gtpo-late-g8": {1: rows}})
    assert both == [first, "high rate, learning rate 0.0028, n = 1"]


def test_color_is_the_method_and_dash_the_condition() -> None:
    """Fig. 3: GTPO, its correction alone, GRPO with three β."""
    rows = {1: [{"step": step, "accuracy": 50.0, "formatting": 90.0} for step in (1, 2)]}
    found = draw(MATRIX, "fig3", "tiny", results_of(dict.fromkeys(runs_of(MATRIX, ["fig3"], "tiny"), rows)))
    assert [(line.get_color(), line.get_linestyle()) for line in found.axes[1].lines] == [
        *(("#0072B2", "-"), ("#D55E00", "-")),
        *(("#777777", "-"), ("#777777", "--"), ("#777777", "-.")),
    ]
    assert {line.get_linewidth() for line in found.axes[1].lines} == {LINE_WIDTH}


def test_entropy_has_ln_2_and_one_seed_no_band() -> None:
    rows = {3407: logged(entropy=[3.0, 1.5], accuracy=[10, 20], formatting=[100, 100])}
    entropy, accuracy, _ = draw(MATRIX, "fig4d", "paper", results_of({"gtpo-llama-gsm8k-h1.05": rows})).axes
    assert lines_of(entropy)["ln 2"][1] == [math.log(2)] * 2
    assert "ln 2" not in lines_of(accuracy) and not accuracy.collections


def test_seeds_of_different_length_are_compared_at_common_steps() -> None:
    runs = {seed: [{"step": step, "kl": 1.0 * seed} for step in range(1, steps)] for seed, steps in ((1, 5), (2, 3))}
    found = results_of({"run": runs})
    assert found.smoothed("run", "kl", 2).to_dict() == {1: {1: 1.0, 2: 1.0}, 2: {1: 2.0, 2: 2.0}}
    runs[1][1]["kl"] = None
    assert results_of({"run": runs}).smoothed("run", "kl", 2)[1].to_list() == [1.0, 1.0]  # the last value in the window
    assert found.smoothed("run", "entropy", 2).empty


def test_figure_is_drawn_without_a_missing_run(tmp_path: Path) -> None:
    rest = [run for run in runs_of(MATRIX, ["fig6"], "tiny") if run != "grpo-g8-beta1e-6"]
    written, messages = draw_all(
        MATRIX, ["fig6"], "tiny", read_results(make_all(tmp_path / "runs", rest, "tiny")), tmp_path
    )
    assert written == [tmp_path / "fig6.png", tmp_path / "fig6.pdf"]
    assert written[0].read_bytes().startswith(b"\x89PNG") and written[1].read_bytes().startswith(b"%PDF")
    assert messages == ["fig6: no run of grpo-g8-beta1e-6: `python reproduce.py fig6 --scale tiny`"]
    text = (tmp_path / "fig6.md").read_text()
    assert messages[0] in text and "| grpo-g8-beta1e-6 | missing |" in text
    written, messages = draw_all(MATRIX, ["fig6"], "tiny", results_of({}), tmp_path / "nothing")
    assert written == [] and len(messages) == 1


# Table 1


def paper_table() -> dict[tuple[str, str, str], list[list[float]]]:
    """(model, dataset, method) -> its numbers by benchmark and score, as printed in the paper."""
    printed = """
    LLaMA GSM8K SFT 0 0 0 13.3 20 | 0 0 0 0 6.7 | 12.5 37.5 42.5 57.5 72.5 | 10 15 15 20 17.5
    LLaMA GSM8K GTPO 0 10 13.3 20 30 | 0 6.7 6.7 6.7 13.3 | 17.5 47.5 55 65 80 | 25 27.5 35 37.5 42.5
    QWEN MATH GRPO 0 3.3 3.3 6.7 16.7 | 0 3.3 10 13.3 16.7 | 30 67.5 70 77.5 87.5 | 27.5 42.5 42.5 45 42.5
    """
    table = {}
    for line in printed.strip().splitlines():
        model, dataset, method, *rest = line.split(maxsplit=3)
        table[model, dataset, method] = [[float(x) for x in part.split()] for part in rest[0].split("|")]
    return table


def test_table_1_shows_the_best_variant_beside_the_paper(tmp_path: Path) -> None:
    results = read_results(make_all(tmp_path, runs_of(MATRIX, ["table1"], "paper"), "paper"))
    table = table1(MATRIX, "paper", results)
    for (model, dataset, method), parts in paper_table().items():
        chosen = (table["group"] == f"{model}, {dataset}") & (table["method"] == method)
        shown = table[chosen].to_dict("records")
        assert [row["paper"] for row in shown] == [number for part in parts for number in part]
        assert [(row["benchmark"], row["score"]) for row in shown[::5]] == [
            ("aime24", "pass"), ("aime25", "pass"), ("amc23", "pass"), ("amc23", "maj")
        ]  # fmt: skip
        prefix = f"{method}-{model}-{dataset}".lower()
        candidates = [run for run in runs_of(MATRIX, ["table1"], "paper") if run.startswith(prefix)]
        best = max(candidates, key=lambda run: value(run, 3407, "pass", 64))
        for row in shown:
            assert row["run"] == scored_name(MATRIX, "paper", best)
            assert row["ours"] == approx(value(best, 3407, row["score"], row["k"]))
    assert len(table) == 12 * 20


def test_table_1_as_markdown_and_csv(tmp_path: Path) -> None:
    names = ["sft-llama-gsm8k", "gtpo-llama-gsm8k-g8"]
    results = read_results(make_all(tmp_path / "runs", names, "paper"))
    written, messages = draw_all(MATRIX, ["table1"], "paper", results, tmp_path)
    assert [path.name for path in written] == ["table1.md", "table1.csv"]
    text = (tmp_path / "table1.md").read_text()
    ours = f"{value('gtpo-llama-gsm8k-g8', 3407, 'pass', 1):.1f}"
    assert re.search(rf"\| LLaMA, GSM8K \| GTPO \(gtpo-llama-gsm8k-g8\) \| {ours} / 0.0 \|", text)
    assert "| LLaMA, GSM8K | GRPO (not run) | - / 0.0 | - / 0.0 |" in text
    with (tmp_path / "table1.csv").open() as file:
        stored = list(csv.DictReader(file))
    assert len(stored) == 240 and {row["paper"] for row in stored if row["method"] == "SFT"} >= {"13.3", "72.5"}
    assert any("no evaluation on aime24 of " in text and "gtpo-llama-gsm8k-g12" in text for text in messages)


# figures.py


@mark.slow
def test_command_draws_what_the_runs_allow(
    here: Path,
    run_figures: Command,
    capsys: CaptureFixture[str],
) -> None:
    make_run(here / "outputs", "gtpo-g8", 1)
    run_figures()
    printed = capsys.readouterr().out
    assert {path.name for path in (here / "figures" / "tiny").glob("*.png")} == {
        f"{name}.png" for name in MATRIX["figures"] if "gtpo-g8" in runs_of(MATRIX, [name], "tiny")
    }
    assert "figures/tiny/fig5b.png" in printed
    assert "fig5a: no run of grpo-g8-beta0.04, grpo-g8-beta0, grpo-g8-beta1e-6: `python reproduce.py fig5a" in printed
    assert "No runs at paper scale" in printed and "train_grpo.py --config configs/paper" not in printed
    run_figures("fig2", "fig5b")
    printed = capsys.readouterr().out
    assert "No runs at paper scale" in printed and "no run of grpo-llama" not in printed
    run_figures("fig5b", "--search", "outputs", "--output", "other", "--scale", "tiny")
    assert {path.name for path in (here / "other" / "tiny").iterdir()} == {"fig5b.png", "fig5b.pdf", "fig5b.md"}
