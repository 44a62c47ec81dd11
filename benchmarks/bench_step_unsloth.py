"""Forward and backward pass of a group under Unsloth's forward, without a GPU: ours by rows, packed, and Unsloth's own.

    make .venv-unsloth-vllm/installed
    .venv-unsloth-vllm/bin/python benchmarks/bench_step_unsloth.py --output results/benchmarks/step_unsloth_cpu.json

The same canned completions for all, in one process, with random float32 weights and LoRA on every linear layer. What is
replaced for lack of a GPU (tests/helpers/gpu_replacements.py) is replaced for all. Times are medians over interleaved
rounds, CPU seconds of one thread. On a GPU the rows also pay a launch and a dequantization of all weights each.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}  # minutes of compilation, for kernels of a GPU
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers.gpu_replacements import import_unsloth  # noqa: E402

unsloth = import_unsloth()  # before TRL

import torch  # noqa: E402
from bench_loss import medians, provenance  # noqa: E402
from bench_step import GROUP, SHAPES, gradient_of, make_trainer  # noqa: E402
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM  # noqa: E402

from examples.tiny_base import save_untrained_tiny  # noqa: E402

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def unsloth_model(shape: str, directory: Path) -> Any:
    torch.manual_seed(0)
    save_untrained_tiny(directory / "tokenizer")
    config = LlamaConfig(**SHAPES[shape], pad_token_id=0, bos_token_id=1, eos_token_id=2)
    LlamaForCausalLM(config).save_pretrained(directory / shape)
    AutoTokenizer.from_pretrained(directory / "tokenizer").save_pretrained(directory / shape)
    loader = unsloth.FastLanguageModel
    model, _ = loader.from_pretrained(
        str(directory / shape),
        max_seq_length=512,
        load_in_4bit=False,
        dtype=torch.float32,
        device_map="cpu",
        use_gradient_checkpointing=True,  # "unsloth" copies activations to pinned memory
    )
    model = loader.get_peft_model(model, r=16, target_modules=LINEAR, use_gradient_checkpointing=True)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    return model


def time_group(shape: str, directory: Path, length: int, rounds: int) -> dict[str, Any]:
    model = unsloth_model(shape, directory)
    trainers = {name: make_trainer(name, model, directory, GROUP, length) for name in ("gtpo", "trl")}
    batches = {}
    for name, trainer in trainers.items():
        trainer.model.train()
        trainer._metrics["train"].clear()
        batches[name] = trainer._generate_and_score_completions([trainer.train_dataset[0]] * GROUP)
    tensors = {name: part for name, part in batches["gtpo"].items() if isinstance(part, torch.Tensor)}
    rows = []
    for i in range(GROUP):
        row = {name: part[i : i + 1] if part.dim() else part for name, part in tensors.items()}
        rows.append(row)

    def step(name: str, parts: list[dict[str, Any]]) -> None:
        trainers[name].model.zero_grad()
        trainers[name].current_gradient_accumulation_steps = len(parts)
        for part in parts:
            trainers[name].compute_loss(trainers[name].model, dict(part)).backward()

    steps = {
        "rows": lambda: step("gtpo", rows),
        "packed": lambda: step("gtpo", [batches["gtpo"]]),
        "unsloth": lambda: step("trl", [batches["trl"]]),
    }
    gradients = {}
    for name in ("rows", "packed"):
        steps[name]()
        gradients[name] = gradient_of(model)
    assert trainers["gtpo"]._route.packing.verified, "the rows were not packed"
    seconds = medians(steps, rounds, "cpu")
    return {
        "parameters": sum(weight.numel() for name, weight in model.named_parameters() if "lora_" not in name),
        "tokens": int(batches["gtpo"]["host_masks"].sum()),
        "seconds": seconds,
        "unsloth packs": getattr(model, "_unsloth_seq_packing_grad_ok", None) is True,
        "gradient_error": ((gradients["packed"] - gradients["rows"]).norm() / gradients["rows"].norm()).item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="30m")
    parser.add_argument("--length", type=int, default=128, help="T, tokens of the longest completions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file for the results, JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)  # Unsloth writes its compiled cache here
        measured = time_group(args.model, Path(temporary), args.length, args.rounds)
    os.chdir(ROOT)
    packages = ("torch", "trl", "transformers", "unsloth", "unsloth_zoo")
    result = provenance("cpu", packages) | {"group": GROUP, "length": args.length, "model": args.model} | measured
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + os.linesep)


if __name__ == "__main__":
    main()
