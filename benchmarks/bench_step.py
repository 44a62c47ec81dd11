"""Time of an optimizer step of GTPO, GRPO and TRL's GRPOTrainer, with and without KL, on the same canned completions.

    python benchmarks/bench_step.py                                # both models: some minutes
    python benchmarks/bench_step.py --models tiny                  # only the tiny model: half a minute
    python benchmarks/bench_step.py --markdown results/benchmarks/step_cpu.json   # the table of a run

A step is what the trainer does for one batch, without generation and logging: rewards and advantages, reference
log-probabilities where beta is not 0, conflict mask, loss, backward pass and optimizer. The models are Llamas with
random float32 weights and LoRA on every linear layer. Times are CPU seconds of one thread: medians over interleaved
rounds.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_loss import ROOT, origin, provenance

sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before TRL is imported: also disables its telemetry

import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from gtpo.arguments import GTPOArguments
from gtpo.tiny import build_tiny
from gtpo.trainer import GRPOTrainer, GTPOTrainer

GROUP = 8
BETA = 0.04
SHAPES = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "30m": {
        "vocab_size": 20480, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
        "num_attention_heads": 6,
    },
}  # fmt: skip
NAMES = {
    "gtpo": "GTPO",
    "grpo": "GRPO",
    "grpo kl": f"GRPO, beta = {BETA}",
    "trl": "TRL's GRPOTrainer",
    "trl kl": f"TRL's GRPOTrainer, beta = {BETA}",
}


def canned_group(step: int, length: int) -> list[list[int]]:
    """Completions that share their first and last eighth; the seed is the step."""
    generator = random.Random(step)
    draw = [[generator.randrange(3, 500) for _ in range(generator.randint(length // 2, length))] for _ in range(GROUP)]
    shared = length // 8
    return [[*draw[0][:shared], *ids[shared:-shared], *draw[0][-shared:]] for ids in draw]


class Canned:
    """Mixin of a trainer: the canned completions take the place of generation."""

    length: int

    def _generate_single_turn(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        return canned_group(self.state.global_step, self.length)[: len(prompt_ids)], None


class Stopwatch(TrainerCallback):
    """CPU seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begin = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.process_time() - self._begin)


def reward_parity(completions: Any, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


def make_trainer(name: str, shape: str, directory: Path, length: int, steps: int) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], pad_token_id=0, bos_token_id=1, eos_token_id=2))
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    kind = {"gtpo": GTPOTrainer, "grpo": GRPOTrainer, "trl": trl.GRPOTrainer}[name.split()[0]]
    args = trl.GRPOConfig(
        output_dir=str(directory / name.replace(" ", "_")),
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        max_steps=steps,
        beta=BETA if name.endswith("kl") else 0.0,
        loss_type="grpo",
        max_completion_length=length,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        use_bias_correction_kl=False,
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    # With a given initial entropy nothing is measured before step 1; above ln 2 no completion is filtered.
    extra = {"gtpo": GTPOArguments(initial_entropy=1.0)} if name == "gtpo" else {}
    trainer = type(f"Canned{kind.__name__}", (Canned, kind), {"length": length})(
        model=model,
        reward_funcs=[reward_parity],
        args=args,
        processing_class=AutoTokenizer.from_pretrained(directory / "tokenizer"),
        train_dataset=Dataset.from_dict({"prompt": [f"Question {i}: how much is {i} + {i}?" for i in range(8)]}),
        callbacks=[Stopwatch()],
        **extra,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def time_steps(shape: str, directory: Path, length: int, rounds: int, steps: int) -> dict[str, Any]:
    """Median seconds of a step by trainer; the first step of each turn is not counted."""
    trainers = {name: make_trainer(name, shape, directory, length, 1 + steps) for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(1 + rounds):  # the first is a warm-up: libraries are loaded, caches filled
        for name, trainer in trainers.items():
            watch = next(x for x in trainer.callback_handler.callbacks if isinstance(x, Stopwatch))
            watch.seconds.clear()
            trainer.train()
            if turn:
                seconds[name] += watch.seconds[1:]
    weights = trainers["trl"].model.named_parameters()
    parameters = sum(weight.numel() for name, weight in weights if "lora_" not in name)
    return {"parameters": parameters, "seconds": {name: statistics.median(times) for name, times in seconds.items()}}


def markdown(result: dict[str, Any]) -> str:
    """The table of a results file: milliseconds of a step, and relative to GTPO's."""
    models = result["models"]
    titles = [f"{name}, {entry['parameters'] / 1e6:.1f} M parameters, ms | x GTPO" for name, entry in models.items()]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (1 + 2 * len(models)) + "|"]
    for name, label in NAMES.items():
        cells = []
        for entry in models.values():
            seconds = entry["seconds"]
            cells += [f"{seconds[name] * 1e3:,.0f}", f"{seconds[name] / seconds['gtpo']:.2f}"]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += ["", f"{GROUP} completions of {result['length'] // 2} to {result['length']} tokens. {origin(result)}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--length", type=int, default=128, help="T, tokens of the longest completions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="measured steps per trainer and round")
    parser.add_argument("--output", type=Path, help="file for the results, JSON")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="print the table of a results file and exit")
    args = parser.parse_args()
    if args.markdown:
        print(markdown(json.loads(args.markdown.read_text())))
        return
    torch.set_num_threads(1)
    disable_progress_bar()
    result = provenance("cpu", ("torch", "trl", "transformers", "peft")) | {"length": args.length, "models": {}}
    with tempfile.TemporaryDirectory() as directory:
        build_tiny(Path(directory) / "tokenizer")
        for shape in args.models:
            result["models"][shape] = time_steps(shape, Path(directory), args.length, args.rounds, args.steps)
    print(markdown(result))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + os.linesep)


if __name__ == "__main__":
    main()
