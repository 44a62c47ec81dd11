"""Figures: what is drawn is what the runs logged, and what is missing is said."""

import csv
import json
import math
import re
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import figures
from config import UsageError
from experiments import Results, figure_names, groups_of, load_matrix, read_results, runs_of
from figures import (
    LABELS,
    PANELS,
    caption,
    draw,
    draw_all,
    missing,
    panels_of,
    plot_training,
    read_metrics,
    smooth,
    table1,
)

FACTORS = {"accuracy": 2.0, "formatting": 3.0, "entropy": 0.01, "conflict_tokens": 5.0}


def rows(steps: int, offset: float = 0.0) -> list[dict[str, Any]]:
    return [
        {"step": step} | {name: factor * step + offset for name, factor in FACTORS.items()}
        for step in range(1, steps + 1)
    ]


def write_run(folder: Path, steps: int = 3, offset: float = 0.0) -> str:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(steps, offset)))
    return str(folder)


def drawn(figure: Any) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Axis title -> legend name -> (x, y) of the bold lines."""
    return {
        axis.get_title(): {
            str(line.get_label()): ([float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()])
            for line in axis.lines
            if not str(line.get_label()).startswith("_")
        }
        for axis in figure.axes
    }


def test_drawn_values_are_the_logged_ones() -> None:
    runs = {"GTPO": rows(5), "GRPO": rows(4, offset=7.0)}
    figure = plot_training(runs, window=1)
    assert [axis.get_title() for axis in figure.axes] == list(PANELS.values())
    for metric, title in PANELS.items():
        shown = drawn(figure)[title]
        for name, logged in runs.items():
            assert shown[name] == ([row["step"] for row in logged], [row[metric] for row in logged])


def test_raw_values_stand_behind_their_mean() -> None:
    figure = plot_training({"GTPO": rows(6)}, window=3)
    raw, mean = figure.axes[0].lines[:2]
    assert list(raw.get_ydata()) == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert list(mean.get_ydata()) == [2.0, 3.0, 4.0, 6.0, 8.0, 10.0]
    assert raw.get_alpha() < 1 and raw.get_color() == mean.get_color()
    assert "3 steps" in figure.get_suptitle()


def test_smoothing_by_hand() -> None:
    assert smooth([1.0, 2.0, 6.0, 3.0], 2) == [1.0, 1.5, 4.0, 4.5]
    assert smooth([1.0, 2.0, 6.0, 3.0], 3) == [1.0, 1.5, 3.0, pytest.approx(11 / 3)]
    assert smooth([1.0, 2.0], 1) == [1.0, 2.0]
    assert smooth([4.0, 2.0], 100) == [4.0, 3.0]
    assert smooth([], 5) == []


@given(st.lists(st.floats(-1e6, 1e6), max_size=30), st.integers(1, 40))
def test_smoothing_is_the_mean_of_what_came_last(values: list[float], window: int) -> None:
    got = smooth(values, window)
    assert len(got) == len(values)
    for i, mean in enumerate(got):
        past = values[: i + 1][-window:]
        assert mean == pytest.approx(sum(past) / len(past))


def test_ln_2_is_drawn_with_the_entropy_alone() -> None:
    shown = drawn(plot_training({"GTPO": rows(3)}))
    assert shown[PANELS["entropy"]]["ln 2"][1] == [pytest.approx(0.693147, abs=1e-6)] * 2
    assert all("ln 2" not in lines for title, lines in shown.items() if title != PANELS["entropy"])
    assert math.isclose(shown[PANELS["entropy"]]["ln 2"][1][0], math.log(2))


@pytest.mark.parametrize(
    ("row", "panels"),
    [
        ({"accuracy": 1.0, "entropy": 0.1, "rewards/accuracy_reward/mean": 1.0}, ["accuracy", "entropy"]),
        ({"entropy": 0.1, "accuracy": None, "rewards/concise/mean": 2.0}, ["rewards/concise/mean", "entropy"]),
        ({"entropy": 0.1, "loss": 2.0}, ["loss", "entropy"]),
    ],
    ids=["paper's rewards", "own reward", "sft"],
)
def test_panels_are_those_that_a_run_logged(row: dict[str, Any], panels: list[str]) -> None:
    assert list(panels_of([[row | {"step": 1}]])) == panels


def test_step_without_a_metric_is_left_out() -> None:
    logged = rows(4)
    del logged[1]["accuracy"]
    logged[2]["accuracy"] = None
    shown = drawn(plot_training({"GTPO": logged}, window=1))
    assert shown[PANELS["accuracy"]]["GTPO"] == ([1.0, 4.0], [2.0, 8.0])
    assert len(shown[PANELS["entropy"]]["GTPO"][0]) == 4


def test_all_runs_are_drawn_and_told_apart() -> None:
    """An ablation has more runs than a palette has colours: none may be missing in silence."""
    runs = {f"run {i}": rows(2, offset=i) for i in range(9)}
    figure = plot_training(runs)
    for title, shown in drawn(figure).items():
        assert shown.keys() - {"ln 2"} == runs.keys(), title
    styles = [
        (line.get_color(), line.get_linestyle())
        for line in figure.axes[0].lines
        if not str(line.get_label()).startswith("_")
    ]
    assert len(set(styles)) == len(runs)


# ---- reading ----


def test_metrics_are_read_in_order_without_half_a_line(tmp_path: Path) -> None:
    run = Path(write_run(tmp_path / "run"))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "accur')
    assert read_metrics(run) == rows(3)


@pytest.mark.parametrize(
    ("content", "message"), [(None, r"holds no metrics\.jsonl"), ("", "is empty"), ('{"step": 1, "lo', "is empty")]
)
def test_missing_metrics_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_metrics(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


# ---- the command ----


def command(monkeypatch: pytest.MonkeyPatch, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["figures.py", *argv])
    figures.main()


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_command_writes_the_picture(
    suffix: str, magic: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / f"curves.{suffix}"
    command(monkeypatch, "--runs", write_run(tmp_path / "a"), write_run(tmp_path / "b"), "--output", str(output))
    assert output.read_bytes().startswith(magic)
    assert capsys.readouterr().out.strip() == str(output)


def test_runs_of_the_same_name_are_both_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """outputs/a/gtpo and outputs/b/gtpo: two curves, or a sentence that asks for labels, never one of the two."""
    seen = []
    monkeypatch.setattr(figures, "plot_training", lambda runs, window: seen.append(runs) or plot_training(runs, window))
    try:
        runs = (write_run(tmp_path / "a" / "gtpo"), write_run(tmp_path / "b" / "gtpo", offset=9.0))
        command(monkeypatch, "--runs", *runs, "--output", str(tmp_path / "curves.png"))
    except UsageError as error:
        assert "label" in str(error)
    else:
        assert len(seen[0]) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--labels", "A", "B"], "2 labels for 1 runs"), (["--window", "0"], "--window is 0: expected at least 1")],
)
def test_bad_usage_is_refused(argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run")
    with pytest.raises(UsageError, match=message):
        command(monkeypatch, "--runs", run, *argv, "--output", str(tmp_path / "curves.png"))
    assert not (tmp_path / "curves.png").exists()


# ---- the paper's figures, from small runs on disk ----

MATRIX = load_matrix()
SEEDS = {"tiny": (1, 2), "paper": (3407,)}
STEPS = 6
KS = (1, 2, 4, 8, 16, 32, 64)
DRAWN = [(name, scale) for scale in ("tiny", "paper") for name in MATRIX["figures"] if groups_of(MATRIX, name, scale)]
each_figure = pytest.mark.parametrize(("name", "scale"), DRAWN, ids=lambda value: value)


def value(run: str, seed: int, metric: str, x: int) -> float:
    """A number that no other run, seed, metric or place has."""
    names = sorted({name for scale in SEEDS for name in runs_of(MATRIX, figure_names(MATRIX), scale)})
    return 1 + names.index(run) + 0.1 * sorted(LABELS).index(metric) + 0.01 * (seed % 7) + 0.3 * x * x


def make_run(folder: Path, name: str, seed: int) -> None:
    run = folder / f"{name}-s{seed}"
    run.mkdir(parents=True)
    logged = [metric for metric in LABELS if metric not in ("pass", "maj")]
    lines = [
        {"step": step} | {metric: value(name, seed, metric, step) for metric in logged} for step in range(1, STEPS)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def entry(folder: Path, name: str, seed: int, benchmark: str) -> dict[str, Any]:
    scores = {score: {str(k): value(name, seed, score, k) for k in KS} for score in ("pass", "maj")}
    adapter = folder / f"{name}-s{seed}" / ("best" if name.startswith("grpo") else "adapter")
    return {"adapter": str(adapter), "benchmark": benchmark, "label": f"{name}-s{seed}", "scores": scores}


def make_all(folder: Path, names: list[str], scale: str) -> list[Path]:
    """Runs and evaluations of a scale on disk, as the scripts leave them."""
    for name in names:
        for seed in SEEDS[scale]:
            make_run(folder, name, seed)
    benchmarks = MATRIX[scale]["evaluation"]
    entries = [entry(folder, name, seed, b) for name in names for seed in SEEDS[scale] for b in benchmarks]
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "results.json").write_text(json.dumps({"results": entries}))
    return [folder]


def expected_curve(run: str, scale: str, metric: str, window: int) -> tuple[list[float], list[float]]:
    """By the definition: the trailing mean of each seed, then the mean over seeds."""
    if metric in ("pass", "maj"):
        return list(KS), [statistics.mean(value(run, seed, metric, k) for seed in SEEDS[scale]) for k in KS]
    means = []
    for step in range(1, STEPS):
        recent = range(max(1, step - window + 1), step + 1)
        means.append(statistics.mean(value(run, seed, metric, s) for seed in SEEDS[scale] for s in recent))
    return list(range(1, STEPS)), means


@each_figure
def test_figure_shows_its_runs(name: str, scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MATRIX[scale], "window", 3)
    spec, groups = MATRIX["figures"][name], groups_of(MATRIX, name, scale)
    figure = draw(MATRIX, name, scale, read_results(make_all(tmp_path, runs_of(MATRIX, [name], scale), scale)))
    panels = spec["panels"]
    assert len(figure.axes) == len(panels) * len(groups)
    for i, (title, curves) in enumerate(groups.items()):
        axes = (
            figure.axes[i :: len(groups)]
            if spec.get("groups") == "columns"
            else figure.axes[i * len(panels) :][: len(panels)]
        )
        assert axes[0].get_title(loc="left") == title
        for axis, metric in zip(axes, panels, strict=True):
            assert axis.get_ylabel() == LABELS[metric]
            assert axis.get_xlabel() == ("k" if metric in ("pass", "maj") else "training step")
            lines = {line.get_label(): line for line in axis.lines if not str(line.get_label()).startswith("_")}
            assert (lines.pop("ln 2").get_ydata()[0] == math.log(2)) if metric == "entropy" else "ln 2" not in lines
            assert list(lines) == list(curves)
            for legend, run in curves.items():
                x, y = expected_curve(run, scale, metric, window=3)
                assert list(lines[legend].get_xdata()) == x
                assert list(lines[legend].get_ydata()) == pytest.approx(y)
            bands = [collection.get_datalim(axis.transData) for collection in axis.collections]
            assert len(bands) == (len(curves) if len(SEEDS[scale]) > 1 else 0)


def test_band_reaches_from_the_lowest_seed_to_the_highest() -> None:
    runs = {1: [{"step": 1, "kl": 1.0}, {"step": 2, "kl": 5.0}], 2: [{"step": 1, "kl": 3.0}, {"step": 2, "kl": 1.0}]}
    matrix = {
        "tiny": {"window": 1},
        "figures": {"f": {"panels": ["kl"], "tiny": {"group": {"curve": "run"}}}},
        "table1": {},
    }
    [axis] = draw(matrix, "f", "tiny", Results({"run": runs}, {})).axes
    corners = {tuple(point) for path in axis.collections[0].get_paths() for point in path.vertices}
    assert {(1.0, 1.0), (1.0, 3.0), (2.0, 1.0), (2.0, 5.0)} == corners
    assert list(axis.lines[0].get_ydata()) == [2.0, 3.0]


def test_seeds_of_different_length_are_compared_where_all_are() -> None:
    runs = {seed: [{"step": step, "kl": 1.0 * seed} for step in range(1, steps)] for seed, steps in ((1, 5), (2, 3))}
    assert figures.seed_curves(runs, "kl", 2) == ([1, 2], [[1.0, 1.0], [2.0, 2.0]])
    assert figures.seed_curves(runs, "entropy", 2) == ([], [])


@each_figure
def test_figure_with_one_run_missing_says_so(name: str, scale: str, tmp_path: Path) -> None:
    lost, *rest = runs_of(MATRIX, [name], scale)
    results = read_results(make_all(tmp_path, rest, scale))
    lacking = missing(MATRIX, name, scale, results)
    sentence = next(sentence for sentence in lacking if f"no run {lost}:" in sentence)
    assert f"python reproduce.py {name} --scale {scale}" in sentence
    assert f"python train_{lost.partition('-')[0]}.py --" in sentence and f"{lost}-s" in sentence
    assert all(lost in sentence for sentence in lacking)
    text = caption(MATRIX, name, scale, results)
    assert re.search(rf"\| {re.escape(lost)} \| missing \|", text) and f"Missing: {sentence}" in text


def test_figure_with_one_run_missing_is_drawn_without_it(tmp_path: Path) -> None:
    rest = [run for run in runs_of(MATRIX, ["fig6"], "tiny") if run != "grpo-g8-beta1e-6"]
    made, lacking = draw_all(
        MATRIX, ["fig6"], "tiny", read_results(make_all(tmp_path / "runs", rest, "tiny")), tmp_path
    )
    assert made == [tmp_path / "fig6.png", tmp_path / "fig6.pdf"]
    assert made[0].read_bytes().startswith(b"\x89PNG") and made[1].read_bytes().startswith(b"%PDF")
    assert lacking[0] in (tmp_path / "fig6.md").read_text() and len(lacking) == 1
    made, lacking = draw_all(MATRIX, ["fig6"], "tiny", Results({}, {}), tmp_path / "nothing")
    assert made == [] and len(lacking) == 2


def test_caption_names_smoothing_runs_seeds_and_command(tmp_path: Path) -> None:
    text = caption(MATRIX, "fig3", "tiny", read_results(make_all(tmp_path, runs_of(MATRIX, ["fig3"], "tiny"), "tiny")))
    assert f"trailing mean over {MATRIX['tiny']['window']} steps" in text
    assert "| tiny, arithmetic | GTPO | gtpo-g8 | 1, 2 |" in text
    assert "`python reproduce.py fig3 --scale tiny`" in text
    assert "issing" not in text


# ---- Table 1 ----


def paper_table() -> dict[tuple[str, str, str], list[list[float]]]:
    """(model, dataset, method) -> its rows of five, as printed in the paper."""
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
    rows = table1(MATRIX, "paper", results)
    for (model, dataset, method), parts in paper_table().items():
        mine = [row for row in rows if row["group"] == f"{model}, {dataset}" and row["method"] == method]
        assert [row["paper"] for row in mine] == [number for part in parts for number in part]
        assert [(row["benchmark"], row["score"]) for row in mine[::5]] == [
            ("aime24", "pass"), ("aime25", "pass"), ("amc23", "pass"), ("amc23", "maj")
        ]  # fmt: skip
        prefix = f"{method}-{model}-{dataset}".lower()
        candidates = [run for run in runs_of(MATRIX, ["table1"], "paper") if run.startswith(prefix)]
        best = max(candidates, key=lambda run: value(run, 3407, "pass", 64))
        for row in mine:
            assert row["run"] == best
            assert row["ours"] == pytest.approx(value(best, 3407, row["score"], row["k"]))
    assert len(rows) == 12 * 20


def test_table_1_on_paper_and_as_numbers(tmp_path: Path) -> None:
    names = ["sft-llama-gsm8k", "gtpo-llama-gsm8k-g8"]
    results = read_results(make_all(tmp_path / "runs", names, "paper"))
    made, lacking = draw_all(MATRIX, ["table1"], "paper", results, tmp_path)
    assert [path.name for path in made] == ["table1.md", "table1.csv"]
    text = (tmp_path / "table1.md").read_text()
    ours = f"{value('gtpo-llama-gsm8k-g8', 3407, 'pass', 1):.1f}"
    assert re.search(rf"\| LLaMA, GSM8K \| GTPO \(gtpo-llama-gsm8k-g8\) \| {ours} / 0.0 \|", text)
    assert "| LLaMA, GSM8K | GRPO (not run) | - / 0.0 | - / 0.0 |" in text
    with (tmp_path / "table1.csv").open() as file:
        stored = list(csv.DictReader(file))
    assert len(stored) == 240 and {row["paper"] for row in stored if row["method"] == "SFT"} >= {"13.3", "72.5"}
    assert any("gtpo-llama-gsm8k-g12 is not evaluated on aime24" in sentence for sentence in lacking)


def test_tiny_table_has_the_stand_in_alone(tmp_path: Path) -> None:
    rows = table1(MATRIX, "tiny", read_results(make_all(tmp_path, runs_of(MATRIX, ["table1"], "tiny"), "tiny")))
    assert {row["benchmark"] for row in rows} == {"arithmetic_hard"} and len(rows) == 3 * 10
    assert {row["paper"] for row in rows} == {None} and {row["seeds"] for row in rows} == {2}
    first = rows[0]
    assert first["ours"] == pytest.approx((first["low"] + first["high"]) / 2)
    assert (first["low"], first["high"]) == pytest.approx([value("sft", seed, "pass", 1) for seed in (1, 2)])


# ---- where results are read from ----


def test_newer_of_two_runs_of_one_name_is_read(tmp_path: Path) -> None:
    import os

    for age, folder in ((100, "old"), (50, "new")):
        path = Path(write_run(tmp_path / folder / "gtpo-g8-s1", steps=2, offset=float(age))) / "metrics.jsonl"
        os.utime(path, (1e9 - age, 1e9 - age))
    assert read_results([tmp_path]).metrics["gtpo-g8"] == {1: rows(2, 50.0)}


def test_run_without_a_seed_in_its_name_takes_its_settings(tmp_path: Path) -> None:
    run = Path(write_run(tmp_path / "sft-llama-gsm8k-paper"))
    (run / "config.yaml").write_text("seed: 3407\n")
    assert list(read_results([tmp_path]).metrics["sft-llama-gsm8k"]) == [3407]


def test_offline_wandb_run_is_read_beside_it(tmp_path: Path) -> None:
    run = Path(write_run(tmp_path / "gtpo-g8-s2"))
    offline = run / "wandb" / "offline-run-20260101_000000-abc"
    offline.mkdir(parents=True)
    assert read_metrics(offline) == rows(3)
    assert read_results([offline]).metrics == {"gtpo-g8": {2: rows(3)}}


def test_wandb_project_is_read_by_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Api:
        def runs(self, project: str) -> list[Any]:
            asked.append(project)
            history = [{"_step": 0, "step": None}, *rows(3)]
            run = SimpleNamespace(scan_history=lambda: history, config={"seed": 7})
            return [SimpleNamespace(name=name, **vars(run)) for name in ("gtpo-g8-s2", "sft")]

    monkeypatch.setattr("wandb.Api", Api)
    assert figures.read_wandb("me/gtpo").metrics == {"gtpo-g8": {2: rows(3)}, "sft": {7: rows(3)}}
    assert asked == ["me/gtpo"]


def test_wandb_project_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, project: str) -> None:
        raise ValueError("Could not find project <Project me/nothing>")

    monkeypatch.setattr("wandb.Api", type("Api", (), {"runs": refuse}))
    with pytest.raises(UsageError, match="cannot read 'me/nothing' from wandb: Could not find project"):
        figures.read_wandb("me/nothing")


def test_command_draws_what_the_runs_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "outputs", "gtpo-g8", 1)
    command(monkeypatch)
    said = capsys.readouterr().out
    assert {path.name for path in (tmp_path / "figures" / "tiny").glob("*.png")} == {
        f"{name}.png" for name in MATRIX["figures"] if "gtpo-g8" in runs_of(MATRIX, [name], "tiny")
    }
    assert "figures/tiny/fig3.png" in said and "fig3: no run grpo-g8-beta0: python reproduce.py fig3" in said
    assert "No runs of the paper scale here" in said and "train_grpo.py --config configs/paper" not in said
    command(monkeypatch, "fig5b", "--search", "outputs", "--output", "other", "--scale", "tiny")
    assert {path.name for path in (tmp_path / "other" / "tiny").iterdir()} == {"fig5b.png", "fig5b.pdf", "fig5b.md"}


def test_command_without_any_run_says_how_to_make_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no run of configs/experiments\.yaml in outputs: `python reproduce.py fig3"):
        command(monkeypatch)
    with pytest.raises(UsageError, match=r"figure 'fg3' is unknown \(did you mean 'fig3'\?\)"):
        command(monkeypatch, "fg3")
