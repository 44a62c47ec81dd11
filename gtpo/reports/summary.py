"""What a run prints: its settings at the start, problems while they happen, its scores at the end."""

import json
import logging
import shlex
import textwrap
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean
from typing import Any

from transformers import TrainerCallback

from gtpo.arguments import BENCHMARK_TITLES, Settings
from gtpo.errors import counted
from gtpo.reports.metrics import Rows, finite_values, is_held_out, of_training, reward_names
from gtpo.runs.directory import RunDirectory
from gtpo.runs.script import training_begins

logger = logging.getLogger(__name__)

WINDOW = 10  # logged steps of the first and the last mean
PROBLEM_STEPS = 5  # logged steps in a row that make a problem
CUT_OFF = 0.95  # share of completions cut off at the length limit that makes a problem
_PERCENT = {  # metric -> label and the factor that makes it percent
    "accuracy": ("accuracy", 1),
    "accuracy_lenient": ("accuracy in any format", 1),
    "formatting": ("formatting", 1),
    "mean_token_accuracy": ("token accuracy", 100),
    "completions/clipped_ratio": ("cut off", 100),
}
_OURS = ("accuracy_reward", "format_reward")  # logged as accuracy and formatting too


@dataclass(frozen=True)
class Score:
    """A metric at the start and at the end of a run, each a mean over some logged steps; ``unit`` is "%" or empty."""

    name: str
    first: float
    last: float
    unit: str = ""

    def __str__(self) -> str:
        form = "{:.1f} -> {:.1f} %" if self.unit else "{:.3g} -> {:.3g}"
        return f"{self.name} {form.format(self.first, self.last)}"


