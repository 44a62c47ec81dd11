"""The Hugging Face Hub: whether it can be reached, access to a model, its cached files and the size of its weights."""

import json
import logging
import shutil
from pathlib import Path

from gtpo.arguments import MODEL_ALIASES
from gtpo.errors import UsageError, nearest

logger = logging.getLogger(__name__)

GB = 10**9


def hub_is_reachable() -> bool:
    """One request; huggingface_hub would retry for a minute, with two lines on the screen for each attempt."""
    import httpx
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except (httpx.HTTPError, OSError):  # OSError: HF_HUB_OFFLINE is set
        return False
    return True


def is_cached(model: str, copy: bool = False) -> bool:
    """Whether the cache has all weights of a Hub model.

    Args:
        model: Hub id.
        copy: A 4-bit copy of Unsloth counts too.
    """
    owner, name = model.split("/")
    folders = [f"models--{owner}--{name}", *([f"models--unsloth--*{name}*bnb-4bit"] if copy else [])]
    return any(_is_complete(snapshot) for folder in folders for snapshot in _cache().glob(f"{folder}/snapshots/*"))


def check_access(model: str, copy: bool = False) -> str | None:
    """Whether the token of this machine may read a Hub model; a server error passes, because loading reports it.

    Args:
        model: Hub id.
        copy: Unsloth trains on its own copy, which is not gated.
    """
    from huggingface_hub import auth_check
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        auth_check(model)
    except GatedRepoError:
        why = " (training uses Unsloth's copy; evaluate.py and --merge load the original)" if copy else ""
        return (
            f"{model} is gated and the Hub token of this machine has no access{why}: accept its license on "
            f"https://huggingface.co/{model}, then `hf auth login` or `export HF_TOKEN=...`."
        )
    except RepositoryNotFoundError:
        return f"the Hub has no model {model}, or it is private: correct --model, or `hf auth login`."
    except HfHubHTTPError as error:
        logger.debug("the access to %s was not checked: %s", model, error)
    return None


def check_disk(model: str, size: float) -> str | None:
    """Whether the weights fit on the disk of the Hub's cache.

    Args:
        model: Hub id.
        size: Bytes of its weights.
    """
    cache = _cache()
    disk = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free = shutil.disk_usage(disk).free
    if size <= free:
        return None
    return (
        f"the weights of {model} take {size / GB:.1f} GB and {cache} has {free / GB:.1f} GB left: free some space, or "
        "`export HF_HOME=DIRECTORY` on a larger disk."
    )


def not_reachable(model: str) -> str:
    """The sentence for a model that is neither cached nor reachable."""
    return (
        f"{model} is not in the cache of the Hub ({_cache()}) and the Hub cannot be reached: check the network and "
        f"HF_HUB_OFFLINE, or `hf download {model}` on another machine and copy its cache."
    )


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _is_complete(snapshot: Path) -> bool:
    index = snapshot / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    return all((snapshot / name).is_file() for name in files)


def check_model_name(name: str) -> None:
    """Refuse what is neither an alias nor a directory, and cannot be a Hub id.

    Raises:
        UsageError: With the nearest alias.
    """
    target = MODEL_ALIASES.get(name, name)
    if target != "tiny" and not is_hub_id(target) and not Path(target).is_dir():
        what = "is not a directory" if "/" in target else f"is unknown{nearest(name, MODEL_ALIASES)}"
        raise UsageError(
            f"--model {name!r} {what}: pick tiny, smol, llama, qwen, a Hub id (owner/name) or a directory with a "
            "config.json."
        )


def is_hub_id(model: str) -> bool:
    """Whether a model is named as on the Hub, ``owner/name``, and is not a local path."""
    return model.count("/") == 1 and not model.startswith((".", "/", "~")) and not Path(model).is_dir()
