"""What a run prints: its settings at the start, problems while they happen, its scores at the end."""

import json
import logging
import shlex
from pathlib import Path
from statistics import fmean

import jinja2
from transformers import TrainerCallback, TrainerState

from gtpo.arguments import BENCHMARK_TITLES, Settings
from gtpo.errors import counted
from gtpo.files import read_regular
from gtpo.processes import is_main_process, training_begins
from gtpo.reports.metrics import Rows, finite_values, of_training, reward_names
from gtpo.runs.directory import RunDirectory, is_held_out

logger = logging.getLogger(__name__)

WINDOW = 10  # logged steps of the first and the last mean
PROBLEM_STEPS = 5  # logged steps in a row that make a problem
CUT_OFF = 0.95  # share of completions cut off at the length limit that makes a problem
_SCORES = {  # metric -> label, factor, format and unit
    "accuracy": ("accuracy", 1, ".1f", " %"),
    "accuracy_lenient": ("accuracy in any format", 1, ".1f", " %"),
    "formatting": ("formatting", 1, ".1f", " %"),
    "mean_token_accuracy": ("token accuracy", 100, ".1f", " %"),
    "completions/clipped_ratio": ("cut off", 100, ".1f", " %"),
}
_NO_ADVANTAGE = (
    "so all advantages are 0: read the completions in report.html (`python -m gtpo.reports.html RUN` writes it)"
)
_OURS = ("accuracy_reward", "format_reward")  # logged as accuracy and formatting too


def score_lines(rows: Rows) -> list[str]:
    """A line with the scores on the training prompts, and one with those on the held-out rows, as far as they exist."""
    training = of_training(rows)
    window = min(WINDOW, max(1, len(training) // 2))
    held_out = []
    for row in rows:
        if is_held_out(row):
            held_out.append({name.removeprefix("eval_"): value for name, value in row.items()})
    lines = []
    if found := scores(training, window):
        lines.append(f"Means of the first and last {counted(window, 'logged step')}: {found}")
    if found := scores(held_out, 1):
        lines.append(f"Held-out rows, steps {held_out[0]['step']} to {held_out[-1]['step']}: {found}")
    return lines


def scores(rows: Rows, window: int) -> str:
    """Each metric with the mean of its first and of its last values, as many as ``window``, that are finite."""
    rewards = reward_names(rows)
    shown = dict(_SCORES)
    for name in rewards:
        if name not in _OURS:
            shown[f"rewards/{name}/mean"] = (name, 1, ".3g", "")
    if not rewards:
        shown["loss"] = ("loss", 1, ".3g", "")
    found = []
    for metric, (label, factor, form, unit) in shown.items():
        values = [factor * value for value in finite_values(rows, metric)]
        if values:
            found.append(f"{label} {fmean(values[:window]):{form}} -> {fmean(values[-window:]):{form}}{unit}")
    return ", ".join(found)


def initial_entropy_text(run: RunDirectory) -> str | None:
    """<H>_ini and the state of the entropy filter in words; None for a run that has not measured it."""
    if not run.initial_entropy.is_file():
        return None
    record = json.loads(read_regular(run.initial_entropy))
    state = "on" if record["filter_on"] else "off"
    return f"{record['initial_entropy']:.3f} nats before training, entropy filter {state}"


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
    equal = finite_values(every, "frac_reward_zero_std")
    rewards = finite_values(last, "reward") + finite_values(last, "reward_std")
    if rewards and not any(rewards):
        problems["zero"] = f"every reward of {steps} was 0, {_NO_ADVANTAGE}"
    elif equal and min(equal) == 1:
        problems["constant"] = f"the completions of a prompt always had equal rewards, {_NO_ADVANTAGE}"
    norms = finite_values(every, "grad_norm")
    if norms and not any(norms) and not problems.keys() & {"zero", "constant"}:
        problems["still"] = "the gradient of every step was 0, so nothing was trained: look at the objective's loss"
    return problems


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=jinja2.select_autoescape(["html.jinja"]),
    undefined=jinja2.StrictUndefined,
)
TEMPLATES.filters["quoted"] = shlex.quote


class RunMessages(TrainerCallback):
    """Log what a run trains when it starts, and each problem once while it happens."""

    def __init__(self, settings: Settings, prompts: int) -> None:
        self.settings = settings
        self.prompts = prompts
        self.told = {"constant"}  # said at the end: of a few steps it also means that the task is learned

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        training_begins()  # what optimizer and schedule refuse comes before
        if is_main_process():
            for line in start_lines(self.settings, self.prompts, state, args.world_size):
                logger.warning(line)

    def on_log(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        last = of_training(state.log_history[-2 * PROBLEM_STEPS :])[-PROBLEM_STEPS:]  # without evaluations in between
        if len(last) < PROBLEM_STEPS or not is_main_process():
            return
        for name, problem in find_problems(last, _length_limit(self.settings)).items():
            if name not in self.told:
                logger.warning("Warning: %s.", problem)
                self.told.add(name)


def start_lines(settings: Settings, prompts: int, state: TrainerState, processes: int) -> list[str]:
    """Model, data, directory, steps and optimizer of a run, and the steps it had done before it was resumed."""
    count = settings.completions_per_step * processes
    each = f"{count:,} rows"
    if settings.method != "sft":
        size = settings.group_size
        groups = counted(count // size, "prompt")
        each = f"{groups} x {size} completions of at most {_length_limit(settings):,} tokens"
    done = f"; continues after step {state.global_step:,}" if state.global_step else ""
    return [
        f"{settings.method.upper()} of {settings.model.model} on {settings.data.dataset}: {settings.output_dir}",
        f"{counted(state.max_steps, 'step')} of {each}; {counted(prompts, 'prompt')}{done}",
        settings.optimization,
        *settings.without_effect(),
    ]


def log_summary(settings: Settings, run: RunDirectory) -> None:
    """Log how the run ended."""
    for line in end_lines(settings, run, run.read_metrics()):
        logger.warning(line)


def end_lines(settings: Settings, run: RunDirectory, rows: Rows) -> list[str]:
    """How a run ended: problems first, then the scores, where its files are, and the next command."""
    text = TEMPLATES.get_template("end.txt.jinja").render(
        run=run,
        settings=settings,
        problems=find_problems(rows, _length_limit(settings)).values(),
        scores=score_lines(rows),
        benchmarks=BENCHMARK_TITLES,
    )
    return text.splitlines()


def _length_limit(settings: Settings) -> int | None:
    return getattr(settings.trainer, "max_completion_length", None)
