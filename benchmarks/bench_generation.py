"""Time of generating a group with Transformers: TRL's default and ``gtpo/forward/generation.py``.

    python benchmarks/bench_generation.py                            # SmolLM2-135M's shape, one thread: minutes
    python benchmarks/bench_generation.py --models tiny --threads 2

8 completions of 64 tokens after a prompt of 180, greedy, random float32 weights, LoRA of rank 16 on every linear
layer. Medians over interleaved rounds: CPU seconds of one thread, or the wall time of several.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from bench_loss import ROOT, medians

sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench_step import SHAPES, random_model
from transformers import GenerationConfig

from gtpo.forward.generation import generate

GROUP = 8
PROMPT = 180
LENGTH = 64


def time_generation(shape: str, rounds: int) -> tuple[dict[str, float], float]:
    """Median seconds by engine, and the share of greedy tokens that equal TRL's."""
    policy = random_model(shape)
    model = policy.get_base_model()
    ids = torch.randint(3, model.config.vocab_size, (1, PROMPT)).repeat(GROUP, 1)
    mask = torch.ones_like(ids)
    greedy = GenerationConfig(max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
    greedy.eos_token_id = model.generation_config.eos_token_id = None  # all completions have the same length
    found: dict[str, Any] = {}
    engines: dict[str, Callable[[], Any]] = {
        "TRL's default, model.generate": lambda: policy.generate(
            input_ids=ids, attention_mask=mask, generation_config=greedy
        ),
        "gtpo/forward/generation.py": lambda: generate(model, ids, mask, greedy),
    }

    def noting(name: str) -> Callable[[], None]:
        return lambda: found.update({name: engines[name]()})

    seconds = medians({name: noting(name) for name in engines}, rounds, "cpu")
    default, ours = (tokens[:, PROMPT:] for tokens in found.values())
    return seconds, (default == ours).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["smollm2-135m"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for shape in args.models:
        seconds, equal = time_generation(shape, args.rounds)
        default = next(iter(seconds.values()))
        print(f"| {shape}, {args.threads} thread(s) | seconds | x TRL's default |\n|---|---|---|")
        for name, median in seconds.items():
            print(f"| {name} | {median:.2f} | {default / median:.2f} |")
        print(f"\nGreedy tokens equal to TRL's: {equal:.1%}.", flush=True)


if __name__ == "__main__":
    main()
