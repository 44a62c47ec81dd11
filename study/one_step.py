"""What one update along the gradient of each objective does to ln pi of reference solutions of other prompts.

Section 4.1 is about a single update: GRPO lowers the probability of the tokens that completions of both signs share.
For a fixed policy and one group, the change of a mean m by an update of unit norm along the gradient g of an objective
is, to first order, <g, grad m> / |g|. Training curves add the sampler, the optimizer and chance to it.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig

from gtpo.arguments import GTPOArguments
from gtpo.cli.parse import parse
from gtpo.data.load import load_train
from gtpo.files import write_atomically
from gtpo.grading.user_functions import load_rewards
from gtpo.models.load import load_policy
from gtpo.prompts import PromptFormat
from gtpo.training.batch import padded_batch
from gtpo.training.trainer import GTPOTrainer
from gtpo_loss import completion_entropy, conflict_weights, entropy_filter, grpo_loss, gtpo_loss
from study import SETTINGS, Row, Words
from study.tags import inside, tag_spans

OTHERS = 64  # prompts whose solutions are scored
TARGETS = ("tags", "answer", "own tags")  # of reference solutions, and of the policy's own completions
PLAIN = PromptFormat()
Batch = dict[str, Tensor]
Ids = list[list[int]]


def coefficients(
    logps: Tensor, entropy: Tensor, mask: Tensor, conflict: Tensor, advantages: Tensor, gamma: float = 0.1
) -> Batch:
    """Objective -> the c_it with which its gradient is sum_it c_it grad ln pi(o_it), on-policy. Shape (B, T) each.

    A division of the advantages by their spread has no effect on the direction.

    Args:
        logps: ln pi(o_it). Shape (B, T).
        entropy: <H>_i in nats. Shape (B,).
        mask: 1 on the completion's tokens. Shape (B, T).
        conflict: The conflict mask. Shape (B, T).
        advantages: A_i of one group. Shape (B,).
        gamma: Of Eq. 11.
    """
    leaf = logps.detach().requires_grad_()
    ones = torch.ones_like(leaf)
    every = torch.ones_like(entropy)
    corrected = conflict_weights(conflict, advantages)
    keep = entropy_filter(entropy, advantages, None, mode="on")
    grpo = partial(grpo_loss, leaf, mask)
    gtpo = partial(gtpo_loss, leaf, entropy, mask)
    losses = {
        "GRPO": grpo(advantages),
        "GTPO": gtpo(advantages, corrected, keep, gamma=gamma),
        "entropy term": gtpo(torch.zeros_like(advantages), ones, every, gamma=gamma),
        "GRPO, A > 0": grpo(advantages.clamp(min=0)),
    }
    found = {}
    for name, (loss, _) in losses.items():
        [gradient] = torch.autograd.grad(loss, leaf)
        found[name] = -gradient
    return found


class OneStep:
    """One-step effects of a trainer's policy, which is left as it is.

    Args:
        trainer: A GTPOTrainer with ``train_dataset`` of columns prompt and solution.
        prompt_format: Of the run.
        seed: Of the prompts that are scored, and of the order of the others.
    """

    def __init__(self, trainer: Any, prompt_format: PromptFormat = PLAIN, seed: int = 0) -> None:
        self.trainer = trainer
        self.format = prompt_format
        self.weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
        rows = trainer.train_dataset
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(rows), generator=generator).tolist()
        self.prompts = order[OTHERS:]
        trainer.model.train()
        examples = [rows[row] for row in order[:OTHERS]]
        prompts = trainer._tokenize_prompts([example["prompt"] for example in examples])[0]
        torch.manual_seed(seed)
        solutions = [example["solution"] for example in examples]
        self.parts = [*self._solutions(prompts, solutions), *self._own(prompts)]
        self.counts: dict[str, int] = {}  # a policy may have no tags of its own
        self.directions = {}
        for part in self.parts:
            for name in TARGETS:
                if name not in part:
                    continue
                count = int(part[name].sum())
                self.counts[name] = self.counts.get(name, 0) + count
                self.directions[name] = [torch.zeros_like(weight) for weight in self.weights]
        for part in self.parts:
            for name, value in self._targets(part).items():
                gradients = torch.autograd.grad(value, self.weights, retain_graph=True)
                for total, gradient in zip(self.directions[name], gradients, strict=True):
                    total += gradient

    def of_group(self, number: int) -> Row:
        """The effects of one group, which the number determines: its facts, and objective -> target -> change in nats.

        A group of equal rewards has no effects: only the entropy term has a gradient there.
        """
        trainer = self.trainer
        size = trainer.num_generations
        torch.manual_seed(number)
        row = trainer.train_dataset[self.prompts[number % len(self.prompts)]]
        with torch.no_grad():
            batch = trainer._generate_and_score_completions([row] * size)
        facts: Row = {"group": number}
        for name in trainer.reward_func_names:
            rewards = trainer._logs["rewards"][name]
            facts[name] = statistics.fmean([*rewards][-size:])
        advantages = batch["advantages"].float()
        conflict = batch["conflict_mask"]
        if not advantages.any():
            return facts | {"effects": {}}
        logps, token_entropy = trainer._logps_and_entropy(trainer.model, batch)
        entropy = completion_entropy(token_entropy, batch["completion_mask"]).detach()
        of_objective = coefficients(logps, entropy, batch["completion_mask"], conflict, advantages)
        facts["conflict_tokens"] = conflict.sum().item() / size
        facts["entropy"] = entropy.mean().item()
        effects = {}
        for name, of_token in of_objective.items():
            if of_token.any():
                gradient = torch.autograd.grad(logps, self.weights, of_token, retain_graph=True)
                norm = _inner(gradient, gradient) ** 0.5
                effects[name] = {"norm": norm}
                for target, direction in self.directions.items():
                    effects[name][target] = _inner(gradient, direction) / norm
        return facts | {"effects": effects}

    def _solutions(self, prompts: Ids, solutions: list[str]) -> Iterator[Batch]:
        """Micro-batches of the reference solutions with the masks of their targets."""
        tokenizer = self.trainer._tokenizer
        ids = tokenizer(solutions, add_special_tokens=False)["input_ids"]
        completions = [[*row, tokenizer.eos_token_id] for row in ids]
        for batch, spans in self._batches(prompts, completions):
            valid = batch["completion_mask"]
            _, _, opening, closing = spans.unbind(1)
            answers = torch.stack([opening[:, 1], closing[:, 0]], dim=-1)  # between the tags
            tags = inside(spans, valid).any(1)
            answer = inside(answers[:, None], valid).any(1)
            yield batch | {"tags": tags, "answer": answer}

    def _own(self, prompts: Ids) -> Iterator[Batch]:
        """Micro-batches of the policy's own completions of the prompts that are in the format, with their tags."""
        with torch.no_grad():
            completions, _ = self.trainer._generate_single_turn(prompts, None, {}, num_generations=1)
        texts = self.trainer._tokenizer.batch_decode(completions, skip_special_tokens=True)
        of_prompts = []
        in_format = []
        for prompt, completion, text in zip(prompts, completions, texts, strict=True):
            if self.format.follows_format(text):
                of_prompts.append(prompt)
                in_format.append(completion)
        for batch, spans in self._batches(of_prompts, in_format):
            yield batch | {"own tags": inside(spans, batch["completion_mask"]).any(1)}

    def _batches(self, prompts: Ids, completions: Ids) -> Iterator[tuple[Batch, Tensor]]:
        """Micro-batches of a group's size, and the places of the four tags in each completion, (B, 4, 2)."""
        trainer = self.trainer
        tokenizer = trainer._tokenizer
        size = trainer.num_generations
        for start in range(0, len(completions), size):
            rows = slice(start, start + size)
            device = trainer.accelerator.device
            batch = padded_batch(prompts[rows], completions[rows], tokenizer.pad_token_id, device)
            spans = tag_spans(tokenizer, batch["completion_ids"], batch["completion_mask"], self.format.tags)
            if not spans[..., 1].all():
                raise ValueError("a reference solution lacks a tag: one-step effects need all four")
            yield batch, spans

    def _targets(self, part: Batch) -> Batch:
        """What a micro-batch adds to the mean of ln pi over the tokens of each target."""
        logps, _ = self.trainer._logps_and_entropy(self.trainer.model, part)
        means = {}
        for name, count in self.counts.items():
            if name in part:
                means[name] = logps[part[name]].sum() / count
        return means


def one_step_of(words: Words, checkpoint: Path | None, rewards_in: Callable[..., Any]) -> OneStep:
    """The effects of the policy of a run of train_grpo.py, with its rewards, prompts and sampling, and the filter on.

    Args:
        words: The flags of the run.
        checkpoint: Directory of the adapter; None: the untrained one.
        rewards_in: The paper's rewards in a prompt format.
    """
    settings = parse("grpo", (*SETTINGS, GRPOConfig), words)
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


def _inner(a: Iterable[Tensor], b: Iterable[Tensor]) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):
        total += (x * y).sum(dtype=torch.float64).item()
    return total


def write_effects(make: Callable[[], OneStep], path: Path, groups: int) -> Iterator[int]:
    """Append the effects of groups 0 to ``groups`` - 1 to a JSON Lines file, without those that it has; each number."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    done = sum(line.endswith("\n") for line in lines)  # a kill may truncate the last one
    if done >= groups:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(lines[:done]))
    one_step = make()
    for number in range(done, groups):
        line = json.dumps(one_step.of_group(number))
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        yield number
