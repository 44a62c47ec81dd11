"""Time of an optimizer step of GTPO next to one of TRL's GRPOTrainer, by phases.

    python benchmarks/bench_step.py                                       # SmolLM2-135M's shape: minutes
    python benchmarks/bench_step.py --models tiny --length 16             # half a minute
    python benchmarks/bench_step.py --models smollm2-135m --length 64 --threads 2
    python benchmarks/bench_step.py --markdown results/benchmarks/step_smollm2.json   # the table of a run

Both train on the same canned completions, with random float32 weights and LoRA on every linear layer. Phases:
generation, scoring without gradients (what an old policy or a reference costs), forward and backward pass, optimizer;
peak memory of forward and backward in addition to model and batch, each in a fresh process. Times are medians over
interleaved rounds: CPU seconds of one thread, or the wall time of several.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from timing import added_mib, medians, peak_in_own_process, provenance, run_benchmark

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before TRL is imported: also disables its telemetry

import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PrinterCallback, Qwen2Config
from transformers.utils.logging import disable_progress_bar

from examples.tiny_base import save_untrained_tiny
from gtpo.arguments import GTPOArguments
from gtpo.training.trainer import GTPOTrainer
from gtpo_loss import conflict_mask

TABLE = "step.md.jinja"
GROUP = 8
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "smollm2-135m": {  # config.json of SmolLM2-135M-Instruct
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    },
    "qwen2.5-0.5b": {  # of Qwen2.5-0.5B-Instruct
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
}
TRAINERS = {"gtpo": GTPOTrainer, "trl": trl.GRPOTrainer}
PHASES = ("generation", "scoring", "forward and backward", "optimizer")


def config_of_shape(shape: str) -> Any:
    """The configuration of a model: Llama's architecture, or Qwen's."""
    architecture = Qwen2Config if shape.startswith("qwen") else LlamaConfig
    return architecture(**SHAPES[shape])


def reward_parity(completions: Any, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


def make_trainer(name: str, model: Any, directory: Path, group: int, length: int) -> Any:
    """A trainer of ``TRAINERS``."""
    args = trl.GRPOConfig(
        output_dir=str(directory / name),
        per_device_train_batch_size=group,
        num_generations=group,
        max_steps=1,
        beta=0.0,
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
    trainer = TRAINERS[name](
        model=model,
        reward_funcs=[reward_parity],
        args=args,
        processing_class=AutoTokenizer.from_pretrained(directory / "tokenizer"),
        train_dataset=Dataset.from_dict({"prompt": [f"Question {i}: how much is {i} + {i}?" for i in range(8)]}),
        **extra,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def random_model(shape: str) -> Any:
    """A model with random weights and a LoRA adapter that is not the identity."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of_shape(shape), dtype=torch.float32)
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False))


def scored_batch(group: int, prompt: int, length: int) -> dict[str, torch.Tensor]:
    """A scored batch: one prompt, completions of half to all of the length that share their first and last tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(length // 2, length, group).long()
    ids = torch.randint(3, 512, (group, length), generator=generator)
    ids[:, : length // 8] = ids[0, : length // 8]
    valid = (torch.arange(length) < lengths[:, None]).long()
    advantages = torch.tensor([1.0, -1.0]).repeat(group)[:group]
    return {
        "prompt_ids": torch.randint(3, 512, (1, prompt), generator=generator).repeat(group, 1),
        "prompt_mask": torch.ones(group, prompt, dtype=torch.long),
        "completion_ids": ids * valid,
        "completion_mask": valid,
        "advantages": advantages,
        "has_reward": torch.ones(group, dtype=torch.bool),
        "conflict_mask": conflict_mask(ids, valid, advantages, group),
        "num_items_in_batch": valid.sum(),
        "row": torch.arange(group),
    }


def phases_of(trainer: Any, batch: dict[str, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """What a step consists of, each to be called by itself."""
    group, length = batch["completion_ids"].shape
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()

    def generate() -> None:
        trainer._generate_single_turn(batch["prompt_ids"].tolist(), None, {}, num_generations=group)

    def score() -> None:
        with torch.no_grad():
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length, batch_size=group)

    def train() -> None:
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, dict(batch)).backward()

    return dict(zip(PHASES, (generate, score, train, trainer.optimizer.step), strict=True))


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def time_phases(shape: str, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of each phase by trainer, and the gradient's distance to that of whole rows."""
    flags = {flag: getattr(args, flag) for flag in ("group", "prompt", "length", "threads")}
    peaks = {}
    for name in TRAINERS:
        peaks[name] = peak_in_own_process(__file__, name, {"models": shape, **flags})  # while this process is small
    batch = scored_batch(args.group, args.prompt, args.length)
    model = random_model(shape)  # one for both: neither is faster by its place in memory
    trainers = {name: make_trainer(name, model, directory, args.group, args.length) for name in TRAINERS}
    phases = {name: phases_of(trainer, batch) for name, trainer in trainers.items()}
    ours = trainers["gtpo"]
    gradients = []
    for may_share in (False, True):
        ours._route.may_share = may_share
        phases["gtpo"]["forward and backward"]()
        gradients.append(gradient_of(model))
    assert ours._route.is_verified, "the model's first batch was refused"
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    found = medians({(phase, name): phases[name][phase] for phase in PHASES for name in TRAINERS}, args.rounds, "cpu")
    return {
        "seconds": {phase: {name: found[phase, name] for name in TRAINERS} for phase in PHASES},
        "gradient_error": error.item(),
        "peak_mib": peaks,
    }


def peak(args: argparse.Namespace) -> float:
    """MiB that forward and backward pass of one trainer add in this process."""
    with tokenizer_directory() as directory:
        trainer = make_trainer(args.peak, random_model(args.models[0]), directory, args.group, args.length)
        phases_of(trainer, scored_batch(args.group, 8, 8))["forward and backward"]()  # loads libraries
        step = phases_of(trainer, scored_batch(args.group, args.prompt, args.length))["forward and backward"]
        if args.peak == "gtpo":
            trainer._route.is_verified = True  # without the test of the first batch, which runs whole rows
        return added_mib(step, "cpu")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Times, errors and peaks of every model."""
    sources = provenance(("torch", "trl", "transformers", "peft"))
    with tokenizer_directory() as directory:
        models = {shape: time_phases(shape, directory, args) for shape in args.models}
    return {**sources, "length": args.length, "models": models, "group": args.group, "prompt": args.prompt}


@contextmanager
def tokenizer_directory() -> Iterator[Path]:
    """A temporary directory with the tokenizer of the tiny model."""
    with tempfile.TemporaryDirectory() as temporary:
        save_untrained_tiny(Path(temporary) / "tokenizer")
        yield Path(temporary)


def main() -> None:
    disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["smollm2-135m"])
    parser.add_argument("--group", type=int, default=GROUP, help="G, completions of a prompt")
    parser.add_argument("--prompt", type=int, default=180, help="P, tokens of the prompt")
    parser.add_argument("--length", type=int, default=128, help="T, tokens of the longest completions")
    parser.add_argument("--rounds", type=int, default=5)
    run_benchmark(parser, TABLE, measure, peak)


if __name__ == "__main__":
    main()
