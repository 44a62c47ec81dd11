"""The best adapter, or model, of a run in best/."""

import json
import logging
import math
from collections import deque
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import TrainerCallback

from gtpo.arguments import Values
from gtpo.files import remove, replace_directory
from gtpo.processes import gather_full_parameter, is_main_process
from gtpo.runs.directory import MANIFEST, RunDirectory, damage, write_manifest

logger = logging.getLogger(__name__)

BEST_WINDOW = 100  # steps of the mean that selects best/; an eighth of a run of less than 800


class BestAdapter(TrainerCallback):
    """Save the best adapter, or model, in ``best/``.

    With held-out rows: that of the best evaluation by ``held_out_metric``, the first of equal ones. Without: that of
    the highest accuracy, as the paper evaluates GRPO (Section 6.1), or reward if no accuracy is logged: a mean over the
    last ``BEST_WINDOW`` steps, or an eighth of the run if that is shorter, from the first full window on.

    A new best is copied to host memory and written with the next checkpoint, or at the end.
    """

    def __init__(self, run: RunDirectory, tokenizer: Any, held_out_metric: str | None = None) -> None:
        self.run = run
        self.tokenizer = tokenizer
        self.held_out_metric = held_out_metric and f"eval_{held_out_metric.removeprefix('eval_')}"
        self.recent: deque[Any] = deque(maxlen=BEST_WINDOW)  # (step, score) of logged lines
        self.best: Values = {}  # the metric, and its step
        self.weights: Values | None = None  # of a best adapter that is not on disk yet, by name

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if not state.global_step:
            return
        for logs in state.log_history:
            self._add(logs, logs["step"])
        best = self.run.best
        if (best / MANIFEST).is_file() and (reason := damage(best)):
            logger.warning("%s is damaged (%s): a later adapter replaces it", best, reason)
            return
        stored = self.run.read_best()
        if stored.get("step", math.inf) <= state.global_step and (self.held_out_metric or "accuracy") in stored:
            self.best = stored

    def on_evaluate(self, args, state, control, metrics=None, model=None, **kwargs):  # type: ignore[no-untyped-def]
        value = metrics.get(self.held_out_metric)  # Transformers refuses a metric that does not exist
        if value is not None:
            self._offer(self.held_out_metric, value, state, model, bool(args.greater_is_better))

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):  # type: ignore[no-untyped-def]
        has_score = self._add(logs or {}, state.global_step)
        window = min(BEST_WINDOW, max(1, state.max_steps // 8))
        first = state.global_step - window  # the window begins after this step
        if self.held_out_metric or not has_score or first < 0:
            return
        scores = [score for step, score in self.recent if step > first]
        self._offer("accuracy", sum(scores) / len(scores), state, model)

    def _add(self, logs: Values, step: int) -> bool:
        """Keep the score of a logged line; whether it has one: a mean over the steps since the line before."""
        score = logs.get("accuracy", logs.get("reward"))
        if score is not None:
            self.recent.append((step, score))
        return score is not None

    def _offer(self, name: Any, value: float, state: Any, model: Any, greater_is_better: bool = True) -> None:
        """Keep the adapter if it is the best one so far; every process has to call it."""
        best = self.best.get(name, -math.inf if greater_is_better else math.inf)
        if not (value > best if greater_is_better else value < best):  # NaN is not better
            return
        self.best = {name: value, "step": state.global_step}
        if isinstance(model, PeftModel):
            trained = get_peft_model_state_dict(model, save_embedding_layers=False)  # "auto" asks the Hub each time
        else:
            trained = model.state_dict()
        with torch.no_grad():
            full = {name: gather_full_parameter(weight) for name, weight in trained.items()}
        if is_main_process():
            self.weights = {name: weight.detach().cpu().clone() for name, weight in full.items()}

    def on_save(self, args, state, control, model=None, **kwargs):  # type: ignore[no-untyped-def]
        if self.weights is None:
            return
        unfinished = self.run.path / "best.tmp"
        remove(unfinished)
        options: Values = {}
        if isinstance(model, PeftModel):
            options = {"selected_adapters": ["default"], "save_embedding_layers": False}  # not KL's "ref"
        model.save_pretrained(unfinished, state_dict=self.weights, **options)
        self.tokenizer.save_pretrained(unfinished)
        (unfinished / "best.json").write_text(json.dumps(self.best), encoding="utf-8")
        write_manifest(unfinished)
        replace_directory(unfinished, self.run.best)
        self.weights = None

    on_train_end = on_save
