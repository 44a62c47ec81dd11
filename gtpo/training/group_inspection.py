"""One group of a training prompt as a training step sees it, without training on it: for notebooks."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gtpo.errors import UsageError
from gtpo.reports.groups import Group
from gtpo.training.record import cut_off, gold_answer, messages

# State that a training step changes, besides the policy.
_LOGGED = ("_metrics", "_logs", "_pending_metrics", "_pending_extra_logs", "_next_rollout_check")


def inspect_group(trainer: Any, row: int) -> Group:
    """Generate and score G completions of a row of ``train_dataset`` as a training step does, without training on them.

    Nothing is logged or counted, and the state of the random generators is restored: a run is the same with and without
    the call, and a second call returns the same completions. UsageError if several processes are running.
    """
    if trainer.accelerator.num_processes > 1:
        raise UsageError(f"inspect_group needs one process, and {trainer.accelerator.num_processes} are running.")
    was_training = trainer.model.training
    trainer.model.train()  # groups of training mode; there is no dropout
    example, group_size = trainer.train_dataset[row], trainer.num_generations
    devices = [trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []
    try:
        with _unlogged(trainer), torch.random.fork_rng(devices), torch.no_grad():
            batch = trainer._generate_and_score_completions([example] * group_size)
            table = trainer._logs["rewards"]
            rewards = {name: list(table[name])[-group_size:] for name in trainer.reward_func_names}
            scores = trainer.scores(trainer.model_wrapped, batch, trainer.args.per_device_train_batch_size)
            _, measured = trainer._objective(*scores, batch)
    finally:
        trainer.model.train(was_training)
    valid = batch["completion_mask"].bool()
    tokenizer = trainer.processing_class
    rows = range(group_size)
    return Group(
        prompt=tokenizer.decode(batch["prompt_ids"][0][batch["prompt_mask"][0].bool()]),
        tokens=[_token_texts(tokenizer, batch["completion_ids"][i][valid[i]].tolist()) for i in rows],
        rewards=rewards,
        advantages=batch["advantages"].tolist(),
        weights=[measured.weights[i][valid[i]].tolist() for i in rows],
        entropy=measured.entropy.tolist(),
        keep=measured.keep.tolist(),
        messages=messages(example),
        gold_answer=gold_answer(example),
        cut_off=cut_off(trainer, batch["completion_ids"], batch["completion_mask"]),
    )


@contextmanager
def _unlogged(trainer: Any) -> Iterator[None]:
    """Inside, a step may be generated and scored; afterwards nothing of it is logged or counted."""
    logged = copy.deepcopy({name: getattr(trainer, name) for name in _LOGGED})
    tokens_seen = trainer.state.num_input_tokens_seen
    try:
        yield
    finally:
        trainer.__dict__.update(logged)
        trainer.state.num_input_tokens_seen = tokens_seen


def _token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token after the one before it: some tokenizers drop a leading space otherwise."""
    alone = [tokenizer.decode([token]) for token in ids]
    pairs = [tokenizer.decode(ids[t - 1 : t + 1]) for t in range(1, len(ids))]
    return alone[:1] + [pair[len(first) :] for first, pair in zip(alone[:-1], pairs, strict=True)]
