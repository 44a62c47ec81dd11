"""The head against float64, in every dtype: ``python head.py FILE cuda|cpu``. The file gets JSON.

Errors by dtype and shape, of our head and of the logits path (all logits, log-softmax, autograd), and under "faults"
what is out of bounds. Rows with p > 0.99 are "confident". The entropy, in nats, is a mean over rows, as <H>_i is.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:1] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from checks import SIZES  # noqa: E402
from helpers.reference import plain_head  # noqa: E402

from gtpo.forward.head import linear_logps_and_entropy  # noqa: E402

GRADIENT = {torch.float64: 1e-12, torch.float32: 2e-5}
CONFIDENT_GRADIENT = {torch.float64: 1e-8, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 3e-2}
ENTROPY = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 3e-3, torch.float16: 3e-3}
OF_LOGITS_PATH = 0.8  # 16-bit gradients: at most this share of its error, or the rounding error of the result


def head_case(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Random rows, every second one confident: its hidden state points to its target. The values are exact in dtype."""
    rows, width, vocabulary = shape
    generator = torch.Generator(device).manual_seed(sum(shape))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=torch.float32)

    weight = normal(vocabulary, width).div_(math.sqrt(width)).to(dtype)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator, device=device)
    towards = weight[targets].float()
    towards = towards / towards.square().sum(-1, keepdim=True)
    # The logits of confident rows have standard deviation 1, so the log-sum-exp of the other tokens is ln V + 1/2, and
    # p = 1 - e^-margin. In the other rows it is 2.
    confident = torch.arange(rows, device=device)[:, None] % 2 == 1
    margin = 6 + 6 * torch.rand(rows, 1, generator=generator, device=device)
    hidden = normal(rows, width) * torch.where(confident, 1.0, 2.0)
    lean = margin + math.log(vocabulary) + 0.5 - (hidden * weight[targets].float()).sum(-1, keepdim=True)
    hidden = hidden + torch.where(confident, lean, 0.0) * towards
    return {"hidden": hidden.to(dtype), "weight": weight, "targets": targets, "upstream": normal(rows)}


def outcome(head: Any, case: dict[str, torch.Tensor], dtype: torch.dtype, **options: Any) -> tuple[torch.Tensor, ...]:
    """(logps, entropy, gradient of the hidden states), in float64."""
    hidden = case["hidden"].detach().clone().to(dtype).requires_grad_()
    logps, entropy = head(hidden, case["weight"].to(dtype), case["targets"], **options)
    logps.backward(case["upstream"].to(logps.dtype))
    return logps.detach().double(), entropy.double(), hidden.grad.double()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-300)) if expected.numel() else 0.0


def errors_of(device: str) -> dict[str, Any]:
    """Errors by dtype and shape; the first shape at temperature 1, the others at 0.7."""
    found: dict[str, Any] = {"faults": []}
    has_bfloat16 = device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    for dtype in (*((torch.bfloat16,) if has_bfloat16 else ()), torch.float16, torch.float32, torch.float64):
        for shape in SIZES[device].head:
            case = head_case(shape, dtype, device)
            options = {} if shape == SIZES[device].head[0] else {"temperature": 0.7}
            truth = outcome(plain_head, case, torch.float64, **options)
            heads = {"ours": linear_logps_and_entropy, "logits_path": plain_head}
            confident = truth[0] > math.log(0.99)
            errors = {}
            for name, head in heads.items():
                logps, entropy, gradient = outcome(head, case, dtype, **options)
                errors[name] = {
                    "logps": float((logps - truth[0]).abs().max()),
                    "entropy": float((entropy - truth[1]).mean().abs()),
                    "gradient": relative(gradient, truth[2]),
                    "gradient_confident": relative(gradient[confident], truth[2][confident]),
                }
            title = f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"
            found[title] = errors | {"confident_rows": int(confident.sum())}
            ours = errors["ours"]
            rounding = max(OF_LOGITS_PATH * errors["logits_path"]["gradient"], torch.finfo(dtype).eps / 2)
            bounds = {"entropy": ENTROPY[dtype], "gradient_confident": CONFIDENT_GRADIENT[dtype]}
            bounds["gradient"] = GRADIENT.get(dtype, rounding)
            found["faults"] += [f"{title}: {x} {ours[x]:.1e}" for x, most in bounds.items() if not ours[x] <= most]
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(errors_of(sys.argv[2])))
