"""Atomic writes, YAML settings, and where the presets are."""

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from gtpo.errors import UsageError

CONFIGS = Path(__file__).parent.parent / "configs"  # part of the repository, not of the installed package


def write_atomically(path: Path, text: str) -> None:
    """Write a file completely or not at all: to a temporary name, then rename."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text)
    unfinished.replace(path)


def replace_directory(unfinished: Path, directory: Path) -> None:
    """Rename a complete directory over an existing one, which is kept as ``.old`` until the rename is done."""
    old = directory.with_name(f"{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        os.rename(directory, old)
    os.rename(unfinished, directory)
    shutil.rmtree(old, ignore_errors=True)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file of flat settings.

    Raises:
        UsageError: If the file is missing, is not valid YAML or is not a mapping.
    """
    try:
        settings = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from error
    except Exception as error:  # PyYAML also raises ValueError, KeyError, RecursionError and others
        raise UsageError(f"{path} is not valid YAML: {str(error) or type(error).__name__}.") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{path} contains {type(settings).__name__}: expected `key: value` lines, each key a flag.")
    return settings
