"""The completion file of one model on one benchmark: JSONL, appended to while completions are sampled, resumable.

The first line has the settings, every other line one completion {id, sample, completion, tokens, finished}. A
completion is identified by (id, sample). A file is only continued with the settings that it was created with, or with
more problems or a larger k: then its completions are kept. One without completions is created again. The shards of an
evaluation are files of the same kind next to it.
"""

import fcntl
import glob
import hashlib
import io
import json
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Self

from gtpo.arguments import BENCHMARK_TITLES
from gtpo.data.load import Problem
from gtpo.errors import UsageError
from gtpo.evaluation.records import Head
from gtpo.files import open_own, write_atomically
from gtpo.prompts import to_messages

Row = dict[str, Any]
Key = tuple[str, int]  # problem id, sample number
COLUMNS: dict[str, type] = {"id": str, "sample": int, "completion": str, "tokens": int, "finished": bool}


def find_completion_files(directory: Path, benchmarks: Collection[str] | None = None) -> list[Path]:
    """The completion files of some benchmarks, or of all, in an output directory, ``LABEL/BENCHMARK.jsonl``, sorted.

    A damaged file of a benchmark of ours is one of them, so that it is reported.
    """
    paths = filter(has_completions, sorted(directory.glob("*/*.jsonl")))
    if benchmarks is not None:
        return [path for path in paths if path.stem in benchmarks]
    return [path for path in paths if path.stem in BENCHMARK_TITLES or path.read_bytes().startswith(b'{"settings": ')]


def has_completions(path: Path) -> bool:
    """Whether a file has more than the line of settings; an evaluation may have been killed before."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline().endswith(b"\n") and file.readline().endswith(b"\n")


def scores_path(completions: Path) -> Path:
    return completions.with_suffix(".json")


def shard_path(completions: Path, shard: str) -> Path:
    """The file of a shard, ``BENCHMARK.jsonl.shard-1-of-4``, until :meth:`CompletionFile.merge` deletes it."""
    return completions.with_name(f"{completions.name}.shard-{shard.replace('/', '-of-')}")


def shard_paths(completions: Path) -> list[Path]:
    return sorted(completions.parent.glob(f"{glob.escape(completions.name)}.shard-*[0-9]"))


@dataclass
class CompletionFile:
    """A completion file, open for appending by one process. Without completions it is deleted when it is closed.

    Attributes:
        head: The first line of a new file.
        overwrite: Discard the completions in the file.
        problems: With them the file is extended if it has only the first ones.
        done: Keys of the completions in the file.
    """

    path: Path
    head: Head
    overwrite: bool = False
    problems: Sequence[Problem] = ()
    done: set[Key] = field(default_factory=set, init=False)
    _file: IO[bytes] = field(init=False)

    def __enter__(self) -> Self:
        self._open()
        try:
            if self.overwrite or not has_completions(self.path):
                self._file.truncate(0)
            else:
                self.done = stored_keys(self.path, self.head.settings, self.problems)
                self._file.truncate(self.path.read_bytes().rfind(b"\n") + 1)  # a line that was only partly written
                self._extend(read_head(self.path))
        except BaseException:
            self._file.close()
            raise
        return self

    def _open(self) -> None:
        """Open the file and lock it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_own(self.path, "ab", buffering=0)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror}; name another --output_dir.") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path)):
                raise OSError  # the process that had the lock deleted the file, and another has created it again
        except OSError as error:
            self._file.close()
            raise UsageError(
                f"{self.path} is in use by another evaluation: wait for it, or name another --output_dir."
            ) from error

    def _extend(self, stored: Head) -> None:
        """Write the settings of this evaluation into the first line: it may have more problems or a larger k."""
        if stored.settings == self.head.settings:
            return
        lines = self.path.read_bytes().split(b"\n", 1)[1]
        first = json.dumps(replace(stored, settings=self.head.settings).write())
        write_atomically(self.path, f"{first}\n{lines.decode()}")
        self._file.close()
        self._open()  # the new file; another process may have locked it first

    def __exit__(self, *error: object) -> None:
        if not has_completions(self.path):
            self.path.unlink(missing_ok=True)  # while it is locked
            with suppress(OSError):  # it has other files, or another shard has deleted it
                self.path.parent.rmdir()
        self._file.close()

    def append(self, rows: Sequence[Row]) -> None:
        """Write completions without buffering: they are kept if the process is killed.

        Raises:
            OSError: If they cannot be written.
        """
        head = [] if self.done or not rows else [self.head.write()]
        data = memoryview(b"".join(json.dumps(row).encode() + b"\n" for row in [*head, *rows]))
        while data:
            data = data[self._file.write(data) :]
        self.done.update((row["id"], row["sample"]) for row in rows)

    def merge(self, path: Path) -> None:
        """Append the completions of a shard that are not in this file, and delete the shard.

        Raises:
            UsageError: If it has other settings or is in use.
        """
        with CompletionFile(path, self.head, self.overwrite, self.problems):
            if has_completions(path):
                stored, rows = read_completions(path)
                if not self.done:
                    self.head = replace(self.head, origin=stored.origin)  # what sampled them
                self.append([row for row in rows if (row["id"], row["sample"]) not in self.done])
                path.unlink()


