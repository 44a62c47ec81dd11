"""Milliseconds a token of vLLM with a LoRA adapter, by number of sequences, in 16 bits.

``sampler.py MODEL RANK PROMPT COMPLETION FILE SEQUENCES ...``; FILE, JSON, is written after each number of sequences.
The prompts have random tokens. The time of a short and of a whole completion differ by their tokens alone.
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[0] = str(ROOT)

from gtpo.files import write_atomically  # noqa: E402
from gtpo.forward.vllm_lora import lora_options  # noqa: E402
from gtpo.models.backend import disable_flashinfer_sampler  # noqa: E402

FIRST = 2  # tokens of the short completions
ROUNDS = 2


def save_adapter(model: str, rank: int, directory: Path) -> Path:
    """Random LoRA weights for all linear layers; the model is not loaded."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM", base_model_name_or_path=model)
        empty = get_peft_model_state_dict(get_peft_model(base, config))
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: 0.01 * torch.randn(weight.shape) for name, weight in empty.items()}
    save_file(weights, directory / "adapter_model.safetensors")
    config.save_pretrained(directory)
    return directory


def seconds(llm: Any, sequences: int, prompt: int, tokens: int, lora: Any) -> float:
    """The least time of completions of exactly this many tokens."""
    from vllm import SamplingParams

    draw = random.Random(0)
    prompts = [{"prompt_token_ids": [draw.randrange(300, 1000) for _ in range(prompt)]} for _ in range(sequences)]
    length = {"min_tokens": tokens, "max_tokens": tokens, "ignore_eos": True}
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        llm.generate(prompts, SamplingParams(**length, detokenize=False), use_tqdm=False, lora_request=lora)
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    model, rank, prompt, completion, file, *numbers = sys.argv[1:]
    sequences = [*map(int, numbers)]
    disable_flashinfer_sampler()
    import torch
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("random", 1, str(save_adapter(model, int(rank), Path(file).with_suffix(""))))
    on_gpu = torch.cuda.is_available()
    llm = LLM(
        model=model,
        dtype="auto" if on_gpu else "float32",
        max_model_len=int(prompt) + int(completion),
        max_num_seqs=max(sequences),
        gpu_memory_utilization=0.6,
        compilation_config={"cudagraph_capture_sizes": sequences} if on_gpu else {},
        seed=0,
        **lora_options(int(rank)),
    )
    found = {}
    for number in sequences:
        few, all_of_them = (seconds(llm, number, int(prompt), tokens, lora) for tokens in (FIRST, int(completion)))
        found[number] = 1e3 * (all_of_them - few) / (int(completion) - FIRST)
        write_atomically(Path(file), json.dumps(found))


if __name__ == "__main__":
    main()
