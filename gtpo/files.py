"""Atomic writes, YAML settings, and where the presets are."""

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from gtpo.errors import UsageError

MAX_YAML_NODES = 10_000  # configs/experiments.yaml has a few hundred
CONFIGS = Path(__file__).parent.parent / "configs"  # part of the repository, not of the installed package


def write_atomically(path: Path, text: str) -> None:
    """Write a file completely or not at all: to a temporary name, then rename."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text)
    unfinished.replace(path)


def apply_umask(directory: Path) -> None:
    """Give the files below a directory the permissions of new files; safetensors writes them for their owner only."""
    umask = os.umask(0o077)  # it can only be read by setting it
    os.umask(umask)
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)


def replace_directory(unfinished: Path, directory: Path) -> None:
    """Rename a complete directory over an existing one, which is kept as ``.old`` until the rename is done."""
    apply_umask(unfinished)
    old = directory.with_name(f"{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        os.rename(directory, old)
    os.rename(unfinished, directory)
    shutil.rmtree(old, ignore_errors=True)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file of flat settings.

    Raises:
        UsageError: If the file is missing, is not valid YAML, is not a mapping, has a key twice, or grows beyond
            ``MAX_YAML_NODES`` when its aliases are expanded.
    """
    try:
        with open(path, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file)
            node = loader.get_single_node()
            if node is not None:
                _check_node(path, node, {})
            settings = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from error
    except UsageError:
        raise
    except Exception as error:  # PyYAML also raises ValueError, KeyError, RecursionError and others
        raise UsageError(f"{path} is not valid YAML: {str(error) or type(error).__name__}.") from error
    if not isinstance(settings, dict):
        kind = {list: "a list", type(None): "no settings"}.get(type(settings), "a single value")
        raise UsageError(f"{path} contains {kind}: expected `key: value` lines, each key a flag without its dashes.")
    return settings


def _check_node(path: str | Path, node: yaml.Node, sizes: dict[int, float]) -> float:
    """The number of values in a YAML node with its aliases expanded; each node is visited once."""
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = float("inf")  # reached again below itself: an alias that contains itself
    children = list(node.value) if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            children += [key, value]
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                raise UsageError(
                    f"{path}, line {line}: {key.value!r} is also set in line {seen[key.value]}: remove one of them."
                )
            seen[key.value] = line
    size = 1 + sum(_check_node(path, child, sizes) for child in children)
    if size > MAX_YAML_NODES:
        raise UsageError(
            f"{path}, line {node.start_mark.line + 1} has more than {MAX_YAML_NODES} values once its aliases (*name) "
            "are expanded: write the few values that are needed."
        )
    sizes[id(node)] = size
    return size
