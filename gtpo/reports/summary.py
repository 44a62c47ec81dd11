"""What a run prints: its settings at the start, problems while they happen, its scores at the end."""

import json
import logging
import math
import shlex
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from transformers import TrainerCallback

from gtpo.arguments import BENCHMARK_TITLES, Settings, Values
from gtpo.errors import counted
from gtpo.files import read_regular
from gtpo.processes import is_main_process
from gtpo.reports.metrics import Numbers, Rows, finite_values, of_training, reward_names
from gtpo.runs.directory import RunDirectory, is_held_out
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
_NO_ADVANTAGE = (
    "every reward ({}) {}, so all advantages are 0: read the completions in report.html (`python -m gtpo.reports.html "
    "RUN` writes it)"
)
_OURS = ("accuracy_reward", "format_reward")  # logged as accuracy and formatting too


def _window_of(rows: Rows) -> int:
    """Logged steps of a mean: ``WINDOW``, or half of a short run."""
    return min(WINDOW, max(1, len(of_training(rows)) // 2))


def scores(rows: Rows) -> list[str]:
    """What a run learned: accuracy, formatting, other rewards, the share cut off; SFT: token accuracy and loss."""
    return _compared(of_training(rows), _window_of(rows))


def score_lines(run: RunDirectory, rows: Rows) -> list[str]:
    """A line with the scores on the training prompts, and one with those on the held-out rows, as far as they exist."""
    lines = []
    if found := scores(rows):
        window = _window_of(rows)
        steps = f"Means of the first and last {window} logged steps" if window > 1 else "First and last logged step"
        lines.append(f"{steps}: {', '.join(found)}")
    if held_out := held_out_text(rows, run.read_best()):
        lines.append(held_out)
    return lines


def held_out_text(rows: Rows, best: Mapping[str, float]) -> str | None:
    """The scores of the first and last evaluation on held-out rows, and that of best/; None where there is none."""
    evaluations = [row for row in rows if is_held_out(row)]
    unprefixed = [{name.removeprefix("eval_"): value for name, value in row.items()} for row in evaluations]
    found = _compared(unprefixed, 1)
    if not found:
        return None
    first = evaluations[0]["step"]
    last = evaluations[-1]["step"]
    text = f"Held-out rows, steps {first} to {last}: {', '.join(found)}"
    for name, value in best.items():
        if name.startswith("eval_"):
            text += f"; best/ has {name} {value:.4g} of step {best['step']}"
    return text


def _compared(rows: Rows, window: int) -> list[str]:
    """Each metric with its first and last mean over some rows; values that are not finite do not count."""
    rewards = reward_names(rows)
    others = {f"rewards/{name}/mean": name for name in rewards if name not in _OURS}
    if not rewards:
        others["loss"] = "loss"
    found = []
    for metric in [*_PERCENT, *others]:
        values = finite_values(rows, metric)
        if not values:
            continue
        first = fmean(values[:window])
        last = fmean(values[-window:])
        if metric in others:
            found.append(f"{others[metric]} {first:.3g} -> {last:.3g}")
        else:
            label, factor = _PERCENT[metric]
            found.append(f"{label} {factor * first:.1f} -> {factor * last:.1f} %")
    return found


def initial_entropy_text(run: RunDirectory) -> str | None:
    """<H>_ini and the state of the entropy filter in words; None where the run does not store both."""
    try:
        record = json.loads(read_regular(run.initial_entropy))
        state = "on" if record["filter_on"] else "off"
        return f"{record['initial_entropy']:.3f} nats before training, entropy filter {state}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_problems(rows: Rows, max_completion_length: int | None) -> dict[str, str]:
    """What makes the last ``PROBLEM_STEPS`` logged steps useless: a short name -> a sentence that says what to do."""
    every = of_training(rows)
    last = every[-PROBLEM_STEPS:]
    if not last:
        return {}
    steps = f"steps {last[0]['step']} to {last[-1]['step']}"
    problems = {}
    cut = finite_values(last, "completions/clipped_ratio")
    if cut and fmean(cut) >= CUT_OFF:
        share = f"{100 * fmean(cut):.0f} % of the completions of {steps}"
        problems["cut off"] = f"{share} were cut off at {max_completion_length} tokens: raise --max_completion_length"
    logged = [name for name in reward_names(last) if finite_values(last, f"rewards/{name}/mean")]
    recent = chain.from_iterable(chain(*_means_and_stds(last, name)) for name in logged)
    if logged and not any(recent):
        problems["zero"] = _NO_ADVANTAGE.format(", ".join(logged), f"of {steps} was 0")
    elif logged and all(_is_constant(every, name) for name in logged):
        problems["constant"] = _NO_ADVANTAGE.format(", ".join(logged), "was always the same")
    return problems


def _means_and_stds(rows: Rows, reward: str) -> tuple[Numbers, Numbers]:
    return finite_values(rows, f"rewards/{reward}/mean"), finite_values(rows, f"rewards/{reward}/std")


def _is_constant(rows: Rows, reward: str) -> bool:
    means, stds = _means_and_stds(rows, reward)
    return max(means) - min(means) < 1e-6 and max(stds, default=0) <= 1e-6


def _reward(value: float | None) -> str:
    """A reward as text; "-" where the function gave none, which TRL stores as NaN."""
    return "-" if value is None or math.isnan(value) else f"{value:g}"


def _duration(seconds: float) -> str:
    """``0:01:20``."""
    return str(timedelta(seconds=round(seconds)))


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=jinja2.select_autoescape(["html.jinja"]),
    undefined=jinja2.StrictUndefined,
)
TEMPLATES.filters |= {"reward": _reward, "duration": _duration, "quoted": shlex.quote}


class RunMessages(TrainerCallback):
    """Log what a run trains when it starts, and each problem once while it happens."""

    def __init__(self, settings: Settings, prompts: int) -> None:
        self.settings = settings
        self.prompts = prompts
        self.recent: deque[Values] = deque(maxlen=PROBLEM_STEPS)
        self.told = {"constant"}  # said at the end: of a few steps it also means that the task is learned

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        training_begins()  # what optimizer and schedule refuse comes before
        if is_main_process():
            for line in start_lines(self.settings, self.prompts, state.max_steps, state.global_step, args.world_size):
                logger.warning(line)

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if not is_main_process() or not logs or "train_loss" in logs or is_held_out(logs):
            return
        self.recent.append({"step": state.global_step} | logs)
        if len(self.recent) < PROBLEM_STEPS:
            return
        for name, problem in find_problems(list(self.recent), _length_limit(self.settings)).items():
            if name not in self.told:
                logger.warning("Warning: %s.", problem)
                self.told.add(name)


def start_lines(settings: Settings, prompts: int, steps: int, done: int = 0, processes: int = 1) -> list[str]:
    """Model, data, directory, steps and optimizer of a run, and the steps it had done before it was resumed."""
    count = settings.completions_per_step * processes
    each = f"{count:,} rows"
    if settings.method != "sft":
        size = settings.group_size
        groups = counted(count // size, "prompt")
        each = f"{groups} x {size} completions of at most {_length_limit(settings):,} tokens"
    what = f"{settings.method.upper()} of {settings.model.model} on {settings.data.dataset}"
    how = f"{counted(steps, 'step')} of {each}; {counted(prompts, 'prompt')}"
    if done:
        how += f"; continues after step {done:,}"
    return [f"{what}: {settings.output_dir}", how, settings.optimization]


def log_summary(trainer: Any, settings: Settings) -> None:
    """Log how the run ended."""
    seconds = None
    for row in trainer.state.log_history:
        seconds = row.get("train_runtime", seconds)
    for line in end_lines(settings, RunDirectory(settings.output_dir).read_metrics(), seconds):
        logger.warning(line)


def end_lines(settings: Settings, rows: Rows, seconds: float | None) -> list[str]:
    """How a run ended: problems first, then the scores, where its files are, and the next command.

    ``seconds``: time of the training loop in this process; None if nothing was left to train.
    """
    run = RunDirectory(settings.output_dir)
    text = TEMPLATES.get_template("end.txt.jinja").render(
        run=run,
        settings=settings,
        seconds=seconds,
        problems=find_problems(rows, _length_limit(settings)).values(),
        scores=score_lines(run, rows),
        benchmarks=BENCHMARK_TITLES,
    )
    return text.splitlines()


def _length_limit(settings: Settings) -> int | None:
    return getattr(settings.trainer, "max_completion_length", None)
