"""Parts of the stages of `make first-light`: sizes for a GPU and for a CPU, model building, flags.

Nothing is downloaded: the models have random weights in the shapes of Llama and Qwen, the tokenizer is that of the
tiny model, padded to their vocabularies, and the dataset is the generated one.
"""

import json
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gtpo.models.memory import GIB
from gtpo.models.shape import KNOWN, Shape

HERE = Path(__file__).parent
SPARE = 8  # rows of Qwen's embedding without a token, as in its released models: Qwen2Tokenizer adds <|endoftext|>
HEADS = ("bfloat16:4096:128256", "float16:2048:151936", "float32:1000:50257")  # dtype, hidden size, vocabulary
STEPS = 4  # of a small run, with a checkpoint after half of them
SMALL = Shape(128256, 1024, 3072, 4, 8, 2, 128, tied=False)
TOY = Shape(1024, 128, 256, 2, 4, 2, 32, tied=False)  # heads of a size that vLLM has on a CPU


@dataclass(frozen=True)
class Sizes:
    """Sizes of the parts on one kind of device."""

    shapes: dict[str, Shape]  # of the models to build, by family and size
    completion: int  # tokens of a completion in the small runs
    lengths: dict[str, tuple[int, int]]  # tokens of prompt and completion of the measured steps
    group: int  # G of the measured steps
    measured_rank: int
    benchmark: tuple[str, ...]  # flags of benchmarks/bench_loss.py


SIZES = {
    "cuda": Sizes(
        shapes={
            "llama": SMALL,
            "qwen": replace(SMALL, vocab_size=151936, tied=True),
            "llama-8b": KNOWN["llama"],
            "qwen-3b": KNOWN["qwen"],
        },
        completion=64,
        lengths={"gsm8k": (200, 460), "math": (200, 1150), "longest": (4000, 1500)},
        group=12,
        measured_rank=128,
        benchmark=("--shapes", *HEADS, "--group", "12", "--length", "1500"),
    ),
    "cpu": Sizes(
        shapes={"llama": TOY, "qwen": replace(TOY, vocab_size=1100, tied=True)},
        completion=8,
        lengths={"gsm8k": (80, 6), "math": (80, 10), "longest": (96, 12)},
        group=4,
        measured_rank=4,
        benchmark=("--shapes", "float32:64:512", "--group", "4", "--length", "16", "--rounds", "1"),
    ),
}

# The flags that select a backend. All of them are given: the presets depend on the device.
VARIANTS = {
    "unsloth": ("--backend=unsloth", "--load_in_4bit=true", "--use_vllm=true", "--optim=adamw_8bit"),
    "transformers": ("--backend=transformers", "--load_in_4bit=false", "--use_vllm=false", "--optim=adamw_torch"),
    "transformers-4bit": ("--backend=transformers", "--load_in_4bit=true", "--use_vllm=false", "--optim=adamw_8bit"),
    "transformers-vllm": ("--backend=transformers", "--load_in_4bit=false", "--use_vllm=true", "--optim=adamw_torch"),
    "transformers-4bit-vllm": (
        "--backend=transformers",
        "--load_in_4bit=true",
        "--use_vllm=true",
        "--optim=adamw_8bit",
    ),
}


def describe(device: str) -> dict[str, Any]:
    """Versions, git revision and machine; driver, memory and compute capability of the GPU."""
    from gtpo.runs.provenance import provenance

    about = provenance() | {"device": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"]
        about |= {
            "gpu": properties.name,
            "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
            "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": properties.total_memory / GIB,
            "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
        }
    return about


def build_model(directory: Path, name: str, shape: Shape, device: str) -> Path:
    """Save a random model to ``directory``; ``name`` starts with its family, llama or qwen. bfloat16 on a GPU."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

    save_tokenizer(directory, shape.vocab_size - (SPARE if name.startswith("qwen") else 0))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    family = Qwen2Config if name.startswith("qwen") else LlamaConfig  # Qwen has biases on q, k and v
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
    model.save_pretrained(directory)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return directory


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Save the tiny model's tokenizer, padded to ``vocab_size`` with tokens that occur in no text."""
    from transformers import AutoTokenizer

    from examples.tiny_base import save_untrained_tiny

    AutoTokenizer.from_pretrained(save_untrained_tiny(directory / "tiny")).save_pretrained(directory)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary.update({token["content"]: token["id"] for token in content["added_tokens"]})
    vocabulary.update({f"<|filler {i}|>": i for i in range(len(vocabulary), vocab_size)})
    path.write_text(json.dumps(content))


def environment_of_runs(device: str) -> dict[str, str]:
    """Environment variables of a subprocess: no Hub, no telemetry, and no GPU for device "cpu"."""
    variables = dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",  # the output of a stage that is stopped
    }
    if device == "cpu":  # a CPU has no gpu_memory_utilization
        variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
        variables["CUDA_VISIBLE_DEVICES"] = ""
    else:
        variables.pop("OMP_NUM_THREADS", None)  # tests/conftest.py sets it for tests on a CPU
    return variables


def flags(model: Path, variant: str, sizes: Sizes, device: str) -> list[str]:
    """The flags of a small run, without ``--output_dir``."""
    return [
        *("--model", str(model), "--dataset", "arithmetic", "--reward", f"{HERE / 'reward.py'}:text_sum"),
        *("--G", "4", "--prompts_per_step", "1", "--per_device_train_batch_size", "2", "--lora_rank", "8"),
        *("--max_completion_length", str(sizes.completion), "--max_seq_length", "1024", "--max_prompt_length", "512"),
        *("--max_steps", str(STEPS), "--save_steps", str(STEPS // 2), "--logging_steps", "1"),
        *("--learning_rate", "1e-2", "--lr_scheduler_type", "constant", "--warmup_steps", "0"),
        *("--report_to", "none", "--seed", "1", "--gpu_memory_utilization", str(engine_share(device))),
        *VARIANTS[variant],
        *(("--use_cpu", "true") if device == "cpu" else ()),
    ]


def engine_share(device: str) -> float:
    """The share of the GPU that an engine of a small run takes: 6.5 GiB at most."""
    if device == "cpu":
        return 0.4
    return min(0.4, 6.5 * GIB / torch.cuda.get_device_properties(0).total_memory)


def long_prompts(directory: Path, model: Path, tokens: int) -> Path:
    """A JSONL file of prompts of just under ``tokens`` tokens, with chat template and system prompt."""
    from transformers import AutoTokenizer

    from gtpo.data.arithmetic import arithmetic
    from gtpo.prompts import to_messages

    tokenizer = AutoTokenizer.from_pretrained(model)
    questions = [row.prompt for row in arithmetic("train", 400, seed=0)]
    rows = []
    for first in range(8):
        text = questions[first]
        for question in questions[first + 8 :: 8] * 20:
            longer = f"{text} {question}"
            ids = tokenizer.apply_chat_template(to_messages(longer), add_generation_prompt=True, return_dict=False)
            if len(ids) > tokens:
                break
            text = longer
        rows.append({"prompt": text})
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"prompts-{tokens}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
