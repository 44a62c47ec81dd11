"""What one update along the gradient of each objective does to ln pi of reference solutions of other prompts.

Section 4.1 is about a single update: GRPO lowers the probability of the tokens that completions of both signs share.
For a fixed policy and one group, the change of a mean m by an update of unit norm along the gradient g of an objective
is, to first order, <g, grad m> / |g|. Training curves add the sampler, the optimizer and chance to it.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from tqdm import trange
from trl import GRPOConfig

from gtpo.arguments import GTPOArguments
from gtpo.cli.parse import parse, read_command_line
from gtpo.data.load import load_train
from gtpo.files import write_atomically
from gtpo.grading.user_functions import load_rewards
from gtpo.models.load import load_policy
from gtpo.prompts import PromptFormat
from gtpo.training.batch import padded_batch
from gtpo.training.trainer import GTPOTrainer
from gtpo_loss import completion_entropy, conflict_weights, entropy_filter, grpo_loss, gtpo_loss
from rewards import rewards_in
from study import SETTINGS, Row, Words
from study.storage import complete_lines
from study.tags import inside, tag_spans

OTHERS = 64  # prompts whose solutions are scored
TARGETS = ("tags", "answer", "own tags")  # of reference solutions, and of the policy's own completions
PLAIN = PromptFormat()
Batch = dict[str, Tensor]
Ids = list[list[int]]


def losses(logps: Tensor, entropy: Tensor, mask: Tensor, conflict: Tensor, advantages: Tensor) -> Batch:
    """Objective -> its loss on-policy, whose gradient is -sum_it c_it grad ln pi(o_it).

    A division of the advantages by their spread has no effect on the direction.

    Args:
        logps: ln pi(o_it). Shape (B, T).
        entropy: <H>_i in nats. Shape (B,).
        mask: 1 on the completion's tokens. Shape (B, T).
        conflict: The conflict mask. Shape (B, T).
        advantages: A_i of one group. Shape (B,).
    """
    corrected = conflict_weights(conflict, advantages)
    keep = entropy_filter(entropy, advantages, None, mode="on")
    grpo, _ = grpo_loss(logps, mask, advantages)
    gtpo, _ = gtpo_loss(logps, entropy, mask, advantages, corrected, keep)
    rewarded, _ = grpo_loss(logps, mask, advantages.clamp(min=0))
    return {"GRPO": grpo, "GTPO": gtpo, "GRPO, A > 0": rewarded}


class OneStep:
    """One-step effects of a trainer's policy, which is left as it is.

    Args:
        trainer: A GTPOTrainer with ``train_dataset`` of columns prompt and solution.
        prompt_format: Of the run.

    Attributes:
        parts: Micro-batches with a mask of each of their ``TARGETS``.
        counts: Target -> its tokens; a policy may have no tags of its own.
        directions: Target -> the gradient of the mean of ln pi over its tokens, one vector.
    """

    def __init__(self, trainer: Any, prompt_format: PromptFormat = PLAIN) -> None:
        self.trainer = trainer
        self.format = prompt_format
        self.weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
        rows = trainer.train_dataset
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(rows), generator=generator).tolist()
        self.prompts = order[OTHERS:]
        others = rows[order[:OTHERS]]
        trainer.model.train()
        prompts, *_ = trainer._tokenize_prompts(others["prompt"])
        torch.manual_seed(0)
        self.parts = [*self._solutions(prompts, others["solution"]), *self._own(prompts)]
        self.counts: Counter[str] = Counter()
        self.directions: Any = defaultdict(int)
        for part in self.parts:
            logps, _ = trainer._logps_and_entropy(trainer.model, part)
            for name in part.keys() & TARGETS:
                self.directions[name] += self._gradient(logps[part[name]].sum())
                self.counts[name] += int(part[name].sum())
        for name, count in self.counts.items():
            self.directions[name] /= count

    def of_group(self, number: int) -> Row:
        """The rewards of the group that the number determines, and its effects: objective -> target -> change in nats.

        A group of equal rewards has no effects: only the entropy term has a gradient there.
        """
        trainer = self.trainer
        size = trainer.num_generations
        torch.manual_seed(number)
        row = trainer.train_dataset[self.prompts[number % len(self.prompts)]]
        with torch.no_grad():
            batch = trainer._generate_and_score_completions([row] * size)
        facts: Row = {"group": number, "effects": {}}
        for name in trainer.reward_func_names:
            rewards = trainer._logs["rewards"][name]
            facts[name] = fmean([*rewards][-size:])
        advantages = batch["advantages"].float()
        if not advantages.any():
            return facts
        mask = batch["completion_mask"]
        logps, token_entropy = trainer._logps_and_entropy(trainer.model, batch)
        entropy = completion_entropy(token_entropy, mask).detach()
        of_objective = losses(logps, entropy, mask, batch["conflict_mask"], advantages)
        for name, loss in of_objective.items():
            update = self._gradient(-loss)
            if update.any():
                update /= update.norm()
                changes = {target: float(update @ direction) for target, direction in self.directions.items()}
                facts["effects"][name] = changes
        return facts

    def _gradient(self, value: Tensor) -> Tensor:
        """Of the trained weights, one vector in float64."""
        gradients = torch.autograd.grad(value, self.weights, retain_graph=True)
        return parameters_to_vector(gradients).double()

    def _solutions(self, prompts: Ids, solutions: list[str]) -> Iterator[Batch]:
        """Micro-batches of the reference solutions."""
        tokenizer = self.trainer._tokenizer
        ids = tokenizer(solutions, add_special_tokens=False)["input_ids"]
        completions = [[*row, tokenizer.eos_token_id] for row in ids]
        for batch, spans in self._batches(prompts, completions):
            valid = batch["completion_mask"]
            between = spans.flatten(1)[:, None, 5:7]  # from the end of the opening tag to the start of the closing one
            yield batch | {"tags": inside(spans, valid).any(1), "answer": inside(between, valid).any(1)}

    def _own(self, prompts: Ids) -> Iterator[Batch]:
        """Micro-batches of the policy's own completions of the prompts that are in the format."""
        with torch.no_grad():
            completions, _ = self.trainer._generate_single_turn(prompts, None, {}, num_generations=1)
        texts = self.trainer._tokenizer.batch_decode(completions, skip_special_tokens=True)
        in_format = [*map(self.format.follows_format, texts)]
        of_prompts = [*compress(prompts, in_format)]
        for batch, spans in self._batches(of_prompts, [*compress(completions, in_format)]):
            yield batch | {"own tags": inside(spans, batch["completion_mask"]).any(1)}

    def _batches(self, prompts: Ids, completions: Ids) -> Iterator[tuple[Batch, Tensor]]:
        """Micro-batches of a group's size, and the places of the four tags in each completion, (B, 4, 2)."""
        trainer = self.trainer
        tokenizer = trainer._tokenizer
        size = trainer.num_generations
        device = trainer.accelerator.device
        for start in range(0, len(completions), size):
            rows = slice(start, start + size)
            batch = padded_batch(prompts[rows], completions[rows], tokenizer.pad_token_id, device)
            ids, valid = batch["completion_ids"], batch["completion_mask"]
            yield batch, tag_spans(tokenizer, ids, valid, self.format.tags)


