"""What one update of each objective does to the syntax of tool calls: the table of docs/mechanism.md on tools.

    python benchmarks/tool_mechanism.py outputs/tool_mechanism --groups 300    # minutes on a CPU

Two policies of examples/calculator.py, the tiny model after its warm start and after 40 steps of GRPO. Measured as in
``study/one_step.py``, with other targets: the tokens of a call that do not depend on the problem, and those
that do. ``python reproduce.py --page`` reads results/mechanism/tools/.
"""

import argparse
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import calculator
from datasets import Dataset
from peft import LoraConfig

from gtpo import GTPOArguments, GTPOTrainer
from gtpo.data.arithmetic import arithmetic
from gtpo.training.initial_entropy import padded_batch
from gtpo.training.tools import policy_mask, rollouts
from study.one_step import OneStep, config_of, write_effects

OPENING, CLOSING = '<call>calculate {"expression": "', '"}</call></s>'
STEPS = 40  # of GRPO
GROUP = 8
TAKEN = ("GRPO", "GTPO", "correction")  # objectives of which every tenth update is taken


class OfCalls(OneStep):
    """ln pi of the syntax and the arguments of calls: in right dialogues, and in the policy's own rollouts."""

    targets = ("syntax", "arguments", "own syntax", "own arguments")

    def _solutions(self, prompts: list[list[int]], examples: list[dict[str, Any]]) -> Iterator[dict[str, Tensor]]:
        tokenizer, size = self.trainer.processing_class, self.trainer.num_generations
        rows = []
        for prompt, example in zip(prompts, examples, strict=True):
            messages = calculator.dialogue(example, random.Random(0), guessed=0.0, slips=0.0)["messages"]
            ids = tokenizer.apply_chat_template(messages, return_dict=False)
            assert ids[: len(prompt)] == prompt
            rows.append(ids[len(prompt) :])
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            yield self._masked(padded_batch(prompts[part], rows[part], tokenizer.pad_token_id, torch.device("cpu")), "")

    def _own(self, prompts: list[list[int]], examples: list[dict[str, Any]]) -> Iterator[dict[str, Tensor]]:
        size = self.trainer.num_generations
        for start in range(0, len(examples), size):
            yield self._masked(rollouts(self.trainer, examples[start : start + size]), "own ")

    def _masked(self, batch: dict[str, Any], prefix: str) -> dict[str, Any]:
        """The batch with the masks of the targets; a call is OPENING, an expression and CLOSING."""
        encode = self.trainer.processing_class.encode
        opening, closing = (encode(text, add_special_tokens=False) for text in (OPENING, CLOSING))
        syntax, arguments = torch.zeros(2, *batch["completion_ids"].shape, dtype=torch.bool)
        policy = policy_mask(batch).tolist()
        for row, ids in enumerate(batch["completion_ids"].tolist()):
            starts = [t for t in range(len(ids)) if ids[t : t + len(opening)] == opening and policy[row][t]]
            for start in starts:
                inside = start + len(opening)
                ends = [t for t in range(inside, len(ids)) if ids[t : t + len(closing)] == closing]
                if ends:
                    syntax[row, start:inside] = syntax[row, ends[0] : ends[0] + len(closing)] = True
                    arguments[row, inside : ends[0]] = True
        return batch | {f"{prefix}syntax": syntax, f"{prefix}arguments": arguments}


def trainer_of(model: Path, adapter: Path | None, output: Path) -> GTPOTrainer:
    rows = list(arithmetic("train", 800, 7, steps=(1, 2)))
    prompts = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["gold"]} | row for row in rows]
    torch.manual_seed(0)
    box = calculator.Calculator()
    box.reset()
    trainer = GTPOTrainer(
        model=str(model),
        args=config_of(str(output), GROUP, max_completion_length=160, max_tool_calling_iterations=4),
        gtpo=GTPOArguments(entropy_filter="on", initial_entropy=0.0),
        reward_funcs=calculator.correct_answer,
        train_dataset=Dataset.from_list(prompts),
        tools=[box.calculate],
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    if adapter is not None:
        trainer.model.load_adapter(str(adapter), "default", is_trainable=True)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--groups", type=int, default=300)
    parser.add_argument("--warm_steps", type=int, default=300)
    flags = parser.parse_args()
    warm, adapter = flags.output / "warm", flags.output / "adapter"
    if not (warm / "config.json").exists():
        calculator.warm_start(warm, flags.warm_steps)
    if not adapter.exists():
        on_a_cpu = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
        calculator.train("grpo", warm, flags.output / "grpo", max_steps=STEPS, **on_a_cpu).save_model(str(adapter))
    results = Path("results") / "mechanism" / "tools"
    results.mkdir(parents=True, exist_ok=True)
    for name, weights in (("tools-base", None), (f"tools-step-{STEPS}", adapter)):
        path = flags.output / f"{name}.jsonl"
        for number in write_effects(
            trainer_of(warm, weights, flags.output / "run"), path, flags.groups, TAKEN, OfCalls
        ):
            if number % 50 == 49:
                print(name, number + 1, flush=True)
        shutil.copyfile(path, results / path.name)


if __name__ == "__main__":
    main()
