"""The progress bar of a training run, and a line of its metrics after each tenth."""

import sys
from typing import Any

from transformers import PrinterCallback, ProgressCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK


class ProgressBar(ProgressCallback):
    """Transformers' progress bar with the latest metrics at its end, and ten lines that stay.

    Runs of fewer than 20 steps have the bar alone.
    """

    form = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
    shown = {  # metric -> how the bar shows it, the first three; a bar of 1,000 steps fits 80 columns
        "accuracy": "acc {:.0f}%",
        "eval_accuracy": "held out {:.0f}%",
        "entropy": "H {:.2f}",
        "formatting": "format {:.0f}%",
        "reward": "reward {:.2f}",
        "eval_reward": "held out {:.2f}",
        "loss": "loss {:.3f}",
        "eval_loss": "held out {:.3f}",
    }

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title
        self.latest: dict[str, Any] = {}
        self.tenth = 0  # of the run, the last one with a line

    @classmethod
    def attach(cls, trainer: Any, title: str) -> None:
        """Replace the default progress callbacks of ``trainer`` by this one."""
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)  # in a notebook a table with one row per step
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(cls(title))

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.tenth = _tenth(state)
            self.training_bar.bar_format = self.form
            self.training_bar.set_description_str(self.title)

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        self.latest |= {key: value for key, value in (logs or {}).items() if value is not None}
        first: dict[str, str] = {}  # of each name: the held-out accuracy, else the held-out reward or loss
        for key, text in self.shown.items():
            if key in self.latest:
                first.setdefault(text.partition("{")[0], text.format(self.latest[key]))
        texts = list(first.values())
        if self.training_bar is None:
            return
        self.training_bar.set_postfix_str(", ".join(texts[:3]))
        tenth = _tenth(state)
        if tenth > self.tenth and state.max_steps >= 20:
            self.tenth = tenth
            done = f"step {state.global_step:,} of {state.max_steps:,}"
            self.training_bar.write(f"{done}: {', '.join(texts)}", file=sys.stderr)


def _tenth(state: Any) -> int:
    """The tenths of the run that are done."""
    return 10 * state.global_step // state.max_steps
