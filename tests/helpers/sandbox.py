"""reproduce.py and the study in a working directory where small scripts replace training and evaluation."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.files import read_lines
from helpers.scripts import Command

import reproduce
from study import __main__ as study

START = """
import json, os, pathlib, sys, time
start = time.monotonic()
"""
TRAIN = (
    START
    + """
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
run = pathlib.Path(flags["--output_dir"])
with open("calls.jsonl", "a") as file:
    given = sorted(set(flags) & {"--resume", "--overwrite"})
    file.write(json.dumps([pathlib.Path(sys.argv[0]).stem, run.name, given]) + "\\n")
if pathlib.Path("fail").exists() and run.name in pathlib.Path("fail").read_text():
    sys.exit("CUDA error")
with open("started", "a") as file:
    file.write(run.name + "\\n")
if pathlib.Path("wait").exists():  # for so many runs at the same time
    while len(pathlib.Path("started").read_text().split()) < int(pathlib.Path("wait").read_text()):
        if time.monotonic() > start + 20:
            sys.exit("nothing came")
        time.sleep(0.02)
(run / "adapter").mkdir(parents=True, exist_ok=True)
(run / "best").mkdir(exist_ok=True)
(run / "compiled").write_text(os.environ.get("UNSLOTH_COMPILE_LOCATION", ""))
rows = [{"step": s, "accuracy": s + 0.25, "formatting": s, "entropy": 0.1, "step_time": 6.0} for s in (1, 2, 3)]
(run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
for name in ("adapter", "best"):
    (run / name / "adapter_config.json").write_text("{}")
with open("spans.jsonl", "a") as file:
    file.write(json.dumps([run.name, os.environ.get("CUDA_VISIBLE_DEVICES"), start, time.monotonic()]) + "\\n")
"""
)
EVALUATE = (
    START
    + """
import argparse, fcntl
parser = argparse.ArgumentParser()
for name in ("benchmarks", "checkpoint", "k", "limit", "max_new_tokens", "output_dir", "temperature"):
    parser.add_argument("--" + name, default="last" if name == "checkpoint" else None)
parser.add_argument("--runs", nargs="+")
flags = parser.parse_args()
runs = [run for run in flags.runs if run != "base"]
with open("calls.jsonl", "a") as file:
    file.write(json.dumps(["evaluate", flags.benchmarks, flags.checkpoint, len(runs)]) + "\\n")
if pathlib.Path("fail").exists() and "evaluate" in pathlib.Path("fail").read_text():
    sys.exit("CUDA error")
output = pathlib.Path(flags.output_dir)
output.mkdir(parents=True, exist_ok=True)
lock = open(output / "lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
for run in map(pathlib.Path, flags.runs):
    label = ("-".join(run.parts[1:]) or "base-tiny") + ("" if flags.checkpoint == "last" else "@" + flags.checkpoint)
    scores = {score: {str(2**i): 50.0 for i in range(7)} for score in ("pass", "maj")} | {"format": 50.0}
    adapter = None if str(run) == "base" else str(run / ("best" if flags.checkpoint == "best" else "adapter"))
    entry = {"adapter": adapter, "benchmark": flags.benchmarks, "scores": scores, "label": label}
    sampled = {name: int(getattr(flags, name)) for name in ("k", "max_new_tokens") if getattr(flags, name)}
    sampled |= {"temperature": float(flags.temperature or 1)}
    entry |= {"settings": sampled, "k": 64, "problems": 1, "intervals": {}}
    (output / label).mkdir(parents=True, exist_ok=True)
    (output / label / (flags.benchmarks + ".json")).write_text(json.dumps(entry))
stored = [json.loads(path.read_text()) for path in output.glob("*/*.json")]
(output / "results.json").write_text(json.dumps({"results": stored}))
with open("spans.jsonl", "a") as file:
    kind = f"evaluate:{flags.benchmarks}:{flags.checkpoint}"
    label = " ".join([kind, *(pathlib.Path(run).name for run in runs)])
    file.write(json.dumps([label, os.environ.get("CUDA_VISIBLE_DEVICES"), start, time.monotonic()]) + "\\n")
"""
)


class Sandbox:
    """A working directory with replaced scripts.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._monkeypatch = monkeypatch

    def __truediv__(self, name: str | Path) -> Path:
        return self.path / name

    def reproduce(self, *argv: str) -> int:
        """The exit code of reproduce.py."""
        return self._run(reproduce.main, *argv)

    def study(self, *argv: str) -> int:
        """The exit code of ``python -m study``."""
        return self._run(study.main, *argv)

    def _run(self, main: Callable[[], None], *argv: str) -> int:
        self._monkeypatch.setattr(sys, "argv", ["script", *argv])
        try:
            main()
        except SystemExit as exit:
            return int(exit.code or 0)
        return 0

    def calls(self) -> list[Any]:
        """The calls of the replaced scripts since the last call of this method."""
        path = self.path / "calls.jsonl"
        lines = read_lines(path) if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def spans(self) -> list[Any]:
        """Runs and evaluations so far: name (of an evaluation with its runs), CUDA_VISIBLE_DEVICES, start, end."""
        return read_lines(self.path / "spans.jsonl")


@pytest.fixture
def sandbox(here: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """Train scripts and evaluate.py only record their calls, and figures are empty files."""
    for method in ("sft", "grpo", "gtpo"):
        (here / f"train_{method}.py").write_text(TRAIN)
    (here / "evaluate.py").write_text(EVALUATE)
    monkeypatch.setattr("paper.runner.LIBRARIES", [])
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path, **_: Path(path).touch())
    return Sandbox(here, monkeypatch)


@pytest.fixture
def run_figures(monkeypatch: pytest.MonkeyPatch) -> Command:
    """``run_figures(*argv)``: figures.py with a command line."""
    import figures

    def run(*argv: str) -> None:
        monkeypatch.setattr(sys, "argv", ["figures.py", *argv])
        figures.main()

    return run
