"""Parts 1 and 2: a matmul, and the head against float64, on the GPU."""

import math
from typing import Any

import pytest
import torch
from checks import Sizes
from helpers.reference import plain_head

from gtpo.forward.head import linear_logps_and_entropy

# Bounds of the errors against float64: relative for gradients, nats for the mean entropy of the rows (<H>_i is a mean
# over tokens too). Rows with p > 0.99 are "confident".
GRADIENT = {torch.float64: 1e-12, torch.float32: 2e-5}
CONFIDENT_GRADIENT = {torch.float64: 1e-8, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 3e-2}
ENTROPY = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 3e-3, torch.float16: 3e-3}
OF_LOGITS_PATH = 0.8  # 16-bit gradients: at most this share of its error, or the rounding error of the result

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def test_environment(device: str, numbers: dict[str, Any]) -> None:
    if device == "cuda":
        assert torch.cuda.device_count() >= 1
    torch.manual_seed(0)
    a, b = torch.randn(2, 500, 500, dtype=torch.float64)
    dtype = torch.bfloat16 if device == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    product = (a.to(device, dtype) @ b.to(device, dtype)).double().cpu()
    numbers["matmul_dtype"] = str(dtype)
    numbers["matmul_error"] = float((product - a @ b).norm() / (a @ b).norm())
    assert numbers["matmul_error"] < 1e-2


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
    assert hidden.grad is not None
    return logps.detach().double(), entropy.double(), hidden.grad.double()


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-300)) if expected.numel() else 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_head(dtype: torch.dtype, sizes: Sizes, device: str, numbers: dict[str, Any]) -> None:
    """Errors of our head and of the logits path (all logits, log-softmax, autograd) in one dtype, against float64."""
    if device == "cuda" and dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bfloat16")
    for shape in sizes.head:
        case = head_case(shape, dtype, device)
        options: dict[str, Any] = {} if shape == sizes.head[0] else {"temperature": 0.7}
        truth = outcome(plain_head, case, torch.float64, **options)
        ours = outcome(linear_logps_and_entropy, case, dtype, **options)
        plain = outcome(plain_head, case, dtype, **options)
        confident = truth[0] > math.log(0.99)
        found: dict[str, Any] = {"confident_rows": int(confident.sum())}
        for name, (logps, entropy, gradient) in {"ours": ours, "logits_path": plain}.items():
            found[name] = {
                "logps": float((logps - truth[0]).abs().max()),
                "entropy": float((entropy - truth[1]).mean().abs()),
                "entropy_worst_token": float((entropy - truth[1]).abs().max()),
                "gradient": relative(gradient, truth[2]),
                "gradient_confident": relative(gradient[confident], truth[2][confident]),
            }
        numbers["x".join(map(str, shape))] = found
        mine, theirs = found["ours"], found["logits_path"]
        assert all(bool(tensor.isfinite().all()) for tensor in ours)
        assert mine["entropy"] <= ENTROPY[dtype], (shape, found)
        assert mine["gradient_confident"] <= CONFIDENT_GRADIENT[dtype], (shape, found)
        rounding = max(OF_LOGITS_PATH * theirs["gradient"], torch.finfo(dtype).eps / 2)
        assert mine["gradient"] <= GRADIENT.get(dtype, rounding), (shape, found)
        del case, truth, ours, plain
    first = numbers["x".join(map(str, sizes.head[0]))]
    assert first["confident_rows"] >= sizes.head[0][0] // 3


def test_head_without_gradient_where_none_is_wanted(sizes: Sizes, device: str, numbers: dict[str, Any]) -> None:
    """Rows outside ``grad_rows`` get a zero gradient, the others an unchanged one; zero rows are valid."""
    case = head_case(sizes.head[0], torch.float32, device)
    wanted = torch.arange(len(case["targets"]), device=device) % 3 == 0
    full = outcome(linear_logps_and_entropy, case, torch.float32)
    some = outcome(linear_logps_and_entropy, case, torch.float32, grad_rows=wanted)
    assert not some[2][~wanted].any()
    numbers["difference"] = relative(some[2][wanted], full[2][wanted])
    assert numbers["difference"] <= 1e-5
    empty = {name: tensor[:0] if name != "weight" else tensor for name, tensor in case.items()}
    assert [len(tensor) for tensor in outcome(linear_logps_and_entropy, empty, torch.float32)] == [0, 0, 0]


def test_head_far_below_the_largest_logit(device: str, numbers: dict[str, Any]) -> None:
    """Log-probabilities down to -5,000 are finite and accurate."""
    torch.manual_seed(0)
    weight = torch.randn(1000, 64, device=device)
    targets = torch.arange(8, device=device)
    hidden = -weight[targets] * (5000 / weight[targets].square().sum(-1, keepdim=True))
    case = {"hidden": hidden, "weight": weight, "targets": targets, "upstream": torch.ones(8, device=device)}
    truth = outcome(plain_head, case, torch.float64)
    ours = outcome(linear_logps_and_entropy, case, torch.float32)
    numbers["lowest_logp"] = float(truth[0].min())
    numbers["logp_error"] = relative(ours[0], truth[0])
    assert numbers["lowest_logp"] < -5000 and numbers["logp_error"] < 1e-5
    assert relative(ours[2], truth[2]) < 1e-3
