"""Runs and evaluations on disk, as the scripts leave them, with values that are known by formula."""

from pathlib import Path
from typing import Any

from helpers.runs import fake_run, write_results

from gtpo.runs.directory import RunDirectory
from paper.figures import LABELS
from paper.matrix import figure_names, load_matrix, runs_of, scored_name

MATRIX = load_matrix()
SEEDS = {"tiny": (1, 2, 3), "paper": (3407,)}
STEPS = 6
LENIENT = ("pass_lenient", "maj_lenient")
KS = (1, 2, 4, 8, 16, 32, 64)
FACTORS = {"accuracy": 2.0, "formatting": 3.0, "entropy": 0.01, "conflict_tokens": 5.0}


def rows(steps: int, offset: float = 0.0) -> list[dict[str, Any]]:
    return [
        {"step": step} | {name: factor * step + offset for name, factor in FACTORS.items()}
        for step in range(1, steps + 1)
    ]


def value(run: str, seed: int, metric: str, x: int) -> float:
    """A number that no other run, seed, metric or position has; at 8 the order of the runs is reversed."""
    names = sorted({name for scale in SEEDS for name in runs_of(MATRIX, figure_names(MATRIX), scale)})
    place = len(names) - names.index(run) if x == 8 else names.index(run)
    return 1 + place + 0.1 * sorted([*LABELS, *LENIENT]).index(metric) + 0.01 * (seed % 7) + 0.3 * x * x


def make_run(directory: Path, name: str, seed: int) -> None:
    logged = [metric for metric in LABELS if metric not in ("pass", "maj")]
    rows = [{"step": step} | {metric: value(name, seed, metric, step) for metric in logged} for step in range(1, STEPS)]
    fake_run(directory / f"{name}-s{seed}", rows=rows)


def entry(directory: Path, name: str, seed: int, benchmark: str) -> dict[str, Any]:
    scores = {score: {str(k): value(name, seed, score, k) for k in KS} for score in ("pass", "maj", *LENIENT)}
    run = RunDirectory(directory / f"{name}-s{seed}")
    at_best = any(scored_name(MATRIX, scale, name) != name for scale in SEEDS)
    adapter = run.best if at_best else run.adapter
    return {"adapter": str(adapter), "benchmark": benchmark, "label": run.path.name, "scores": scores}


def make_all(directory: Path, names: list[str], scale: str) -> list[Path]:
    """Runs and evaluations of a scale; the places to read them from."""
    for name in names:
        for seed in SEEDS[scale]:
            make_run(directory, name, seed)
    benchmarks = MATRIX[scale]["evaluation"]
    entries = [entry(directory, name, seed, b) for name in names for seed in SEEDS[scale] for b in benchmarks]
    write_results(directory / "evaluation", *entries)
    return [directory]
