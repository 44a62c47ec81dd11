"""What a merged adapter loses in bfloat16, and how far merging and unmerging moves the base (huggingface/trl#6688).

python benchmarks/merge_drift.py outputs/SmolLM2-135M-Instruct
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

SIZES = (1e-6, 1e-5, 3e-5, 1e-4)  # standard deviation of the update; about the learning rate x steps of Adam


@torch.no_grad()
def measure(path: str, size: float, cycles: int, dtype: torch.dtype) -> tuple[float, float]:
    """The share of an update that is in the merged weights, and the base's error after some cycles / the update."""
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype), LoraConfig(r=16, target_modules="all-linear")
    )
    layers = [module for module in model.modules() if hasattr(module, "lora_B") and hasattr(module, "get_delta_weight")]
    for layer in layers:
        torch.nn.init.normal_(layer.lora_B["default"].weight)
        layer.lora_B["default"].weight.data *= size / layer.get_delta_weight("default").std()
    updates = [layer.get_delta_weight("default").float() for layer in layers]
    final = [layer.lora_B["default"].weight.clone() for layer in layers]
    start = [layer.weight.float().clone() for layer in layers]
    for cycle in range(1, cycles + 1):  # the update grows, as in training: merging the same one again moves nothing
        for layer, weight in zip(layers, final, strict=True):
            layer.lora_B["default"].weight.copy_(weight * (cycle / cycles))
        before = [layer.weight.clone() for layer in layers]
        model.merge_adapter()
        merged = [layer.weight.float() - old.float() for layer, old in zip(layers, before, strict=True)]
        model.unmerge_adapter()
    drift = [layer.weight.float() - old for layer, old in zip(layers, start, strict=True)]
    norm = sum(float(update.square().sum()) for update in updates)
    kept = sum(float((new * update).sum()) for new, update in zip(merged, updates, strict=True)) / norm
    return kept, (sum(float(error.square().sum()) for error in drift) / norm) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="Hub id or directory")
    parser.add_argument("--cycles", type=int, default=100, help="Number of merges, of an update that grows to its size")
    arguments = parser.parse_args()
    print(f"{'update':>8}  {'dtype':>8}  {'kept':>6}  drift of the base / update, {arguments.cycles} cycles")
    for dtype in (torch.bfloat16, torch.float32):
        for size in SIZES:
            kept, drift = measure(arguments.model, size, arguments.cycles, dtype)
            print(f"{size:8.0e}  {str(dtype)[6:]:>8}  {100 * kept:4.0f} %  {100 * drift:.1f} %")


if __name__ == "__main__":
    main()
