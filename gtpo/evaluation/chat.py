"""Ask a trained model and its base model side by side, with the prompt of the run and the sampling of evaluate.py.

python -m gtpo.evaluation.chat outputs/RUN "Tom has 3 apples and buys 4 more. How many apples does he have?"
python -m gtpo.evaluation.chat outputs/RUN --temperature 1.0    # a prompt loop; an empty line or Ctrl-D ends it
"""

import argparse
import math
from collections.abc import Iterator

from gtpo.arguments import PromptArguments
from gtpo.errors import UsageError
from gtpo.evaluation.records import Problem
from gtpo.evaluation.sampling import Sampling, TransformersSampler, load_prompt_tokenizer, make_requests
from gtpo.evaluation.targets import Target, choose_4bit, choose_model, choose_prompts, find_targets, short_name
from gtpo.runs.script import run_script


def ask(
    sampler: TransformersSampler, targets: list[Target], prompts: list[PromptArguments], question: str
) -> Iterator[tuple[str, str]]:
    """The label of each target, and its completion of the question.

    Raises:
        UsageError: If the prompt and its completion exceed the context length.
    """
    for target, prompt in zip(targets, prompts, strict=True):
        tokenizer = load_prompt_tokenizer(sampler, target.adapter, prompt)
        requests = make_requests(sampler, [Problem("question", question, "")], sampler.sampling, prompt, tokenizer)
        ((row,),) = sampler.sample(requests, set(), target.adapter)
        yield target.label or "base model", row["completion"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gtpo.evaluation.chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="a run directory with an adapter, or the adapter's directory")
    parser.add_argument("question", nargs="?", help="without it, questions are read line by line")
    parser.add_argument("--checkpoint", default="last", help="last, best, or the number of a step")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    if not 0 <= flags.temperature < math.inf:
        raise UsageError(f"--temperature {flags.temperature}: expected a number >= 0; 0 is greedy.")
    if flags.max_new_tokens < 1:
        raise UsageError(f"--max_new_tokens {flags.max_new_tokens}: expected at least 1.")
    targets = find_targets(["base", flags.run], None, flags.checkpoint)
    model, prompts = choose_model(targets, None), choose_prompts({}, targets)
    how = Sampling(1, flags.temperature, 1.0, flags.seed, flags.max_new_tokens, 1, choose_4bit(None, targets))
    sampler = TransformersSampler(model, how, prompts[0])
    for question in [flags.question] if flags.question else questions():
        for label, completion in ask(sampler, targets, prompts, question):
            title = f"{label} ({short_name(model)})" if label == "base model" else label
            print(f"\n--- {title}\n{completion.strip()}", flush=True)


def questions() -> Iterator[str]:
    """Lines of the terminal or of piped input, until an empty one or the end."""
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line


if __name__ == "__main__":
    run_script(main)
