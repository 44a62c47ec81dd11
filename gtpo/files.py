"""Atomic writes, regular files to read, fingerprints of weights, YAML settings, where presets and runs are."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import yaml

try:
    from yaml import CSafeLoader as SafeLoader  # of libyaml: a tenth of the time
except ImportError:
    from yaml import SafeLoader  # type: ignore[assignment]

from gtpo.errors import UsageError

CONFIGS = Path(__file__).parent.parent / "configs"  # part of the repository, not of the installed package
OUTPUTS = Path("outputs")


def write_atomically(path: Path, content: str | Callable[[Path], object]) -> None:
    """Write a file completely or not at all: to a temporary name, then rename."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.unlink(missing_ok=True)  # never through a link
    if isinstance(content, str):
        unfinished.write_text(content, encoding="utf-8")
    else:
        content(unfinished)
    unfinished.replace(path)


def open_regular(path: Path, mode: str = "a", **options: Any) -> IO[Any]:
    """Open a file of a run or of results, to append to or to truncate; a link in a stranger's run is refused."""
    check_regular(path)
    if path.is_symlink() or path.parent.is_symlink():
        raise UsageError(f"{path} is a link, and its target would be changed: replace it with its target.")
    return open(path, mode, **options)


def read_regular(path: str | Path) -> bytes:
    """The content of a file that may be a stranger's: of a run, of data, or of a model."""
    check_regular(path)
    return Path(path).read_bytes()


def check_regular(path: str | Path) -> None:
    """Refuse a named pipe or a device, whose reader waits without end, and a directory; a link counts as its target."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file, such as a named pipe or a directory: replace it with a file.")


def remove(path: Path) -> None:
    """Delete a directory or a file, if it exists; of a link the link, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
    remove(old)
    if directory.exists():
        directory.rename(old)
    unfinished.rename(directory)
    remove(old)


def fingerprint(directory: str | Path) -> str | None:
    """A hash of the weights, tokenizer and chat template in a directory; None if it is not a local directory.

    Evaluations store it, and an adapter that of its base (``base_fingerprint`` in adapter_config.json).
    """
    folder = Path(directory)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    patterns = ("*.safetensors", "*.bin", "*config.json", "tokenizer.json", "chat_template*")
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()[:16]


class _StrictLoader(SafeLoader):
    """A SafeLoader that refuses a duplicate key, of which YAML takes the last one, and 010, which it reads as 8."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise UsageError(f"{node.start_mark.name}: duplicate key {key!r}: remove one of them.")
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """YAML 1.1 reads 010, 0x10 and 0b10 in other bases, 1_0 without the underscore, and 1:30 in base 60."""
        is_float = node.tag.endswith("float")
        number = self.construct_yaml_float(node) if is_float else self.construct_yaml_int(node)
        if not re.fullmatch(r"[-+]?(0|[1-9]\d*|(\d+\.\d*|\.\d+)(e[-+]?\d+)?|\.(inf|nan))", node.value.lower()):
            place = f"{node.start_mark.name}, line {node.start_mark.line + 1}"
            raise UsageError(f"{place}: YAML reads {node.value} as {number}: write that, or a text in quotes.")
        return number


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _StrictLoader.add_constructor(_tag, _StrictLoader.construct_number)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file of flat settings, without duplicate keys."""
    check_regular(path)
    with open(path, encoding="utf-8") as file:
        settings = yaml.load(file, _StrictLoader)
    if not isinstance(settings, dict):
        raise UsageError(f"{path} contains no settings: expected `key: value` lines.")
    return settings
