"""Files of a local model or adapter, before it is loaded: valid JSON, safetensors only, complete, finite."""

import json
from pathlib import Path
from typing import Any

from gtpo.errors import UsageError


def check_model_files(directory: Path) -> None:
    """Read the JSON files and the weights of a model or adapter.

    Pickled weights are never read: unpickling runs the code in the file.

    Raises:
        UsageError: If there are only pickled weights, a file is incomplete or damaged, or a weight is NaN or infinite.
    """
    for path in sorted(directory.glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not valid JSON ({error}): download or save it again.") from error
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}.") from error
    weights = sorted(directory.glob("*.safetensors"))
    pickled = sorted(path.name for path in directory.glob("*model*.bin"))
    if pickled and not weights:
        raise UsageError(
            f"{directory} has its weights in {pickled[0]}, a pickle, which can run code when it is loaded; expected "
            "safetensors: if you trust its source, load it with Transformers or PEFT and save it with save_pretrained."
        )
    for path in weights:
        _check_weights(path)


def _check_weights(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            broken = next((name for name in file.offset_keys() if not _is_finite(file.get_tensor(name))), None)
    except SafetensorError as error:
        raise UsageError(f"{path} is incomplete or damaged ({error}): download or save it again.") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}.") from error
    if broken is not None:
        raise UsageError(
            f"{path} contains NaN or infinite weights ({broken}): use a checkpoint from before the training diverged."
        )


def _is_finite(tensor: Any) -> bool:
    """Quantized weights (integers, 8-bit floats) count as finite; their scales are float tensors of their own."""
    import torch

    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16) or not tensor.numel():
        return True
    return all(bound.isfinite() for bound in tensor.aminmax())  # NaN is both the minimum and the maximum
