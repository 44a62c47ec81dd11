"""Supervised fine-tuning with TRL's trainer, whose metrics of tokens are means over the tokens of a step."""

from collections import defaultdict
from typing import Any

import trl

from gtpo.training.batch import Numbers

_OF_TOKENS = ("entropy", "mean_token_accuracy")


class SFTTrainer(trl.SFTTrainer):
    """TRL's SFTTrainer; its entropy and token accuracy do not depend on the size of the micro-batch.

    TRL averages those of the micro-batches, as if each had as many tokens. ``_metrics`` is TRL's: what it will log.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._tokens: dict[str, list[int]] = defaultdict(list)  # of the micro-batches since the last line
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = (inputs["labels"][..., 1:] != -100).sum()
        self._tokens[self._mode].append(int(self.accelerator.gather_for_metrics(tokens).sum()))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: Numbers, *args: Any, **kwargs: Any) -> None:
        measured, tokens = self._metrics[self._mode], self._tokens.pop(self._mode, [])
        for name in _OF_TOKENS:
            values = measured.get(name, [])
            if sum(tokens) and len(values) == len(tokens):
                mean = sum(value * count for value, count in zip(values, tokens, strict=True)) / sum(tokens)
                measured[name] = [mean]
        super().log(logs, *args, **kwargs)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"
