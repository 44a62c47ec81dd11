"""Ask a trained model and its base model side by side, with the prompt of the run and the sampling of evaluate.py.

A merged or base model (a directory, a Hub id, tiny) is asked alone.

python -m gtpo.evaluation.chat outputs/RUN "Tom has 3 apples. Tom finds 4 more. How many apples does Tom have?"
python -m gtpo.evaluation.chat outputs/RUN --temperature 1.0    # a prompt loop; an empty line or Ctrl-D ends it
"""

import argparse
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gtpo.errors import printable
from gtpo.evaluation.records import Problem, Sampling
from gtpo.evaluation.sampling import TransformersSampler, load_prompt_tokenizer, make_requests
from gtpo.evaluation.targets import Asked, choose_targets
from gtpo.models.source import model_source
from gtpo.runs.script import run_script

logger = logging.getLogger(__name__)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m gtpo.evaluation.chat", description=__doc__, formatter_class=raw)
    parser.add_argument("run", help="a run with an adapter, an adapter's directory, or a model")
    parser.add_argument("question", nargs="?", help="without it, questions are read line by line")
    parser.add_argument("--checkpoint", default="last", help="last, best, or the number of a step")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    # owner/name below a directory that is there is a path
    source = model_source(flags.run, flags.checkpoint, on_hub=not Path(flags.run).parent.exists())
    names = ["base", flags.run] if source.adapter else []
    chosen = choose_targets(Asked(names, None if names else flags.run, flags.checkpoint))
    if chosen.base.is_tiny:
        logger.warning("the tiny model knows one kind of question: word problems like those of --dataset arithmetic")
    how = Sampling(1, flags.temperature, 1.0, flags.seed, flags.max_new_tokens, 1, chosen.load_in_4bit)
    sampler = TransformersSampler(chosen.base, how)
    tokenizers = [load_prompt_tokenizer(sampler, row.model.adapter, row.prompt) for row in chosen.rows]
    for question in [flags.question] if flags.question else questions():
        problems = [Problem("question", question, "")]
        for row, tokenizer in zip(chosen.rows, tokenizers, strict=True):
            requests = make_requests(sampler, problems, how, row.prompt, tokenizer)
            ((sampled,),) = sampler.sample(requests, set(), row.model.adapter)
            title = row.label if row.model.adapter else f"{'base ' if names else ''}model ({row.model.title})"
            lines = f"--- {title}", *sampled["completion"].strip().split("\n")
            print("", *map(printable, lines), sep="\n", flush=True)


def questions() -> Iterator[str]:
    """Lines of the terminal or of piped input, until an empty one or the end."""
    with suppress(EOFError):
        while line := input("\n> ").strip():
            yield line


if __name__ == "__main__":
    run_script(main)
