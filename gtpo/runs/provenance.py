"""Where a result comes from: versions, git revision, hardware, and hashes of rows, prompts and rewards."""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from gtpo.arguments import Settings, Values
from gtpo.files import fingerprint
from gtpo.processes import launched_with, world_size

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
OURS = ["gtpo", "gtpo_loss", "rewards"]
KEY_BYTES = 8
TRAINER = ["configs", "gtpo/forward", "gtpo/grading", "gtpo/training", "gtpo_loss.py", "rewards.py"]


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
        "world_size": world_size(),
        "launch": launched_with(os.environ),
    }


def git_revision() -> str | None:
    """The commit of this checkout, with ``-dirty`` where files differ from it; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.check_output(command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def trainer_of(revision: str | None) -> str | None:
    """A hash of the files of a commit that decide what a step computes; None if git has no such commit."""
    root = Path(__file__).parents[2]
    listed = subprocess.run(["git", "ls-tree", str(revision), *TRAINER], cwd=root, capture_output=True).stdout
    return hashlib.sha256(listed).hexdigest()[:16] if listed else None


def why_unlike(first: Sequence[Any] | None, second: Sequence[Any] | None) -> str:
    """Why two runs are no pair, by their origins; empty for one trainer, one set of versions, one kind of machine."""
    if first == second:
        return ""
    if not (first and second):
        return "of an unknown origin"
    if first[1:3] != second[1:3]:
        return f"of another machine, {first[1]}"
    one, other = [origin[3] if origin[3:] else trainer_of(origin[0]) for origin in (first, second)]
    if not one or one != other:
        return f"of another trainer, revision {first[0]}"
    if all(map(any, (first[4:], second[4:]))) and first[4] != second[4]:  # earlier origins have no versions
        return f"of other versions, {first[4]}"
    return ""


def hashes_of(words: Iterable[str]) -> dict[str, str]:
    """A hash of each file of code or data, and each directory of a model, among the words of a command line."""
    found = {}
    for word in words:
        name = word.rpartition(":")[0] if ".py:" in word else word
        if os.path.isfile(name):  # a word may be too long for Path
            found[name] = hashlib.sha256(Path(name).read_bytes()).hexdigest()
        elif os.path.isfile(f"{name}/config.json"):
            found[name] = str(_fingerprint(name))
    return found


@cache  # of gigabytes, for each run
def _fingerprint(directory: str) -> str | None:
    return fingerprint(directory)


def made_from(settings: Settings, rows: Iterable[Any], held_out: Iterable[Any] | None) -> Values:
    """A hash of the training rows, of the held-out rows, and of each file of a user's rewards and objective."""
    found = {"rows": _hash_of_rows(rows)}
    if held_out is not None:
        found["held_out"] = _hash_of_rows(held_out)
    names = [*settings.reward.reward, settings.reward.objective or ""] if settings.reward else []
    for name in names:
        found |= code_of(name)
    return found


def code_of(name: str) -> dict[str, str]:
    """A hash of the file of ``file.py:function`` or ``module:function``, and by path of each module that it imports.

    These are modules in the directory of the file or the working directory, and those that they import; not ours.
    Empty for a name of ours.
    """
    module = name.rpartition(":")[0]
    file = Path(module.removesuffix(".py") + ".py")
    if not file.is_file() and module in sys.modules:
        file = Path(sys.modules[module].__file__ or "")
    if not file.is_file():
        return {}
    directory = str(file.resolve().parent)
    finder = ModuleFinder([directory, os.getcwd()], excludes=OURS)
    finder.run_script(str(file))  # it reads the imports and runs nothing
    found = {}
    for imported, code in finder.modules.items():
        path = getattr(code, "__file__", None)
        if path:
            key = name if imported == "__main__" else os.path.relpath(path, directory)
            found[key] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    return found


@cache
def hash_of_code(directory: Path) -> str:
    """A hash of the code and tables in a directory: they may differ from the commit that ``git_revision`` names."""
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.py"), *directory.glob("*.yaml")]):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def prompt_keys(prompts: Iterable[Any]) -> list[bytes]:
    """8 bytes of a hash of each prompt, text or conversation; system prompt and white space do not count."""
    keys = []
    for prompt in prompts:
        turns = [{"content": prompt}] if isinstance(prompt, str) else prompt
        texts = [str(turn.get("content")) for turn in turns if turn.get("role") != "system"]
        words = " ".join(texts).split()
        keys.append(hashlib.sha256(" ".join(words).encode()).digest()[:KEY_BYTES])
    return keys


def _hash_of_rows(rows: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]
