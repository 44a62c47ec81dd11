"""Where a result comes from: versions, git revision, hardware."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ["torch", "transformers", "trl", "peft", "accelerate", "datasets"]
PACKAGES += ["unsloth", "vllm", "bitsandbytes", "wandb"]


def provenance() -> dict[str, Any]:
    """Versions, git revision and hardware."""
    import torch

    found = {name: list(importlib.metadata.distributions(name=name)) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        "packages": {name: versions[0].version if versions else None for name, versions in found.items()},
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
