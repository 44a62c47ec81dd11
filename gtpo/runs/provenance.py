"""Where a result comes from: versions, git revision, hardware, and hashes of rows and rewards."""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gtpo.arguments import Settings, Values

PACKAGES = [
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "unsloth",
    "vllm",
    "bitsandbytes",
    "wandb",
]


def provenance() -> Values:
    """Versions, git revision and hardware."""
    import torch

    versions = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        for found in importlib.metadata.distributions(name=name):
            versions[name] = versions[name] or found.version
    return {
        "python": platform.python_version(),
        "packages": versions,
        "git_revision": git_revision(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
    }


def git_revision() -> str | None:
    """The commit of this checkout, with ``-dirty`` where files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.check_output(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def made_from(settings: Settings, rows: Iterable[Any], held_out: Iterable[Any] | None) -> Values:
    """A hash of the training rows, of the held-out rows, and of each file of a user's rewards and objective."""
    found = {"rows": _hash_of_rows(rows)}
    if held_out is not None:
        found["held_out"] = _hash_of_rows(held_out)
    names = [*settings.reward.reward, settings.reward.objective or ""] if settings.reward else []
    for name in names:
        path = Path(name.rpartition(":")[0])
        if path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def _hash_of_rows(rows: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]
