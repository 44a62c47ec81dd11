"""Time, memory and accuracy of the head and the objective: ours, TRL's, Liger's, and bare matmuls.

    python benchmarks/bench_loss.py                                  # bfloat16, H = 512, V = 32,768: a minute or two
    python benchmarks/bench_loss.py --shapes bfloat16:512:32768 float32:512:32768 bfloat16:2048:32768
    python benchmarks/bench_loss.py --device cuda --shapes bfloat16:4096:128256 --group 12 --length 1500
    python benchmarks/bench_loss.py --markdown results/benchmarks/loss_cpu.json   # the tables of a run

One step: conflict weights, log-probabilities, entropy, loss, and its gradient with respect to the hidden states. Each
peer runs its own code, imported from its package (`make bench`); for one that cannot run, the results have
the reason. Times are medians over interleaved rounds: CPU seconds of one thread, or wall time. Each peak is the memory
that one step adds, measured in a fresh process. Liger's loss returns no log-probabilities: its errors are not measured.
The limit is the two matmuls of the head alone, in its tiles.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gtpo.processes import limit_openmp_spinning  # noqa: E402

limit_openmp_spinning(os.environ)  # as the scripts do, before PyTorch is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from timing import added_mib, medians, peak_in_own_process, provenance, run_benchmark  # noqa: E402
from torch import Tensor  # noqa: E402

from gtpo.forward.head import TILES, linear_logps_and_entropy  # noqa: E402
from gtpo_loss import completion_entropy, conflict_mask, conflict_weights, entropy_filter, gtpo_loss  # noqa: E402

OURS = "ours"
LIMIT = "limit"
TABLE = "loss.md.jinja"
CONFIDENT = 0.99


class Case(NamedTuple):
    """G completions of T tokens; about a third of the tokens have p > 0.99, the others less."""

    hidden: Tensor  # (G, T, H)
    weight: Tensor  # (V, H)
    ids: Tensor  # (G, T)
    mask: Tensor  # (G, T)
    advantages: Tensor  # (G,)

    def first(self, rows: int, tokens: int | None = None) -> "Case":
        """The first completions, whole or their first tokens."""
        return Case(
            self.hidden[:rows, :tokens],
            self.weight,
            self.ids[:rows, :tokens],
            self.mask[:rows, :tokens],
            self.advantages[:rows],
        )


def make_case(shape: str, group: int, length: int, device: str) -> Case:
    dtype, width, vocabulary = parse_shape(shape)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=generator).mul_(2 / width**0.5)
    ids = torch.randint(0, vocabulary, (group, length), generator=generator)
    lean = torch.rand(group, length, 1, generator=generator) * 6  # towards the head row of the sampled token
    hidden = torch.randn(group, length, width, generator=generator) + lean * weight[ids]
    return Case(
        hidden.to(device, dtype),
        weight.to(device, dtype),
        ids.to(device),
        torch.ones_like(ids, device=device),
        torch.linspace(-1.5, 1.5, group, device=device),
    )


def parse_shape(shape: str) -> tuple[torch.dtype, int, int]:
    dtype, width, vocabulary = shape.split(":")
    return getattr(torch, dtype), int(width), int(vocabulary)


# Implementations: one step, from the hidden states to their gradient

Head = Callable[[Tensor, Case], tuple[Tensor, Tensor]]  # hidden (G, T, H) -> logps, entropy (G, T)


def our_head(hidden: Tensor, case: Case, grad_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows = hidden.flatten(0, 1)
    logps, entropy = linear_logps_and_entropy(rows, case.weight, case.ids.flatten(), grad_rows=grad_rows)
    return logps.view_as(case.ids), entropy.view_as(case.ids)


def trl_logits_head(hidden: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    # GRPOTrainer calls it on the model's logits where the head is not fused: the default up to TRL 1.14.
    from trl.trainer.utils import selective_log_softmax_and_entropy

    logits = F.linear(F.pad(hidden, (0, 0, 0, 1)), case.weight)  # its model call returns one position more than is used
    logits = logits[:, :-1, :]
    return selective_log_softmax_and_entropy(logits, case.ids, entropy_requires_grad=False, row_mask=case.mask)


def trl_fused_head(hidden: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    # GRPOTrainer's patched forward calls it on the hidden states of the completion tokens.
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    rows = hidden.flatten(0, 1)
    targets = case.ids.flatten()
    settings = 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("entropy",)
    logps, entropy, *_ = ChunkedLogProbFunction.apply(rows, case.weight, None, targets, *settings)
    return logps.view_as(case.ids), entropy.detach().view_as(case.ids)


HEADS: dict[str, Head] = {OURS: our_head, "trl logits": trl_logits_head, "trl fused": trl_fused_head}


def gtpo_step(head: Head, case: Case) -> Tensor:
    hidden = case.hidden.detach().requires_grad_()
    conflicts = conflict_mask(case.ids, case.mask, case.advantages, len(case.ids))
    weights = conflict_weights(conflicts, case.advantages)
    if head is our_head:
        logps, entropy = our_head(hidden, case, grad_rows=(weights != 0).flatten())
    else:
        logps, entropy = head(hidden, case)
    mean_entropy = completion_entropy(entropy, case.mask)
    keep = entropy_filter(mean_entropy, case.advantages, None, mode="off")
    loss, _ = gtpo_loss(logps, mean_entropy, case.mask, case.advantages, weights, keep)
    loss.backward()
    return hidden.grad


def liger_step(case: Case) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden = case.hidden.detach().requires_grad_()
    compiled = case.hidden.is_cuda  # only its (G, T) loss; on a CPU that needs a C++ compiler
    grpo = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo", compiled=compiled)
    loss, _ = grpo(hidden, case.weight, case.ids, case.mask, case.advantages)
    loss.backward()
    return hidden.grad


def limit_step(case: Case) -> Tensor:
    hidden = case.hidden.flatten(0, 1)
    gradient = torch.empty_like(hidden)
    rows, columns = TILES[hidden.device.type]
    for states, out in zip(hidden.split(rows), gradient.split(rows), strict=True):
        for weight in case.weight.split(columns):
            torch.mm(states @ weight.T, weight, out=out)
    return gradient


Step = Callable[[], Tensor]  # the gradient with respect to the hidden states


def implementations(case: Case, only: str | None = None) -> tuple[dict[str, Step], dict[str, str]]:
    """Steps by name, and the reason for those that cannot run: a package is absent, or lacks what is called."""
    steps = steps_of(case)
    reasons = {}
    few = case.first(2, tokens=4)
    small = few._replace(weight=case.weight[:64], ids=few.ids % 64)
    for name, attempt in steps_of(small).items():
        if name == OURS or only not in (None, name):
            continue
        try:
            attempt()
        except Exception as error:
            reasons[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            del steps[name]
    return steps, reasons


def steps_of(case: Case) -> dict[str, Step]:
    steps: dict[str, Step] = {name: partial(gtpo_step, head, case) for name, head in HEADS.items()}
    return steps | {"liger": partial(liger_step, case)}


# Memory


def peak(args: argparse.Namespace) -> float:
    """MiB that one step adds in this process."""
    case = make_case(args.shapes[0], args.group, args.length, args.device)
    few, _ = implementations(case.first(2, tokens=4), only=args.peak)
    few[args.peak]()  # loads the libraries
    steps, _ = implementations(case, only=args.peak)
    return added_mib(steps[args.peak], args.device)


# Accuracy


def accuracy(case: Case, names: list[str]) -> dict[str, dict[str, float]]:
    """Relative error of d logp / d hidden over all rows and over those with p > 0.99; error of the entropy, nats."""
    ids = case.ids.flatten()
    parts = zip(*exact(case.hidden.flatten(0, 1), case.weight, ids), strict=True)
    truth, logps, entropies = map(torch.cat, parts)
    sure = logps.exp() > CONFIDENT
    errors = {}
    for name in [name for name in HEADS if name in names]:
        leaf = case.hidden.detach().requires_grad_()
        logp, entropy = HEADS[name](leaf, case)
        logp.float().sum().backward()
        error = leaf.grad.flatten(0, 1).double() - truth
        errors[name] = {
            "gradient": (error.norm() / truth.norm()).item(),
            "gradient, confident": (error[sure].norm() / truth[sure].norm()).item(),
            "entropy": (entropy.flatten().double() - entropies).abs().mean().item(),
        }
    return errors


def exact(hidden: Tensor, weight: Tensor, ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """d logp / d hidden, logp and entropy in float64, 256 rows at a time."""
    weight = weight.double()
    for states, targets in zip(hidden.double().split(256), ids.split(256), strict=True):
        log_pi = (states @ weight.T).log_softmax(-1)
        pi = log_pi.exp()
        columns = targets[:, None]
        logps = log_pi.gather(1, columns)
        entropy = -(pi * log_pi).sum(-1)
        grad_logits = pi.neg().scatter_(1, columns, -torch.expm1(logps))
        yield grad_logits @ weight, logps.squeeze(1), entropy


# Results


def peak_of(name: str, shape: str, args: argparse.Namespace) -> float:
    flags = ("device", "group", "length", "threads")
    return peak_in_own_process(__file__, name, {"shapes": shape} | {flag: getattr(args, flag) for flag in flags})


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Times, errors and peaks of every shape, and our peak with the vocabulary of Llama."""
    sources = provenance(("torch", "trl", "liger-kernel", "transformers"), args.device)
    shapes = {}
    for shape in args.shapes:
        case = make_case(shape, args.group, args.length, args.device)
        steps, reasons = implementations(case)
        shapes[shape] = {
            "seconds": medians(steps | {LIMIT: partial(limit_step, case)}, args.rounds, args.device),
            "reasons": reasons,
            "accuracy": accuracy(case.first(2), list(steps)),
            "peak_mib": {name: peak_of(name, shape, args) for name in steps},
        }
        print(f"{shape}: {shapes[shape]}", file=sys.stderr)
    dtype, width, _ = args.shapes[0].split(":")
    peak_of_llama = peak_of(OURS, f"{dtype}:{width}:128256", args)
    return {
        **sources,
        "group": args.group,
        "length": args.length,
        "shapes": shapes,
        "peak_mib at V = 128256": {OURS: peak_of_llama},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["bfloat16:512:32768"], metavar="DTYPE:H:V")
    parser.add_argument("--group", type=int, default=8, help="G, completions")
    parser.add_argument("--length", type=int, default=256, help="T, tokens of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    run_benchmark(parser, TABLE, run, peak)


if __name__ == "__main__":
    main()