def stored_keys(path: Path, settings: Row, problems: Sequence[Problem]) -> set[Key]:
    """Keys of the completions of a file, if there is one, that :func:`check_settings` accepts."""
    if not has_completions(path):
        return set()
    check_settings(path, settings, problems)
    return {(row["id"], row["sample"]) for row in read_completions(path)[1]}


def check_settings(path: Path, settings: Row, problems: Sequence[Problem] = ()) -> None:
    """Refuse to continue a file whose completions were created with other settings.

    There may be no file. One with only the first of the ``problems``, or with a smaller k, can be extended.

    Raises:
        UsageError: With the settings that differ, or if the file is not a completion file.
    """
    if not has_completions(path):
        return
    stored = read_head(path).settings
    count, k = stored.get("problems"), stored.get("k")
    has_size = isinstance(count, int) and isinstance(k, int) and k <= settings.get("k", 0)
    if has_size and problems_hash(problems[:count]) == stored.get("problems_hash"):
        stored |= {name: settings[name] for name in ("problems", "problems_hash", "k")}
    changed = [name for name in {**settings, **stored} if stored.get(name) != settings.get(name)]
    if changed:
        changed = [name for name in changed if not name.endswith("_hash")] or changed
        differences = ", ".join(f"{n} was {stored.get(n)!r:.80}, is {settings.get(n)!r:.80}" for n in changed)
        raise UsageError(
            f"{path} was created with other settings ({differences}): name another --output_dir, or add --overwrite."
        )


def read_head(path: Path) -> Head:
    """The first line of a file.

    Raises:
        UsageError: If it is not that of a completion file.
    """
    with path.open("rb") as file:
        line = file.readline()
    try:
        return Head.read(json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} is not a completion file (line 1: {error!r}): move it elsewhere.") from error


def read_completions(path: Path) -> tuple[Head, list[Row]]:
    """The first line and the completions of a file, without a partly written last line.

    Raises:
        UsageError: If there is no such file, or another line is broken.
    """
    if not path.is_file():
        raise UsageError(f"{path} does not exist: run the evaluation without --regrade.")
    rows = []
    lines = path.read_bytes().split(b"\n")[1:-1]  # after the last newline: a partly written line, or nothing
    for number, line in enumerate(lines, start=2):
        try:
            row = json.loads(line)
            is_valid = {name: type(value) for name, value in row.items()} == COLUMNS
        except (ValueError, AttributeError, RecursionError):
            is_valid = False
        if not is_valid:
            columns = ", ".join(f"{name} ({kind.__name__})" for name, kind in COLUMNS.items())
            raise UsageError(
                f"{path}, line {number} is not a completion with exactly the keys {columns}: delete the line (its "
                "completion is sampled again), or start again with --overwrite."
            )
        rows.append(row)
    return read_head(path), rows


def keys_of(problems: Iterable[Problem], k: int) -> set[Key]:
    return {(problem.id, sample) for problem in problems for sample in range(k)}


# Hashes that identify problems and models in the settings


def problems_hash(problems: Sequence[Problem]) -> str:
    """A hash of the prompts; it does not depend on the gold answers."""
    asked = [[problem.id, to_messages(problem.question)] for problem in problems]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def fingerprint(directory: str | Path) -> str | None:
    """A hash of the weights, tokenizer and chat template in a directory; None if it is not a local directory.

    256 evenly spaced blocks of 64 KiB are read from each file: small files completely, large ones in under a second.
    The order of the lists in ``adapter_config.json`` does not matter: PEFT writes sets in the order of the hash seed.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return None
    digest = hashlib.sha256()
    patterns = ("*.safetensors", "*.bin", "*config.json", "tokenizer.json", "chat_template*")
    for path in sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with _opened(path) as file:
            for block in range(256):
                file.seek(block * max(65536, size // 256))
                digest.update(file.read(65536))
    return digest.hexdigest()[:16]


def _opened(path: Path) -> IO[bytes]:
    """A file, with sorted lists if it has the settings of an adapter; loading refuses damaged ones."""
    try:
        items = json.loads(path.read_bytes()).items() if path.name == "adapter_config.json" else None
    except (ValueError, AttributeError, RecursionError):
        items = None
    if items is None:
        return path.open("rb")
    values = {name: sorted(value, key=json.dumps) if isinstance(value, list) else value for name, value in items}
    return io.BytesIO(json.dumps(values, indent=2, sort_keys=True).encode())  # as PEFT writes it
