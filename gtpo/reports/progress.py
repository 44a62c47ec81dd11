"""The progress bar of a training run: Transformers', with the latest scores behind it."""

from typing import Any

from transformers import ProgressCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

SHOWN = {
    "accuracy": "acc",
    "eval_accuracy": "held out",
    "entropy": "H",
    "reward": "reward",
    "loss": "loss",
    "eval_loss": "held-out loss",
}


class ProgressBar(ProgressCallback):
    """Transformers' progress bar; the first three of ``SHOWN`` follow it instead of a line with all metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: dict[str, Any] = {}

    @classmethod
    def attach(cls, trainer: Any) -> None:
        """Replace the bar of ``trainer``, which in a notebook is a table with one row per step."""
        if not trainer.args.disable_tqdm:
            trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
            trainer.add_callback(cls())

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if self.training_bar is None:
            return
        self.latest |= logs
        known = [(title, self.latest[name]) for name, title in SHOWN.items() if name in self.latest]
        self.training_bar.set_postfix(dict(known[:3]))
