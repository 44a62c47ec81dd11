"""Callbacks of a training run: metrics.jsonl and wandb, the best adapter.

``metrics.jsonl`` (one line per logged step, written immediately) and wandb get the same names and values.
"""

import json
import logging
import math
from collections import deque
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import TrainerCallback

from gtpo.errors import RunError
from gtpo.files import open_own, remove, replace_directory, write_atomically
from gtpo.processes import gather_full_parameter
from gtpo.reports.metrics import is_held_out
from gtpo.runs.directory import RunDirectory

logger = logging.getLogger(__name__)

BEST_WINDOW = 100  # steps of the mean that selects best/; an eighth of a run of less than 800
WANDB_STEPS = 1_000_000  # wandb steps per training step: TRL logs tables and the time of each call in between


class MetricsWriter(TrainerCallback):
    """Append each logged step and each evaluation to ``metrics.jsonl`` and to wandb, under the same names."""

    def __init__(self, run: RunDirectory, wandb_run: Any = None) -> None:
        self.run, self.wandb_run = run, wandb_run

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        # A resumed run restarts at its checkpoint: later steps are logged again.
        if state.global_step:
            args.eval_on_start = False  # its line is there
        if state.is_world_process_zero and self.run.metrics.exists():
            lines = self.run.metrics.read_text(errors="replace", encoding="utf-8").splitlines()
            kept = {  # a step that was logged twice: its last line
                (_step(line), '"eval_runtime"' in line): line for line in lines if _step(line) <= state.global_step
            }
            write_atomically(self.run.metrics, "".join(line + "\n" for line in kept.values()))

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        is_summary = "train_loss" in (logs or ())  # the last call
        if not state.is_world_process_zero or not logs or is_summary:
            return
        # JSON has no inf and no NaN; fp16 logs grad_norm = inf at a step that the loss scaler skips
        metrics = {key: v for key, v in logs.items() if not isinstance(v, float) or math.isfinite(v)}
        if metrics.get("step_time") and "completion_length" in metrics:
            completions = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
            metrics["tokens_per_second"] = metrics["completion_length"] * completions / metrics["step_time"]
        line = {"step": state.global_step} | metrics
        with open_own(self.run.metrics, encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.wandb_run is not None:
            try:  # steps that a resumed run repeats are behind wandb's step and ignored by it
                half = WANDB_STEPS // 2 if is_held_out(metrics) else 0  # after the step's line
                self.wandb_run.log(line, step=state.global_step * WANDB_STEPS + half, commit=True)
            except Exception as error:  # its service process died; training continues
                logger.warning("wandb: %s; training continues without it, metrics.jsonl is complete", error)
                self.wandb_run = None
                args.report_to = [name for name in args.report_to if name != "wandb"]  # TRL logs to it too

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if self.wandb_run is not None:
            self.wandb_run.finish()


class BestAdapter(TrainerCallback):
    """Save the best adapter, or model, in ``best/``.

    With held-out rows: that of the best evaluation by ``held_out_metric``, the first of equal ones. Without: that of
    the highest accuracy, as the paper evaluates GRPO (Section 6.1), or reward if no accuracy is logged: a mean over the
    last ``BEST_WINDOW`` steps, or an eighth of the run if that is shorter, from the first full window on.

    A new best is copied to host memory and written with the next checkpoint, or at the end.
    """

    def __init__(self, run: RunDirectory, tokenizer: Any, held_out_metric: str | None = None) -> None:
        self.run, self.directory = run, run.best
        self.tokenizer = tokenizer
        self.held_out_metric = held_out_metric and f"eval_{held_out_metric.removeprefix('eval_')}"
        self.recent: deque[float] = deque(maxlen=BEST_WINDOW)
        self.best: dict[str, float] = {"step": 0} if held_out_metric else {"accuracy": -1.0, "step": 0}
        self.weights: dict[str, torch.Tensor] | None = None  # of a best adapter that is not on disk yet

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if not state.global_step:
            return
        if self.run.metrics.exists():  # MetricsWriter has removed the later steps
            scores = [_score(json.loads(line)) for line in self.run.metrics.read_text(encoding="utf-8").splitlines()]
            self.recent.extend(score for score in scores if score is not None)
        stored = self.run.read_best()
        if stored and stored["step"] <= state.global_step and (self.held_out_metric or "accuracy") in stored:
            self.best = stored

    def on_evaluate(self, args, state, control, metrics=None, model=None, **kwargs):  # type: ignore[no-untyped-def]
        name = self.held_out_metric
        if name is None:
            return
        if metrics.get(name) is None:
            raise RunError(f"--metric_for_best_model: the held-out rows have no {name}, only {', '.join(metrics)}.")
        best = self.best.get(name)
        if best is None or (metrics[name] > best if args.greater_is_better else metrics[name] < best):
            self._keep({name: metrics[name], "step": state.global_step}, state, model)

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):  # type: ignore[no-untyped-def]
        if self.held_out_metric or not logs or (score := _score(logs)) is None:
            return
        self.recent.append(score)
        window = min(BEST_WINDOW, max(1, state.max_steps // 8))
        accuracy = sum(list(self.recent)[-window:]) / window
        if len(self.recent) >= window and accuracy > self.best["accuracy"]:
            self._keep({"accuracy": accuracy, "step": state.global_step}, state, model)

    def _keep(self, best: dict[str, float], state: Any, model: Any) -> None:
        self.best = best
        with torch.no_grad():
            if isinstance(model, PeftModel):
                trained = get_peft_model_state_dict(model, save_embedding_layers=False)  # "auto" asks the Hub each time
            else:
                trained = model.state_dict()
            full = {name: gather_full_parameter(weight) for name, weight in trained.items()}
        if state.is_world_process_zero:
            self.weights = {name: weight.detach().cpu().clone() for name, weight in full.items()}

    def on_save(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
        if self.weights is None:
            return
        unfinished = self.directory.with_name("best.tmp")
        remove(unfinished)
        options: dict[str, Any] = {}
        if isinstance(model, PeftModel):
            options = {"selected_adapters": ["default"], "save_embedding_layers": False}  # not KL's "ref"
        model.save_pretrained(unfinished, state_dict=self.weights, **options)
        self.tokenizer.save_pretrained(unfinished)
        (unfinished / "best.json").write_text(json.dumps(self.best), encoding="utf-8")
        replace_directory(unfinished, self.directory)
        self.weights = None

    def on_train_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.on_save(args, state, control, **kwargs)


def _score(metrics: dict[str, Any]) -> Any:
    """What selects ``best/``; None on a line without it."""
    return metrics.get("accuracy", metrics.get("reward"))


def _step(line: str) -> float:
    """The step of a metrics line; infinity for one that is damaged."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
