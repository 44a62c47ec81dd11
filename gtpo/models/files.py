"""Files of a local model or adapter, before it is loaded: valid JSON, safetensors only, complete."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from gtpo.errors import UsageError


def check_model_files(directory: Path) -> None:
    """Read the JSON files and the headers of the weights of a model or adapter.

    Pickled weights are never read: unpickling runs the code in the file.

    Raises:
        UsageError: If there are only pickled weights, or a file is incomplete or damaged.
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
        try:
            with safe_open(path, framework="pt"):
                pass  # the header has the size of the file
        except SafetensorError as error:
            raise UsageError(f"{path} is incomplete or damaged ({error}): download or save it again.") from error
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}.") from error