def _window_of(rows: Rows) -> int:
    """Logged steps of a mean: ``WINDOW``, or half of a short run."""
    return min(WINDOW, max(1, len(of_training(rows)) // 2))


def window_text(rows: Rows) -> str:
    """The steps of :func:`scores` in words."""
    window = _window_of(rows)
    return f"Means of the first and last {window} logged steps" if window > 1 else "First and last logged step"


def scores(rows: Rows) -> list[Score]:
    """What a run learned: accuracy, formatting, other rewards, the share cut off; SFT: token accuracy and loss.

    Values that are missing or not finite do not count, nor do held-out rows.
    """
    return _compared(of_training(rows), _window_of(rows))


def score_lines(run: RunDirectory, rows: Rows) -> list[str]:
    """The scores of a run on its training prompts and on held-out rows, a line each, if it has them."""
    found = scores(rows)
    training = f"{window_text(rows)}: {', '.join(map(str, found))}" if found else None
    return [line for line in (training, held_out_text(rows, run.read_best())) if line]


def held_out_text(rows: Rows, best: Mapping[str, float] | None = None) -> str | None:
    """The scores of the first and last evaluation on held-out rows, and that of best/; None where there is none."""
    evaluations = [row for row in rows if is_held_out(row)]
    found = _compared([{name.removeprefix("eval_"): v for name, v in row.items()} for row in evaluations], 1)
    if not found:
        return None
    text = f"Held-out rows, steps {evaluations[0].get('step')} to {evaluations[-1].get('step')}: "
    selected = [name for name in best or () if name.startswith("eval_")]
    in_best = f"; best/ has {selected[0]} {best[selected[0]]:.4g} of step {best['step']}" if best and selected else ""
    return text + ", ".join(map(str, found)) + in_best


def _compared(rows: Rows, window: int) -> list[Score]:
    names = list(dict.fromkeys(key for row in rows for key in row))
    shown = {metric: (label, factor, "%") for metric, (label, factor) in _PERCENT.items() if metric in names}
    rewards = reward_names(rows)
    shown |= {f"rewards/{name}/mean": (name, 1, "") for name in rewards if name not in _OURS}
    if not rewards:
        shown["loss"] = ("loss", 1, "")
    found = []
    for metric, (label, factor, unit) in shown.items():
        if values := finite_values(rows, metric):
            first, last = fmean(values[:window]), fmean(values[-window:])
            found.append(Score(label, factor * first, factor * last, unit))
    return found


def initial_entropy_text(run: RunDirectory) -> str | None:
    """<H>_ini and the state of the entropy filter in words; None where the run does not store both."""
    try:
        record = json.loads(run.initial_entropy.read_text())
        state = "on" if record["filter_on"] else "off"
        return f"{record['initial_entropy']:.3f} nats before training, entropy filter {state}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_problems(rows: Rows, max_completion_length: int | None) -> dict[str, str]:
    """What makes the last ``PROBLEM_STEPS`` logged steps useless: a short name -> a sentence that says what to do."""
    rows = of_training(rows)[-PROBLEM_STEPS:]
    if not rows:
        return {}
    steps, problems = f"steps {rows[0].get('step')} to {rows[-1].get('step')}", {}
    cut = finite_values(rows, "completions/clipped_ratio")
    if cut and fmean(cut) >= CUT_OFF:
        problems["cut off"] = (
            f"{100 * fmean(cut):.0f} % of the completions of {steps} were cut off at {max_completion_length} tokens: "
            "raise --max_completion_length"
        )
    logged = [name for name in reward_names(rows) if finite_values(rows, f"rewards/{name}/mean")]
    if logged and not any(
        any(finite_values(rows, f"rewards/{name}/{what}")) for name in logged for what in ("mean", "std")
    ):
        problems["zero"] = (
            f"every reward ({', '.join(logged)}) of {steps} was 0, so all "
            "advantages are 0: read the completions in report.html (`python -m gtpo.reports.html RUN` writes it)"
        )
    return problems


class RunMessages(TrainerCallback):
    """Log what a run trains when it starts, and each problem once while it happens."""

    def __init__(self, settings: Settings, prompts: int) -> None:
        self.settings, self.prompts = settings, prompts
        self.recent: deque[dict[str, Any]] = deque(maxlen=PROBLEM_STEPS)
        self.told: set[str] = set()

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        training_begins()  # what optimizer and schedule refuse comes before
        if state.is_world_process_zero:
            for line in start_lines(self.settings, self.prompts, state.max_steps, state.global_step, args.world_size):
                logger.warning(line)

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if not state.is_world_process_zero or not logs or "train_loss" in logs or is_held_out(logs):
            return
        self.recent.append({"step": state.global_step} | logs)
        if len(self.recent) < PROBLEM_STEPS:
            return
        for name, problem in find_problems(list(self.recent), _length_limit(self.settings)).items():
            if name not in self.told:
                logger.warning("Warning: %s.", problem)
                self.told.add(name)


def start_lines(settings: Settings, prompts: int, steps: int, done: int = 0, processes: int = 1) -> list[str]:
    """Model, data, directory and steps of a run, and the steps it had done before it was resumed."""
    count = settings.completions_per_step * processes
    each = f"{count:,} rows"
    if settings.method != "sft":
        each = f"{counted(count // settings.group_size, 'prompt')} x {settings.group_size} completions of at most "
        each += f"{_length_limit(settings):,} tokens"
    return [
        f"{settings.method.upper()} of {settings.model.model} on {settings.data.dataset}: {settings.output_dir}",
        f"{counted(steps, 'step')} of {each}; {counted(prompts, 'prompt')}"
        + (f"; continues after step {done:,}" if done else ""),
    ]


def log_summary(trainer: Any, settings: Settings) -> None:
    """Log how the run ended."""
    seconds = [row["train_runtime"] for row in trainer.state.log_history if "train_loss" in row]
    for line in end_lines(settings, RunDirectory(settings.output_dir).read_metrics(), seconds[-1] if seconds else None):
        logger.warning(line)


def end_lines(settings: Settings, rows: Rows, seconds: float | None) -> list[str]:
    """How a run ended: problems first, then the scores, where its files are, and the next command.

    ``seconds``: time of the training loop in this process; None if nothing was left to train.
    """
    run = RunDirectory(settings.output_dir)
    problems = find_problems(rows, _length_limit(settings))
    lines = [f"Run finished, but {'; '.join(problems.values())}."] if problems else []
    trained = run.adapter if settings.model.lora_rank else run.model
    files = {
        "Adapter" if trained == run.adapter else "Model": trained,
        "Merged model": run.merged,
        "Report": run.report,
    }
    since = " since --resume" if settings.run.resume else ""
    time = f" ({timedelta(seconds=round(seconds))}{since})" if seconds is not None else ""
    if not problems:
        lines.append(f"Run finished{time}: {run.path}")
    lines += [textwrap.fill(line, 100, subsequent_indent="  ") for line in score_lines(run, rows)]
    lines += [f"{what}: {path}" for what, path in files.items() if path.exists()]
    if settings.data.dataset in BENCHMARK_TITLES:
        what = ["--runs", str(run.path)] if settings.model.lora_rank else ["--model", str(run.model)]
        lines.append(f"Evaluate: python evaluate.py --benchmarks {settings.data.dataset} {shlex.join(what)}")
    else:
        lines.append(f"Use it: {trained / 'README.md'} has a quick start")
    return lines


def _length_limit(settings: Settings) -> int | None:
    return getattr(settings.trainer, "max_completion_length", None)
