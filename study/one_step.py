"""What one update along the gradient of each objective does to ln pi of reference solutions of other prompts.

Section 4.1 is about a single update: GRPO lowers the probability of the tokens that completions of both signs share.
For a fixed policy and one group, the change of a mean m by an update of unit norm along the gradient g of an objective
is, to first order, <g, grad m> / |g|. Training curves add the sampler, the optimizer and chance to it.
"""

import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig

from gtpo.arguments import DataArguments, GTPOArguments, ModelArguments, PromptArguments, fields_of, stored_prompt
from gtpo.data.load import load_train
from gtpo.files import write_atomically
from gtpo.grading.user_functions import load_rewards
from gtpo.models.load import build_policy
from gtpo.prompts import TAGS, PromptFormat
from gtpo.training.batch import padded_batch
from gtpo.training.trainer import GTPOTrainer
from gtpo_loss import completion_entropy, conflict_weights, entropy_filter, grpo_loss, gtpo_loss
from study.tags import tag_span

OTHERS = 64  # prompts whose solutions are scored
TARGETS = ("tags", "answer", "solution", "own tags")  # of reference solutions, and of the policy's own completions


def coefficients(
    logps: Tensor, entropy: Tensor, mask: Tensor, conflict: Tensor, advantages: Tensor, gamma: float = 0.1
) -> dict[str, Tensor]:
    """Objective -> the c_it with which its gradient is sum_it c_it grad ln pi(o_it), on-policy. Shape (B, T) each.

    With one group DAPO has the direction of Dr. GRPO, and a division of the advantages by their spread has no effect.

    Args:
        logps: ln pi(o_it). Shape (B, T).
        entropy: <H>_i in nats. Shape (B,).
        mask: 1 on the completion's tokens. Shape (B, T).
        conflict: The conflict mask. Shape (B, T).
        advantages: A_i of one group. Shape (B,).
        gamma: Of Eq. 11.
    """
    leaf = logps.detach().requires_grad_()
    ones, every = torch.ones_like(leaf), torch.ones_like(entropy)
    corrected, skipped = (conflict_weights(conflict, advantages, weight) for weight in (2.0, 1.0))
    keep = entropy_filter(entropy, advantages, None, mode="on")
    grpo = partial(grpo_loss, leaf, mask)
    gtpo = partial(gtpo_loss, leaf, entropy, mask)
    losses = {
        "GRPO": grpo(advantages),
        "Dr. GRPO": grpo(advantages, loss_type="dr_grpo", normalizer=1.0),
        "GTPO": gtpo(advantages, corrected, keep, gamma=gamma),
        "correction": gtpo(advantages, corrected, every, gamma=0.0),
        "λ = 1 / 0": gtpo(advantages, skipped, every, gamma=0.0),
        "entropy control": gtpo(advantages, ones, keep, gamma=gamma),
        "entropy term": gtpo(torch.zeros_like(advantages), ones, every, gamma=gamma),
        "GRPO, A > 0": grpo(advantages.clamp(min=0)),
        "GRPO, A < 0": grpo(advantages.clamp(max=0)),
    }
    return {name: -torch.autograd.grad(loss, leaf)[0] for name, (loss, _) in losses.items()}


