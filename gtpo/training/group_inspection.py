"""One group of a training prompt as a training step sees it, without training on it: for notebooks."""

from typing import Any

import torch

from gtpo.errors import UsageError
from gtpo.reports.groups import Group
from gtpo.training.completions_table import gold_answer, messages
from gtpo.training.tools import unlogged


def inspect_group(trainer: Any, row: int) -> Group:
    """Generate and score G completions of one training prompt as a training step does, without training on them.

    Nothing is logged or counted, and the state of the random generators is restored: a run is the same with and without
    the call, and a second call returns the same completions.

    Args:
        trainer: A GRPOTrainer of this library.
        row: Index into its ``train_dataset``.

    Raises:
        UsageError: If several processes are running.
    """
    if trainer.accelerator.num_processes > 1:
        raise UsageError(f"inspect_group needs one process, and {trainer.accelerator.num_processes} are running.")
    was_training = trainer.model.training
    trainer.model.train()  # groups of training mode; there is no dropout
    example, group_size = trainer.train_dataset[row], trainer.num_generations
    devices = [trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []
    try:
        with unlogged(trainer), torch.random.fork_rng(devices), torch.no_grad():
            batch = trainer._generate_and_score_completions([example] * group_size)
            table = trainer._logs["rewards"]
            rewards = {name: list(table[name])[-group_size:] for name in trainer.reward_func_names}
            entropy = trainer.mean_entropies(batch)
    finally:
        trainer.model.train(was_training)
    valid, weights = batch["completion_mask"].bool(), trainer._lambda(batch)
    tokenizer = trainer.processing_class
    rows = range(group_size)
    return Group(
        prompt=tokenizer.decode(batch["prompt_ids"][0][batch["prompt_mask"][0].bool()]),
        tokens=[_token_texts(tokenizer, batch["completion_ids"][i][valid[i]].tolist()) for i in rows],
        rewards=rewards,
        advantages=batch["advantages"].tolist(),
        weights=[weights[i][valid[i]].tolist() for i in rows],
        entropy=entropy.tolist(),
        keep=trainer._delta(entropy, batch).tolist(),
        messages=messages(example),
        gold_answer=gold_answer(example),
        cut_off=trainer._cut_off(batch["completion_ids"], batch["completion_mask"]),
    )


def _token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token after the one before it: some tokenizers drop a leading space otherwise."""
    alone = [tokenizer.decode([token]) for token in ids]
    pairs = [tokenizer.decode(ids[t - 1 : t + 1]) for t in range(1, len(ids))]
    return alone[:1] + [pair[len(first) :] for first, pair in zip(alone[:-1], pairs, strict=True)]
