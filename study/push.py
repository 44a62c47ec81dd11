"""What a small step of each correction does to the shares of guesses and of right answers, to first order.

    python -m study.push results/missing_tags/base-20

A step along the gradient of an objective changes a share by its inner product with the gradient of that share. Groups
are sampled as in training. One half of them gives the gradient u of the share (score function, less its mean). For a
group of the other half the change is a sum over tokens: A_i lambda_it w_i, their weight in the objective, times the
derivative of ln pi along u. Then the halves are exchanged. Printed: the change of each correction minus that of GRPO,
times 1,000, with a 95 % interval over groups, for w_i = 1/|o_i| and for equal weights of the group's tokens.
"""

import argparse
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.objectives.credit import credited_mask
from gtpo.arguments import DataArguments
from gtpo.data.load import load_named
from gtpo.prompts import TAGS
from gtpo_loss import conflict_mask, conflict_weights, tag_mask
from rewards import accuracy_reward, format_reward

GROUP = 8
STEP = 3e-4  # along u, of length 1


class Group(NamedTuple):
    """Eight completions of a prompt: (G, T), or (G,) where it says so."""

    prompt: Tensor  # (G, P)
    ids: Tensor
    valid: Tensor
    pushes: dict[str, Tensor]  # A_i (lambda_it - 1) of each correction
    shares: dict[str, Tensor]  # 1 for a guess, 1 for a right answer, (G,)


def sample(model: Any, tokenizer: Any, row: Any) -> Group:
    """A group, its advantages as in GRPO, and lambda of each correction."""
    template = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompt = tokenizer.apply_chat_template(row["prompt"], **template)["input_ids"].repeat(GROUP, 1)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 64, "pad_token_id": tokenizer.pad_token_id}
    ids = model.generate(prompt, **settings)[:, prompt.shape[1] :]
    ended = (ids == tokenizer.eos_token_id).long()
    valid = ended.cumsum(1) - ended == 0
    rows = [tokens[keep].tolist() for tokens, keep in zip(ids, valid, strict=True)]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    right = torch.tensor(accuracy_reward(texts, [row["answer"]] * GROUP))
    rewards = right + torch.tensor(format_reward(texts))
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    group = (ids, valid, advantages, GROUP)
    in_tags = tag_mask([tokenizer.convert_ids_to_tokens(tokens) for tokens in rows], TAGS, ids.shape[1])
    masks = {
        "correction alone": conflict_mask(*group),
        "correction by credit": credited_mask(*group),
        "correction on the common span": conflict_mask(*group, "common"),
        "correction on tags": conflict_mask(*group) & in_tags,
    }
    pushes = {name: advantages[:, None] * (conflict_weights(mask, advantages) - 1) for name, mask in masks.items()}
    guesses = torch.tensor(["guess" in text for text in texts])
    return Group(prompt, ids, valid, pushes, {"guesses": guesses.double(), "right answers": right.double() / 10})


def logps(model: Any, group: Group) -> Tensor:
    """ln pi of each token, 0 on padding. (G, T)"""
    logits = model(torch.cat([group.prompt, group.ids], 1)).logits[:, group.prompt.shape[1] - 1 : -1]
    return logits.log_softmax(-1).gather(2, group.ids[:, :, None])[:, :, 0] * group.valid


def gradient(model: Any, groups: list[Group], share: str) -> list[Tensor]:
    """That of a share, over all weights."""
    mean = torch.cat([group.shares[share] for group in groups]).mean()
    total = [torch.zeros_like(weight) for weight in model.parameters()]
    for group in groups:
        score = ((group.shares[share] - mean) * logps(model, group).sum(1)).mean() / len(groups)
        for sum_, part in zip(total, torch.autograd.grad(score, list(model.parameters())), strict=True):
            sum_ += part
    return total


@torch.no_grad()
def along(model: Any, groups: list[Group], direction: list[Tensor]) -> list[Tensor]:
    """The derivative of ln pi of each token along a direction, (G, T) of each group."""
    length = torch.stack([part.norm() for part in direction]).norm()
    weights = [weight.clone() for weight in model.parameters()]
    found = []
    for sign in (1, -1):
        for weight, start, part in zip(model.parameters(), weights, direction, strict=True):
            weight.copy_(start + sign * STEP * part / length)
        found.append([logps(model, group) for group in groups])
    for weight, start in zip(model.parameters(), weights, strict=True):
        weight.copy_(start)
    return [(above - below) * length / (2 * STEP) for above, below in zip(*found, strict=True)]


def changes(group: Group, derivative: Tensor) -> dict[tuple[str, str], float]:
    """(correction, weights of tokens) -> the change of the share, minus GRPO's, times 1,000."""
    lengths = group.valid.sum(1, keepdim=True).double()
    of = {"1/|o_i|": 1 / lengths, "equal": 1 / lengths.mean()}
    pushes = group.pushes.items()
    return {(name, w): 1000 * (push * derivative * of[w]).sum().item() / GROUP for name, push in pushes for w in of}


def main(base: str, count: int, seed: int) -> None:
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False, dtype=torch.float64)
    rows = load_named(DataArguments(dataset="arithmetic", limit=count), seed=seed)
    groups = [sample(model, tokenizer, row) for row in rows]
    print(f"{base}: {count} groups of {GROUP}")
    for share in ("guesses", "right answers"):
        values = []
        for half, other in ((groups[::2], groups[1::2]), (groups[1::2], groups[::2])):
            derivatives = along(model, other, gradient(model, half, share))
            values += [changes(*each) for each in zip(other, derivatives, strict=True)]
        for key in values[0]:
            of_groups = torch.tensor([each[key] for each in values])
            interval = 1.96 * of_groups.std() / len(of_groups) ** 0.5
            print(f"{share:14} {key[0]:30} {key[1]:8} {of_groups.mean():+6.2f} ± {interval:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="directory of a model")
    parser.add_argument("--groups", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    main(flags.base, flags.groups, flags.seed)