def one_step_of(words: Words, checkpoint: Path | None) -> OneStep:
    """The effects of the policy of a run of train_grpo.py, with its rewards, prompts and sampling, and the filter on.

    Args:
        words: The flags of the run.
        checkpoint: Directory of the adapter; None: the untrained one.
    """
    settings = parse(read_command_line("grpo", words), (*SETTINGS, GRPOConfig))
    prompt_format = settings.prompt.format
    rows = load_train(settings.data, settings.trainer.seed, prompt_format=prompt_format)
    policy, tokenizer = load_policy(settings, "transformers")
    if checkpoint is not None:
        policy.load_adapter(str(checkpoint), "default", is_trainable=True)
    trainer = GTPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=load_rewards(settings.reward.reward, rewards_in(prompt_format), rows.column_names),
        args=settings.trainer,
        gtpo=GTPOArguments(entropy_filter="on", initial_entropy=0.0),
        train_dataset=rows,
    )
    return OneStep(trainer, prompt_format)


def write_effects(make: Callable[[], OneStep], path: Path, groups: int) -> None:
    """Append the effects of groups 0 to ``groups`` - 1 to a JSON Lines file, without those that it has."""
    lines = complete_lines(path)
    if len(lines) >= groups:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    one_step = make()
    with path.open("a", encoding="utf-8", buffering=1) as file:
        for number in trange(len(lines), groups, desc=path.stem, unit=" groups"):
            file.write(json.dumps(one_step.of_group(number)) + "\n")
