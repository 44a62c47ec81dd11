"""Where a model is: the tiny base in this package, a directory, or the Hub and its cache."""

from pathlib import Path
from typing import Any

from gtpo.arguments import MODEL_ALIASES, hub_name
from gtpo.errors import UsageError, first_line, nearest

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


def check_model_name(name: str) -> None:
    """Refuse what is neither an alias nor a directory with a model, and cannot be a Hub id."""
    from gtpo.runs.directory import find_weights, is_adapter  # it imports more than preflight has

    target = hub_name(name)
    if Path(target).is_dir() and not (Path(target) / "config.json").is_file():
        weights = Path(target) if is_adapter(Path(target)) else find_weights(target, as_model=True)
        raise UsageError(
            f"{name} is not a model, and its weights are in {weights}: name a model with --model, and an adapter with "
            "evaluate.py --runs."
        )
    if target != "tiny" and not is_hub_id(target) and not Path(target).is_dir():
        known = f"{', '.join(MODEL_ALIASES)}, a Hub id (owner/name) or a directory with a config.json"
        raise UsageError(f"--model {name!r} is unknown{nearest(name, MODEL_ALIASES)}: pick {known}.")


def is_hub_id(model: str) -> bool:
    """Whether a model is named as on the Hub, ``owner/name``, and is not a local path."""
    return model.count("/") == 1 and not model.startswith((".", "/", "~")) and not Path(model).is_dir()


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


def is_tiny(model: str | Path) -> bool:
    """Whether a directory is a tiny base, this one or an earlier one."""
    return (Path(model) / "tiny.json").is_file()


def shipped_instead(path: str | Path) -> Path | None:
    """The tiny base here whose path another machine names; None for a path that exists, or is of none."""
    base = TINY_BASE.parent / Path(path).name
    return base if is_tiny(base) and not Path(path).exists() else None
