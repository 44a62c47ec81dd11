"""The progress bar of a training run."""

from typing import Any

from transformers import PrinterCallback, ProgressCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK


class ProgressBar(ProgressCallback):
    """Transformers' progress bar with the latest metrics at its end; the default prints a line per step."""

    shown = {"accuracy": "{:.0f}%", "formatting": "{:.0f}%", "entropy": "{:.2f}", "reward": "{:.2f}", "loss": "{:.3f}"}

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    @classmethod
    def attach(cls, trainer: Any, title: str) -> None:
        """Replace the default progress callbacks of ``trainer`` by this one."""
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)  # in a notebook a table with one row per step
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(cls(title))

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self.title)

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if self.training_bar is not None:
            shown = {key: form.format(logs[key]) for key, form in self.shown.items() if logs and key in logs}
            if "accuracy" in shown:
                shown.pop("reward", None)
            if shown:  # the final summary has none of them
                self.training_bar.set_postfix(shown)
