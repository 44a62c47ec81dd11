"""What a run prints: its settings at the start, problems while they happen, its scores at the end."""

import json
import logging
import shlex
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from statistics import fmean
from typing import Any

from transformers import TrainerCallback

from gtpo.arguments import BENCHMARK_TITLES, Settings
from gtpo.errors import counted
from gtpo.files import read_own
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


def _window_of(rows: Rows) -> int:
    """Logged steps of a mean: ``WINDOW``, or half of a short run."""
    return min(WINDOW, max(1, len(of_training(rows)) // 2))


def scores(rows: Rows) -> list[str]:
    """What a run learned: accuracy, formatting, other rewards, the share cut off; SFT: token accuracy and loss."""
    return _compared(of_training(rows), _window_of(rows))


def score_lines(run: RunDirectory, rows: Rows) -> list[str]:
    """A line with the scores on the training prompts, and one with those on the held-out rows, as far as they exist."""
    found = scores(rows)
    window = _window_of(rows)
    steps = f"Means of the first and last {window} logged steps" if window > 1 else "First and last logged step"
    training = f"{steps}: {', '.join(found)}" if found else None
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
    return text + ", ".join(found) + in_best


def _compared(rows: Rows, window: int) -> list[str]:
    """Each metric with its first and last mean over some rows; values that are not finite do not count."""
    rewards = reward_names(rows)
    found = []
    others = {f"rewards/{name}/mean": name for name in rewards if name not in _OURS} if rewards else {"loss": "loss"}
    for metric in [*_PERCENT, *others]:
        if values := finite_values(rows, metric):
            first = fmean(values[:window])
            last = fmean(values[-window:])
            if metric in _PERCENT:
                label, factor = _PERCENT[metric]
                found.append(f"{label} {factor * first:.1f} -> {factor * last:.1f} %")
            else:
                found.append(f"{others[metric]} {first:.3g} -> {last:.3g}")
    return found


def initial_entropy_text(run: RunDirectory) -> str | None:
    """<H>_ini and the state of the entropy filter in words; None where the run does not store both."""
    try:
        record = json.loads(read_own(run.initial_entropy))
        state = "on" if record["filter_on"] else "off"
        return f"{record['initial_entropy']:.3f} nats before training, entropy filter {state}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_problems(rows: Rows, max_completion_length: int | None) -> dict[str, str]:
    """What makes the last ``PROBLEM_STEPS`` logged steps useless: a short name -> a sentence that says what to do."""
    every = of_training(rows)
    rows = every[-PROBLEM_STEPS:]
    if not rows:
        return {}
    steps = f"steps {rows[0].get('step')} to {rows[-1].get('step')}"
    problems = {}
    cut = finite_values(rows, "completions/clipped_ratio")
    if cut and fmean(cut) >= CUT_OFF:
        problems["cut off"] = (
            f"{100 * fmean(cut):.0f} % of the completions of {steps} were cut off at {max_completion_length} tokens: "
            "raise --max_completion_length"
        )
    logged = [name for name in reward_names(rows) if finite_values(rows, f"rewards/{name}/mean")]
    spread = max((value for values in _rewards(every, logged, "std") for value in values), default=0)
    is_same = spread <= 1e-6
    for means in _rewards(every, logged, "mean"):
        is_same &= max(means) - min(means) < 1e-6
    is_zero = not any(map(any, _rewards(rows, logged, "mean") + _rewards(rows, logged, "std")))
    if logged and (is_zero or is_same):
        problems["zero" if is_zero else "constant"] = (
            f"every reward ({', '.join(logged)}) {f'of {steps} was 0' if is_zero else 'was always the same'}, so all "
            "advantages are 0: read the completions in report.html (`python -m gtpo.reports.html RUN` writes it)"
        )
    return problems


def _rewards(rows: Rows, names: Sequence[str], what: str) -> list[list[float]]:
    """The logged means, or standard deviations, of each reward."""
    return [finite_values(rows, f"rewards/{name}/{what}") for name in names]


class RunMessages(TrainerCallback):
    """Log what a run trains when it starts, and each problem once while it happens."""

    def __init__(self, settings: Settings, prompts: int) -> None:
        self.settings = settings
        self.prompts = prompts
        self.recent: deque[dict[str, Any]] = deque(maxlen=PROBLEM_STEPS)
        self.told = {"constant"}  # said at the end: of a few steps it also means that the task is learned

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
    trained = run.adapter if settings.model.lora_rank else run.model
    files = {"Adapter": run.adapter, "Model": run.model, "Merged model": run.merged, "Report": run.report}
    since = " since --resume" if settings.run.resume else ""
    time = f" ({timedelta(seconds=round(seconds))}{since})" if seconds is not None else ""
    lines = [f"Run finished, but {'; '.join(problems.values())}." if problems else f"Run finished{time}: {run.path}"]
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
