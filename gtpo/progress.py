"""The progress bar of a training run."""

from typing import Any

from transformers import PrinterCallback, ProgressCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from gtpo.bars import phase_bar


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

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title
        self.parts: Any = None  # the bar over the micro-batches of a step

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

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if self.training_bar is not None:
            values = {key: value for key in self.shown if (value := (logs or {}).get(key)) is not None}
            if "accuracy" in values:
                values = {key: value for key, value in values.items() if key not in ("reward", "loss")}
            if values:  # the final summary has none of them
                self.training_bar.set_postfix_str(
                    ", ".join(self.shown[key].format(value) for key, value in values.items())
                )
