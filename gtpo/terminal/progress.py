"""The progress bar of a training run."""

from typing import Any

from transformers import PrinterCallback, ProgressCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from gtpo.terminal.bars import phase_bar


class ProgressBar(ProgressCallback):
    """Transformers' progress bar with the latest metrics at its end; the default prints a line per step."""

    form = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
    shown = {  # metric -> how the bar shows it; a bar of 1,000 steps fits 80 columns
        "accuracy": "acc {:.0f}%",
        "formatting": "format {:.0f}%",
        "entropy": "H {:.2f}",
        "reward": "reward {:.2f}",
        "loss": "loss {:.3f}",
    }
    held_out = {  # the first of them that an evaluation logs, in place of the formatting
        "eval_accuracy": "held out {:.0f}%",
        "eval_reward": "held out {:.2f}",
        "eval_loss": "held out {:.3f}",
    }

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title
        self.parts: Any = None  # the bar over the micro-batches of a step
        self.latest: dict[str, str] = {}  # metric -> what is shown

    @classmethod
    def attach(cls, trainer: Any, title: str) -> None:
        """Replace the default progress callbacks of ``trainer`` by this one."""
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)  # in a notebook a table with one row per step
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(cls(title))

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.bar_format = self.form
            self.training_bar.set_description_str(self.title)

    def on_substep_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if self.training_bar is not None:
            self.parts = self.parts or phase_bar("micro-batches", args.gradient_accumulation_steps)
            self.parts.update()

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        super().on_step_end(args, state, control, **kwargs)
        if self.parts is not None:
            self.parts.close()
            self.parts = None

    def on_prediction_step(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        is_first = self.prediction_bar is None
        super().on_prediction_step(args, state, control, **kwargs)
        if is_first and self.prediction_bar is not None:
            self.prediction_bar.set_description_str("held-out rows")

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if self.training_bar is None:
            return
        logs = {key: value for key, value in (logs or {}).items() if value is not None}
        hidden = ("reward", "loss") if "accuracy" in logs else ()
        values = {key: text.format(logs[key]) for key, text in self.shown.items() if key in logs and key not in hidden}
        held_out = [text.format(logs[key]) for key, text in self.held_out.items() if key in logs][:1]
        if not (values or held_out):  # the final summary
            return
        before = {key: value for key, value in self.latest.items() if (key == "held out") == bool(values)}
        self.latest = values | before | ({"held out": held_out[0]} if held_out else {})
        if "held out" in self.latest:
            self.latest.pop("formatting", None)
        texts = list(self.latest.values())
        self.training_bar.set_postfix_str(
            ", ".join(texts if held_out or not control.should_evaluate else ["evaluating the held-out rows"])
        )
