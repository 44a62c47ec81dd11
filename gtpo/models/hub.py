"""The tiny base in this package, the Hub, and the files of a model, which may be a stranger's."""

from pathlib import Path
from typing import Any

from gtpo.errors import UsageError, first_line

MOST_LAYERS = 1000  # of a model, and of experts in a layer
# Part of the package; named by the hash of its recipe.
TINY_BASE = Path(__file__).parent / "tiny_base" / "base-97e8bdbf"


def hub_is_reachable() -> bool:
    """One request; huggingface_hub would retry for a minute, with two lines on the screen for each attempt."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # of httpx, or of httpx2 from huggingface_hub 2 on; OSError: HF_HUB_OFFLINE is set
        return False
    return True


def check_upload() -> None:
    """UsageError if the token of this machine cannot upload, as ``--push_to_hub`` does after the training."""
    from huggingface_hub import whoami

    try:
        whoami()
    except Exception as error:  # no network, no token, or one that is not valid
        raise UsageError(
            f"--push_to_hub: {first_line(error)}: `hf auth login`, or remove it and `hf upload` the result."
        ) from error


def check_model_files(directory: Path) -> None:
    """Refuse weights of a model or an adapter that are pickled, because unpickling runs their code, and named pipes."""
    from gtpo.files import check_regular  # it imports yaml, which preflight may lack

    for path in directory.iterdir():
        if not path.is_dir():
            check_regular(path)
    pickled = sorted(directory.glob("*model*.bin"))
    if pickled and not any(directory.glob("*.safetensors")):
        raise UsageError(f"{pickled[0]} is a pickle, which can run code when it is loaded: expected safetensors.")


def load_config(model: str, **source: Any) -> Any:
    """The config of a model; UsageError for more layers or experts than MOST_LAYERS, which take hours to build."""
    from transformers import AutoConfig, PretrainedConfig

    values, _ = PretrainedConfig.get_config_dict(model, **source)
    for part in (values, *values.values()):  # text_config of a model that also reads images
        for name, count in part.items() if isinstance(part, dict) else ():
            if name.endswith(("layer", "layers", "experts")) and isinstance(count, int | float) and count > MOST_LAYERS:
                raise UsageError(f"config.json of {model} has {name} {count:,}: expected at most {MOST_LAYERS:,}.")
    return AutoConfig.from_pretrained(model, trust_remote_code=False, **source)
