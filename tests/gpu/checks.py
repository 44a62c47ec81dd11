"""What the parts of the GPU check share: sizes for a card and for a CPU, models built here, training runs.

Nothing comes from the Hub: the models have random weights in the shapes of Llama and Qwen, the tokenizer is the tiny
model's, filled up to their vocabularies, and the data set is the generated one.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memory import KNOWN, Shape

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
STEPS = 4  # of a run; a checkpoint after half of them
SMALL = Shape(128256, 1024, 3072, 4, 8, 2, 128, tied=False)
TOY = Shape(1024, 64, 128, 2, 4, 2, 16, tied=False)


@dataclass(frozen=True)
class Sizes:
    """How large the parts are on one kind of device."""

    shapes: dict[str, Shape]  # of the models that are built, by family and size
    head: tuple[tuple[int, int, int], ...]  # rows, hidden size, vocabulary
    completion: int  # tokens of a completion in the small runs
    long_prompt: int  # tokens of the prompts and completions in the measured run
    long_completion: int
    group: int  # G of the measured run
    measured_rank: int
    benchmark: tuple[str, ...]  # flags of benchmarks/bench_loss.py
    seconds: int  # after which a run is given up


SIZES = {
    "cuda": Sizes(
        shapes={
            "llama": SMALL,
            "qwen": replace(SMALL, vocab_size=151936, tied=True),
            "llama-8b": KNOWN["llama"],
        },
        head=((384, 4096, 128256), (257, 2048, 151936), (129, 1000, 50257), (1, 4096, 128256)),
        completion=64,
        long_prompt=4000,
        long_completion=1500,
        group=12,
        measured_rank=128,
        benchmark=("--shapes", "bfloat16:4096:128256", "--group", "12", "--length", "1500"),
        seconds=1800,
    ),
    "cpu": Sizes(
        shapes={"llama": TOY, "qwen": replace(TOY, vocab_size=1100, tied=True)},
        head=((40, 64, 4096), (17, 50, 2053), (1, 64, 4096)),
        completion=8,
        long_prompt=96,
        long_completion=12,
        group=4,
        measured_rank=4,
        benchmark=("--shapes", "float32:64:512", "--group", "4", "--length", "16", "--rounds", "1"),
        seconds=300,
    ),
}

# What a run needs installed, and the flags that choose it. Every switch is given: the presets differ between devices.
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unsloth": (
        ("trl", "datasets", "math_verify", "unsloth", "unsloth_zoo", "vllm", "bitsandbytes"),
        ("--backend=unsloth", "--load_in_4bit=true", "--use_vllm=true", "--optim=adamw_8bit"),
    ),
    "transformers": (
        ("trl", "datasets", "math_verify", "peft"),
        ("--backend=transformers", "--load_in_4bit=false", "--use_vllm=false", "--optim=adamw_torch"),
    ),
    "transformers-4bit": (
        ("trl", "datasets", "math_verify", "peft", "bitsandbytes"),
        ("--backend=transformers", "--load_in_4bit=true", "--use_vllm=false", "--optim=adamw_8bit"),
    ),
    "transformers-vllm": (
        ("trl", "datasets", "math_verify", "peft", "vllm"),
        ("--backend=transformers", "--load_in_4bit=false", "--use_vllm=true", "--optim=adamw_torch"),
    ),
}
GPU_ONLY = {"unsloth", "vllm", "bitsandbytes"}


def need(packages: Sequence[str], device: str) -> None:
    """Skip the part, naming what is missing."""
    if device == "cpu" and (missing := sorted(GPU_ONLY & set(packages))):
        pytest.skip(f"needs a GPU: {', '.join(missing)} run there only")
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")


def build_model(folder: Path, name: str, shape: Shape, device: str) -> Path:
    """A random model of this shape in ``folder``: ``name`` begins with its family, llama or qwen. bfloat16 on a GPU."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

    save_tokenizer(folder, shape.vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    family = Qwen2Config if name.startswith("qwen") else LlamaConfig  # Qwen: tied head, biases on q, k and v
    config = family(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=8192,
        initializer_range=0.05 if shape.hidden_size < 4096 else 0.02,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """The tiny model's tokenizer, its vocabulary filled up to ``vocab_size`` with tokens that no text contains."""
    from transformers import AutoTokenizer

    from models import build_tiny

    AutoTokenizer.from_pretrained(build_tiny(folder / "tiny")).save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary.update({token["content"]: token["id"] for token in content["added_tokens"]})
    vocabulary.update({f"<|filler {i}|>": i for i in range(len(vocabulary), vocab_size)})
    path.write_text(json.dumps(content))


def environment_of_runs(device: str) -> dict[str, str]:
    """Of a subprocess: no Hub, no telemetry, and no card where the CPU is asked for."""
    variables = dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    else:
        del variables["OMP_NUM_THREADS"]  # tests/conftest.py sets it, for the tests that a CPU runs
    return variables


def call(command: Sequence[str | Path], device: str, folder: Path, seconds: int) -> None:
    """Run a program of this repository from ``folder``.

    Raises:
        AssertionError: With the end of its output, if it fails; all of it is in ``output.txt``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "output.txt"
    with log.open("w") as output:
        ended = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=folder,
            env=environment_of_runs(device),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=seconds,
        )
    assert ended.returncode == 0, f"exit code {ended.returncode}: {log.read_text()[-3000:]}"


def flags(model: Path, variant: str, sizes: Sizes, device: str) -> list[str]:
    """The command line of a small run, but for where it goes."""
    return [
        *("--model", str(model), "--dataset", "arithmetic", "--reward", f"{HERE / 'reward.py'}:text_sum"),
        *("--G", "4", "--prompts_per_step", "1", "--per_device_train_batch_size", "2", "--lora_rank", "8"),
        *("--max_completion_length", str(sizes.completion), "--max_seq_length", "1024", "--max_prompt_length", "512"),
        *("--max_steps", str(STEPS), "--save_steps", str(STEPS // 2), "--logging_steps", "1"),
        *("--learning_rate", "1e-2", "--lr_scheduler_type", "constant", "--warmup_steps", "0"),
        *("--report_to", "none", "--seed", "1"),
        *VARIANTS[variant][1],
        *(("--use_cpu", "true") if device == "cpu" else ()),
    ]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``, as they stand."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
