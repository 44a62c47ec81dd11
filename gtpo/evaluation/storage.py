import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from gtpo.errors import UsageError
from gtpo.evaluation.sampling import Key


class CompletionFile:
    """The JSONL file of one benchmark and one model, open for appending by one process.

    Attributes:
        done: Keys of the completions that the file holds.
    """

    def __init__(self, path: Path, settings: Row, about: Row, overwrite: bool = False) -> None:
        self.path = path
        self.settings = settings
        self.about = about
        self.overwrite = overwrite
        self.done: set[Key] = set()
        self._file: BinaryIO

    def __enter__(self) -> "CompletionFile":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror}; name another --output_dir.") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise UsageError(
                f"{self.path} is being written by another evaluation: wait for it, or give --output_dir."
            ) from error
        try:
            if not self.overwrite:
                check_settings(self.path, self.settings)
            whole = 0 if self.overwrite else self.path.read_bytes().rfind(b"\n") + 1
            self._file.truncate(whole)  # of a line that was being written when the process died
            if whole:
                self.done = {(row["id"], row["sample"]) for row in read_completions(self.path)[1]}
            else:
                self._write([{"settings": self.settings, "about": self.about}])
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, rows: Sequence[Row]) -> None:
        """Write completions and hand them to the operating system: they outlive the process.

        Raises:
            UsageError: If they cannot be written.
        """
        self._write(rows)
        self.done.update((row["id"], row["sample"]) for row in rows)

    def _write(self, rows: Sequence[Row]) -> None:
        data = memoryview(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise UsageError(
                f"cannot write {self.path}: {os.strerror(error.errno or 0)}. What it holds stays good: make room and "
                "run the same command again."
            ) from error


def check_settings(path: Path, settings: Row) -> None:
    """Refuse to continue a file that was made with other settings.

    Raises:
        UsageError: With the settings that differ, or if the file is no file of completions.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        first = file.readline()
    if not first.endswith(b"\n"):
        return  # killed before the first line was whole: nothing to keep
    stored = _parse_line(path, 1, first).get("settings")
    if not isinstance(stored, dict):
        raise UsageError(f"{path} is no file of completions (its first line holds no settings): move it away.")
    changed = [name for name in {**settings, **stored} if stored.get(name) != settings.get(name)]
    if changed:
        changed = [name for name in changed if not name.endswith("_hash")] or changed
        differences = ", ".join(f"{name} was {stored.get(name)!r}, is {settings.get(name)!r}" for name in changed)
        raise UsageError(
            f"{path} was made with other settings ({differences}): name another --output_dir, or --overwrite it."
        )


def read_completions(path: Path) -> tuple[Row, list[Row]]:
    """The first line and the completions of a file; a half-written last line is left out.

    Raises:
        UsageError: If another line is broken or a completion is there twice.
    """
    content = path.read_bytes() if path.is_file() else b""
    lines = content.split(b"\n")[:-1]  # what follows the last newline is half a line, or nothing
    if not lines:
        raise UsageError(f"{path} holds no completions: run the evaluation without --regrade.")
    head, *rows = [_parse_line(path, number, line) for number, line in enumerate(lines, start=1)]
    keys = {(row.get("id"), row.get("sample")) for row in rows}
    if len(keys) != len(rows):
        raise UsageError(
            f"{path} holds {len(rows) - len(keys)} completions twice: restore it, or start again with --overwrite."
        )
    return head, rows


def _parse_line(path: Path, number: int, line: bytes) -> Row:
    try:
        parsed = json.loads(line)
    except ValueError as error:
        parsed = error
    if not isinstance(parsed, dict):
        raise UsageError(
            f"{path}, line {number} is broken: delete the line (it is drawn again), or start with --overwrite."
        )
    return parsed


def fingerprint(folder: str | Path) -> str | None:
    """A hash that changes when weights, tokenizer or chat template in ``folder`` do; None if it is no local folder.

    Of each file 256 blocks of 64 KiB, evenly spread, are read: a small one whole, a large one in well under a second.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    patterns = ("*.safetensors", "*.bin", "*config.json", "tokenizer.json", "chat_template*")
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for block in range(256):
                file.seek(block * max(65536, size // 256))
                digest.update(file.read(65536))
    return digest.hexdigest()[:16]
