"""The completion file of one model on one benchmark: JSONL, appended to while completions are sampled, resumable.

The first line has the settings, every other line one completion {id, sample, completion, tokens, finished}, which
(id, sample) identifies. A file is only continued with the settings that it was created with, or with more problems or
another k: these are appended as another line of settings, the last of which counts.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from gtpo.errors import UsageError
from gtpo.evaluation.records import CompletionSettings, Entry, Head, Job, Problem, Row
from gtpo.files import fingerprint, open_regular
from gtpo.prompts import to_messages
from gtpo.runs.directory import run_around

Rows = list[Row]
Key = tuple[str, int]  # problem id, sample number
Keys = set[Key]
Completions = dict[Key, Row]
Questions = Sequence[Problem]
COLUMNS = {
    "id",
    "sample",
    "completion",
    "tokens",
    "finished",
}
_SETTINGS = b'{"settings": '  # how a line of settings begins


def find_completion_files(directory: Path, benchmarks: Collection[str] = ()) -> list[Path]:
    """The completion files of some benchmarks, or of all, in an output directory, ``LABEL/BENCHMARK.jsonl``, sorted."""
    paths = filter(has_completions, sorted(directory.glob("*/*.jsonl")))
    if benchmarks:
        return [path for path in paths if path.stem in benchmarks]
    return [path for path in paths if path.read_bytes().startswith(_SETTINGS)]


def has_completions(path: Path) -> bool:
    """Whether a file has more than the line of settings; an evaluation may have been killed before."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline().endswith(b"\n") and file.readline().endswith(b"\n")


def scores_path(completions: Path) -> Path:
    return completions.with_suffix(".json")


@dataclass
class CompletionFile:
    """A completion file that is open for appending, with its settings and all of its completions."""

    file: IO[bytes]
    head: Head
    completions: Completions
    has_head: bool

    def append(self, rows: Sequence[Row]) -> None:
        """Write completions, which are kept if the process is killed."""
        if rows:
            self.write_settings()
        self._write(rows)
        self.completions |= by_key(rows)

    def write_settings(self) -> None:
        """Write the settings if the file has others: of more or fewer problems or samples, or other data."""
        if not self.has_head:
            self._write([self.head.write()])
            self.has_head = True

    def _write(self, lines: Sequence[Row]) -> None:
        for line in lines:
            self.file.write(json.dumps(line).encode() + b"\n")
        self.file.flush()


@contextmanager
def open_completions(
    path: Path,
    head: Head,
    problems: Questions = (),
    overwrite: bool = False,
) -> Iterator[CompletionFile]:
    """Open a completion file for appending, by one process; ``overwrite`` discards what is in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UsageError(f"{path} is in use by another evaluation: wait for it, or set --output_dir.") from error
    try:
        with open_regular(path, "ab") as file:
            rows: Rows = []
            has_head = False
            if has_completions(path) and not overwrite:
                check_settings(path, head.settings, problems)
                stored, rows = read_completions(path)
                has_head = stored.settings == head.settings and stored.origin.data == head.origin.data
            content = path.read_bytes() if rows else b""
            file.truncate(content.rfind(b"\n") + 1)  # without a line that was only partly written
            yield CompletionFile(file, head, by_key(rows), has_head)
    finally:
        Path(lock.lock_file).unlink()  # while it is locked: filelock refuses a lock that has been unlinked
        lock.release()


def check_settings(path: Path, settings: CompletionSettings, problems: Questions = ()) -> None:
    """Refuse to continue a file, if there is one, whose completions were created with other settings.

    It may have only the first of the ``problems``, and another k: of a larger one the first samples count.
    """
    if not has_completions(path):
        return
    stored = read_head(path).settings
    if problems_hash(problems[: stored.problems]) == stored.problems_hash:
        sampling = replace(stored.sampling, k=settings.sampling.k)
        stored = replace(stored, problems=settings.problems, problems_hash=settings.problems_hash, sampling=sampling)
    before, now = stored.write(), settings.write()
    changed = []
    for name in now | before:
        if before.get(name) != now.get(name):
            changed.append(f"{name} was {before.get(name)!r:.80}, is {now.get(name)!r:.80}")
    if changed:
        raise UsageError(
            f"{path} was created with other settings ({', '.join(changed)}): set --output_dir, or --overwrite."
        )


def read_head(path: Path) -> Head:
    """The last line of settings of a file."""
    with path.open("rb") as file:
        lines = [line for line in file if line.startswith(_SETTINGS)]
    return Head.read(json.loads(lines[-1]))


def read_completions(path: Path) -> tuple[Head, Rows]:
    """The settings and the completions of a file, without a partly written last line."""
    head = read_head(path)
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        if line.startswith(_SETTINGS):
            continue
        row: Row = {}
        with suppress(ValueError, TypeError):
            row = {**json.loads(line)}
        if set(row) != COLUMNS:
            raise UsageError(f"{path}, line {number} is not a completion: delete the line, or add --overwrite.")
        rows.append(row)
    return head, rows


def completions_of(job: Job) -> Completions:
    """The stored completions of a job; UsageError if some are missing."""
    completions = by_key(read_completions(job.path)[1])
    keys = keys_of(job.problems.rows, job.head.settings.sampling.k)
    if missing := keys - completions.keys():
        found = f"{len(keys) - len(missing)} of {len(keys)}"
        raise UsageError(f"{job.path} has {found} completions: resume it without --regrade.")
    return completions


def by_key(rows: Iterable[Row]) -> Completions:
    """Completions by problem id and sample number; of two with one key the later one."""
    return {key_of(row): row for row in rows}


def key_of(row: Row) -> Key:
    return row["id"], row["sample"]


def keys_of(problems: Iterable[Problem], k: int) -> Keys:
    return {(problem.id, sample) for problem in problems for sample in range(k)}


def problems_hash(problems: Questions) -> str:
    """A hash of the prompts; it does not depend on the gold answers."""
    asked = [[problem.id, to_messages(problem.question)] for problem in problems]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def sampled_as(settings: CompletionSettings, words: Sequence[str]) -> bool:
    """Whether completions were sampled with the settings on a command line, such as ``--k 64``; False if not known."""
    if not settings.are_known:
        return False
    stored = settings.write()
    return all(str(stored.get(flag[2:], value)) == value for flag, value in pairwise(words) if flag.startswith("--"))


def weights_have_changed(sampled: Head | Entry) -> bool:
    """Whether completions, or their scores, are of weights that are no longer there: the adapter was trained again.

    Or the base model was replaced, or the run was resumed and has not ended again. A directory that is gone, and a
    model on the Hub, count as unchanged.
    """
    settings, origin = sampled.settings, sampled.origin
    for stored, place in ((settings.model, origin.model), (settings.adapter, origin.adapter)):
        if not (stored and place):
            continue
        directory = Path(place)
        if directory.is_dir():
            written = max(path.stat().st_ctime_ns for path in directory.iterdir())
            if _fingerprint_at(directory, written) != stored:
                return True
        elif run_around(directory).earlier_weights():
            return True
    return False


@cache
def _fingerprint_at(directory: Path, written: int) -> str | None:
    """The fingerprint of a directory whose newest file was ``written`` at this time, in nanoseconds."""
    return fingerprint(directory)