class OneStep:
    """One-step effects of a trainer's policy, which is left as it is.

    Args:
        trainer: A GTPOTrainer with ``train_dataset`` of columns prompt and solution; its micro-batch is a group.
        seed: Of the prompts that are scored, and of the order of the others.
    """

    def __init__(self, trainer: Any, seed: int = 0) -> None:
        self.trainer = trainer
        self.tags = getattr(trainer, "tags", TAGS)  # of trainer_of
        self.weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
        order = torch.randperm(len(trainer.train_dataset), generator=torch.Generator().manual_seed(seed)).tolist()
        self.prompts = order[OTHERS:]
        trainer.model.train()
        examples = [trainer.train_dataset[row] for row in order[:OTHERS]]
        prompts = trainer._tokenize_prompts([example["prompt"] for example in examples])[0]
        torch.manual_seed(seed)
        self.parts = [*self._solutions(prompts, examples), *self._own(prompts, examples)]
        counts = {name: sum(int(part[name].sum()) for part in self.parts if name in part) for name in TARGETS}
        self.counts = {name: count for name, count in counts.items() if count}  # a policy may have no tags of its own
        self.directions = {name: [torch.zeros_like(weight) for weight in self.weights] for name in self.counts}
        for part in self.parts:
            for name, value in self._targets(part).items():
                gradients = torch.autograd.grad(value, self.weights, retain_graph=True)
                for total, gradient in zip(self.directions[name], gradients, strict=True):
                    total += gradient

    def of_group(self, number: int) -> dict[str, Any]:
        """The effects of one group, which the number determines: its facts, and objective -> target -> change in nats.

        A group of equal rewards has no effects: only the entropy term has a gradient there.
        """
        trainer, size = self.trainer, self.trainer.num_generations
        torch.manual_seed(number)
        row = trainer.train_dataset[self.prompts[number % len(self.prompts)]]
        with torch.no_grad():
            batch = trainer._generate_and_score_completions([row] * size)
        table = trainer._logs["rewards"]
        rewards = {name: list(table[name])[-size:] for name in trainer.reward_func_names}
        advantages, mask = batch["advantages"].float(), batch["completion_mask"]
        facts: dict[str, Any] = {"group": number} | {name: statistics.fmean(values) for name, values in rewards.items()}
        if not advantages.any():
            return facts | {"effects": {}}
        logps, token_entropy = trainer._logps_and_entropy(trainer.model, batch)
        entropy = completion_entropy(token_entropy, mask).detach()
        of_objective = coefficients(logps, entropy, mask, batch["conflict_mask"], advantages)
        gradients = {
            name: torch.autograd.grad(logps, self.weights, of_token, retain_graph=True)
            for name, of_token in of_objective.items()
            if of_token.any()
        }
        effects: dict[str, Any] = {}
        facts |= {"conflict_tokens": batch["conflict_mask"].sum().item() / size, "entropy": entropy.mean().item()}
        for name, gradient in gradients.items():
            norm = _inner(gradient, gradient) ** 0.5
            effects[name] = {t: _inner(gradient, self.directions[t]) / norm for t in self.counts} | {"norm": norm}
        return facts | {"effects": effects}

    def _solutions(self, prompts: list[list[int]], examples: list[dict[str, Any]]) -> Iterator[dict[str, Tensor]]:
        """Micro-batches of the reference solutions with the masks of their targets."""
        tokenizer = self.trainer._tokenizer
        solutions = [
            [*tokenizer(example["solution"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            for example in examples
        ]
        for batch, spans in self._batches(prompts, solutions):
            whole, answers = batch["completion_mask"].bool(), [[(of_row[2][1], of_row[3][0])] for of_row in spans]
            yield batch | {"tags": _within(spans, whole), "answer": _within(answers, whole), "solution": whole}

    def _own(self, prompts: list[list[int]], examples: list[dict[str, Any]]) -> Iterator[dict[str, Tensor]]:
        """Micro-batches of the policy's own completions of the prompts that are in the format, with their tags."""
        with torch.no_grad():
            completions, _ = self.trainer._generate_single_turn(prompts, None, {}, num_generations=1)
        text_format = PromptFormat(None, self.tags)
        texts = self.trainer._tokenizer.batch_decode(completions, skip_special_tokens=True)
        kept = [i for i, text in enumerate(texts) if text_format.follows_format(text)]
        for batch, spans in self._batches([prompts[i] for i in kept], [completions[i] for i in kept]):
            yield batch | {"own tags": _within(spans, batch["completion_mask"])}

    def _batches(
        self, prompts: list[list[int]], completions: list[list[int]]
    ) -> Iterator[tuple[dict[str, Tensor], list[list[tuple[int, int]]]]]:
        """Micro-batches of a group's size, and the places of the four tags in each completion."""
        trainer, size = self.trainer, self.trainer.num_generations
        for start in range(0, len(completions), size):
            rows = completions[start : start + size]
            pieces = [trainer._tokenizer.convert_ids_to_tokens(row) for row in rows]
            spans = []
            for row in pieces:
                found: Any = [tag_span(row, tag) for tag in self.tags]
                if None in found:
                    raise ValueError("a reference solution lacks a tag: one-step effects need all four")
                spans.append(found)
            device = trainer.accelerator.device
            yield padded_batch(prompts[start : start + size], rows, trainer._tokenizer.pad_token_id, device), spans

    def _targets(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a micro-batch adds to the mean of ln pi over the tokens of each target."""
        logps, _ = self.trainer._logps_and_entropy(self.trainer.model, part)
        return {name: logps[part[name]].sum() / count for name, count in self.counts.items() if name in part}


def trainer_of(config: Mapping[str, Any], checkpoint: Path | None, rewards_in: Callable[..., Any]) -> GTPOTrainer:
    """A GTPOTrainer for the policy of a run, with the rewards, prompts and sampling of the run, and the filter on.

    Args:
        config: The settings of the run.
        checkpoint: Directory of the adapter; None: the untrained one.
        rewards_in: The paper's rewards in a prompt format.
    """
    model = ModelArguments(**{name: config[name] for name in fields_of([ModelArguments]) if name in config})
    data = DataArguments(**{name: config[name] for name in fields_of([DataArguments]) if name in config})
    prompt = PromptArguments(**stored_prompt(config))
    rows = load_train(data, config["seed"], prompt_format=prompt.format)
    policy, tokenizer = build_policy(model, "transformers", config["seed"], prompt=prompt)
    if checkpoint is not None:
        policy.load_adapter(str(checkpoint), "default", is_trainable=True)
    size = config["num_generations"]
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        num_generations=size,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=1,
        max_completion_length=config["max_completion_length"],
        temperature=config["temperature"],
        loss_type="grpo",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
    )
    trainer = GTPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=load_rewards(config["reward"], rewards_in(prompt.format), rows.column_names),
        args=args,
        gtpo=GTPOArguments(entropy_filter="on", initial_entropy=0.0),
        train_dataset=rows,
    )
    trainer.tags = prompt.format_tags
    return trainer


def _within(spans: list[list[tuple[int, int]]], like: Tensor) -> Tensor:
    """The tokens of a batch in one of the spans [first, last) of their row. Bool, shape (B, T)."""
    mask = torch.zeros_like(like, dtype=torch.bool)
    for row, of_row in enumerate(spans):
        for first, last in of_row:
            mask[row, first:last] = True
    return mask


def _inner(a: Iterable[Tensor], b: Iterable[Tensor]) -> float:
    return sum((x * y).sum(dtype=torch.float64).item() for x, y in zip(a, b, strict=True))


def write_effects(trainer: Any, path: Path, groups: int) -> Iterator[int]:
    """Append the effects of groups 0 to ``groups`` - 1 to a JSON Lines file, without those that it has; each number."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    done = sum(line.endswith("\n") for line in lines)  # a kill may truncate the last one
    if done >= groups:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(lines[:done]))
    one_step = OneStep(trainer)
    for number in range(done, groups):
        line = json.dumps(one_step.of_group(number))
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        yield number
