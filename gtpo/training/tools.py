"""Tools, environments and rollout functions, which TRL runs: the policy's tokens, rollouts of several turns."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from gtpo.errors import UsageError

# State that a training step changes, besides the policy.
_LOGGED = ("_metrics", "_logs", "_pending_metrics", "_pending_extra_logs", "_next_rollout_check")


def policy_mask(batch: dict[str, Any]) -> Tensor:
    """1 on the tokens that the policy generated, EOS included; 0 on padding and on the answers of tools. (B, T)"""
    mask: Tensor = batch["completion_mask"] * batch.get("tool_mask", 1)
    return mask


def takes_turns(trainer: Any) -> bool:
    """Whether a completion is more than one call of ``_generate_single_turn``."""
    return bool(trainer.tools or trainer.environment_factories or trainer.rollout_func)


def refuse_sharded_turns(trainer: Any) -> None:
    """Refuse turns with weights that are spread over processes.

    Raises:
        UsageError: With what to use.
    """
    kind = trainer.accelerator.distributed_type.value
    if takes_turns(trainer) and kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise UsageError(
            f"tools, environments and rollout functions with {kind} are not supported: processes take different "
            "numbers of turns, and a turn needs the weights of all. Use DDP, configs/accelerate/ddp.yaml."
        )


@contextmanager
def unlogged(trainer: Any) -> Iterator[None]:
    """Inside, a step may be generated and scored; afterwards nothing of it is logged or counted."""
    logged = copy.deepcopy({name: getattr(trainer, name) for name in _LOGGED})
    tokens_seen = trainer.state.num_input_tokens_seen
    try:
        yield
    finally:
        trainer.__dict__.update(logged)
        trainer.state.num_input_tokens_seen = tokens_seen


def rollouts(trainer: Any, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch with one completion for each row, all its turns; every process has to call it. Nothing is logged."""
    sizes = {name: getattr(trainer, name) for name in ("num_generations", "num_generations_eval")}
    trainer.__dict__.update(dict.fromkeys(sizes, 1))
    try:
        with unlogged(trainer):
            return dict(trainer._generate_and_score_completions(list(rows)))
    finally:
        trainer.__dict__.update(sizes)


class TextTools:
    """Methods of a GRPOTrainer for tools that answer with text."""

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
        for message in tool_messages:
            if isinstance(message["content"], list):
                raise UsageError(
                    f"the tool {message['name']} returned a list, which TRL takes for images and other parts of a "
                    "message, and these are not supported: return a text or a number."
                )
        ids: list[int] = super()._get_tool_suffix_ids(tool_messages)  # type: ignore[misc]
        return ids
