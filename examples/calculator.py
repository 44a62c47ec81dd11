"""A calculator as a tool: GTPO on word problems that a model solves by calls of an environment, in several turns.

    python examples/calculator.py                                      # the tiny model on a CPU: minutes
    python examples/calculator.py --method grpo
    python examples/calculator.py --model Qwen/Qwen2.5-0.5B-Instruct   # a model that knows tools needs no warm start

TRL runs the turns: the policy writes a call, the environment answers, the policy goes on, until it writes no call.
Loss, conflict spans, entropy and lengths are those of the policy's tokens; the answers have no gradient.

The tiny model has never seen a call. ``warm_start`` gives it a chat template with tools and trains it on dialogues,
some of which guess or calculate the wrong thing: what is left to learn.
"""

import argparse
import operator
import random
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, SFTConfig, SFTTrainer

from gtpo import GRPOTrainer, GTPOTrainer
from gtpo.data.arithmetic import arithmetic
from gtpo.models.tiny import TINY_BASE

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Calculator:
    """The environment. TRL offers its public methods to the policy, with their types and docstrings, as tools."""

    def reset(self, **row: Any) -> None:
        """Called before each completion with the row of the data; a text that it returns would follow the prompt."""
        self.calls = 0

    def calculate(self, expression: str) -> str:
        """Calculate.

        Args:
            expression: Two whole numbers with +, - or * between them, such as "7 + 5".
        """
        self.calls += 1
        found = re.fullmatch(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*", expression)
        if found is None:
            raise ValueError("expected two whole numbers with +, - or * between them")  # the policy reads it
        return str(OPERATIONS[found[2]](int(found[1]), int(found[3])))


def correct_answer(completions: list[list[dict[str, Any]]], answer: list[str], **columns: Any) -> list[float]:
    """1 for a completion whose last message ends with the correct number; a completion is a list of messages."""
    numbers = [re.findall(r"\d+", messages[-1]["content"]) for messages in completions]
    return [float(found[-1:] == [gold]) for found, gold in zip(numbers, answer, strict=True)]


def problems(size: int = 500, seed: int = 0) -> Dataset:
    rows = arithmetic("train", size, seed, steps=(1, 2))
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["gold"]} for row in rows]
    )


# The tiny model: a chat template with tools, and a warm start

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>{% generation %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>"
    "{% endfor %}{{ eos_token }}{% endgeneration %}"
    "{% else %}<|user|>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RESPONSE_TEMPLATE = {  # how Transformers reads a message; TRL knows that of Qwen, Llama and others
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call>(?P<name>\w+) ",
            "close_pattern": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": "</s>", "content": "text"},
    },
}


def dialogue(row: dict[str, Any], generator: random.Random, guessed: float = 0.3, slips: float = 0.1) -> dict[str, Any]:
    """A problem solved by calls; a share of them is guessed, and a share of the calls has another operation."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["question"]}]
    result, calculator = int(row["gold"]) + generator.choice((-2, -1, 0, 1, 2)), Calculator()
    calculator.reset()
    for step in row["reasoning"].split("\n") if generator.random() >= guessed else ():
        first, sign, second = step.split(" = ")[0].split()
        sign = generator.choice("+-*") if generator.random() < slips else sign
        first = first if len(messages) == 1 else str(result)
        arguments = {"expression": f"{first} {sign} {second}"}
        call = {"type": "function", "function": {"name": "calculate", "arguments": arguments}}
        result = max(0, int(calculator.calculate(**arguments)))
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "calculate", "content": str(result)})
    return {"messages": [*messages, {"role": "assistant", "content": str(max(0, result))}]}


def warm_start(directory: Path, steps: int = 300, seed: int = 0) -> Path:
    """Teach the tiny base to write calls; save it with its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    generator = random.Random(seed)
    rows = arithmetic("train", 3000, 1 + seed, steps=(1, 2))
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(TINY_BASE, dtype="float32"),
        args=SFTConfig(
            output_dir=str(directory),
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            assistant_only_loss=True,  # not the answers of the calculator
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            seed=seed,
        ),
        train_dataset=Dataset.from_list([dialogue(row, generator) for row in rows]),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(directory))
    return directory


def train(method: str, model: str | Path, output: Path, **settings: Any) -> Any:
    """Train and return the trainer; ``settings`` are fields of GRPOConfig."""
    trainer = {"gtpo": GTPOTrainer, "grpo": GRPOTrainer}[method](
        model=str(model),
        args=GRPOConfig(
            output_dir=str(output),
            **{
                "loss_type": "grpo",
                "num_generations": 8,
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 4,  # prompts of a step
                "max_completion_length": 160,  # of all turns, the answers of the calculator included
                "max_tool_calling_iterations": 4,
                "max_steps": 40,
                "learning_rate": 1e-3,
                "logging_steps": 1,
                "save_strategy": "no",
                "report_to": "none",
                **settings,
            },
        ),
        reward_funcs=correct_answer,
        train_dataset=problems(),
        environment_factory=Calculator,
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["gtpo", "grpo"], default="gtpo")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/calculator"))
    parser.add_argument("--max_steps", type=int, default=40)
    arguments = parser.parse_args()
    is_tiny = arguments.model == "tiny"
    model = warm_start(arguments.output_dir / "warm_start") if is_tiny else arguments.model
    on_a_cpu = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False} if is_tiny else {}
    train(arguments.method, model, arguments.output_dir, max_steps=arguments.max_steps, **on_a_cpu)


if __name__ == "__main__":
    main()
