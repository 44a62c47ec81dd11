"""The completion file: resumed after any interruption, refused with other settings, hashes of models and problems."""

import errno
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.scripts import ROOT, user_environment

from gtpo.arguments import PromptArguments
from gtpo.data.load import load_benchmark
from gtpo.errors import UsageError
from gtpo.evaluation.jobs import Job, run_job
from gtpo.evaluation.records import Head, Origin, Problems
from gtpo.evaluation.sampling import Request, Sampling
from gtpo.evaluation.storage import (
    CompletionFile,
    Key,
    check_settings,
    find_completion_files,
    fingerprint,
    problems_hash,
    read_completions,
    read_head,
    scores_path,
    shard_path,
)

ROWS = load_benchmark("arithmetic")[:7]
SETTINGS = {"benchmark": "arithmetic", "k": 3, "temperature": 1.0} | vars(PromptArguments())
ORIGIN = Origin("canned")
HEAD = Head(SETTINGS, ORIGIN)


class Canned:
    """A sampler that answers with the id of the request, two at a time."""

    context_length = 100
    tokenizer = SimpleNamespace(
        apply_chat_template=lambda messages, tokenize=True, **_: [1, 2, 3] if tokenize else "",
        encode=lambda text, **_: [],
        added_tokens_decoder={},
    )

    def sample(
        self, requests: Sequence[Request], done: set[Key], adapter: Path | None, count_tokens: Callable[[int], object]
    ) -> Iterator[list[dict]]:
        missing = [request for request in requests if request.key not in done]
        for start in range(0, len(missing), 2):
            yield [
                {"id": r.id, "sample": r.sample, "completion": f"{r.id} é", "tokens": 1, "finished": True}
                for r in missing[start : start + 2]
            ]


def fill(path: Path, settings: dict = SETTINGS, load: Any = Canned, **options: Any) -> bytes:
    run_job(Job(path, Problems(ROWS), Head(settings, ORIGIN)), Sampling(k=3, max_new_tokens=9), load, **options)
    return path.read_bytes()


def never() -> Canned:
    raise AssertionError("the model was loaded")


def test_a_complete_file_needs_no_model_and_is_not_changed(tmp_path: Path) -> None:
    content = fill(tmp_path / "new" / "a.jsonl")
    assert content.count(b"\n") == 1 + 7 * 3
    assert fill(tmp_path / "new" / "a.jsonl", load=never) == content
    head, rows = read_completions(tmp_path / "new" / "a.jsonl")
    assert head == HEAD
    assert rows[0] == {"id": "arithmetic/0", "sample": 0, "completion": "arithmetic/0 é", "tokens": 1, "finished": True}


@pytest.mark.parametrize("cut", [1, 40, 200, 500, 1000, -1])
def test_a_truncated_file_is_completed_to_the_same_bytes(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.jsonl"
    content = fill(path)
    path.write_bytes(content[:cut])
    assert fill(path) == content


def test_changed_settings_are_refused_by_name_and_overwrite_discards_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    content = fill(path)
    changed = {**SETTINGS, "temperature": 0.5, "seed": 1}
    with pytest.raises(UsageError, match=r"temperature was 1.0, is 0.5, seed was None, is 1.*--overwrite"):
        fill(path, changed)
    assert path.read_bytes() == content
    assert fill(path, changed, overwrite=True).split(b"\n")[1:] == content.split(b"\n")[1:]
    assert read_completions(path)[0].settings == changed


def of_size(problems: int, k: int) -> Job:
    settings = SETTINGS | {"problems": problems, "problems_hash": problems_hash(ROWS[:problems]), "k": k}
    return Job(Path("a.jsonl"), Problems(ROWS[:problems]), Head(settings, ORIGIN))


@pytest.mark.parametrize("larger", [(7, 2), (3, 5), (7, 5)])
def test_completions_of_fewer_problems_and_samples_are_kept(
    larger: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small, large = of_size(3, 2), of_size(*larger)
    run_job(small, Sampling(k=2, max_new_tokens=9), Canned)
    before = small.path.read_bytes().split(b"\n")[1:-1]
    run_job(large, Sampling(k=larger[1], max_new_tokens=9), Canned)
    head, *after = large.path.read_bytes().split(b"\n")[:-1]
    assert after[:6] == before and len(after) == larger[0] * larger[1]
    assert Head.read(json.loads(head)) == large.head
    rows = read_completions(large.path)[1]
    assert {(row["id"], row["sample"]) for row in rows} == {
        (problem.id, sample) for problem in large.problems.rows for sample in range(larger[1])
    }
    with pytest.raises(UsageError, match=rf"\((problems|k) was {larger[0]}, is 3|k was {larger[1]}, is 2"):
        run_job(small, Sampling(k=2, max_new_tokens=9), never)


def test_only_the_first_problems_can_be_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_job(of_size(3, 2), Sampling(k=2, max_new_tokens=9), Canned)
    content = Path("a.jsonl").read_bytes()
    others = [ROWS[1], ROWS[0], *ROWS[2:]]
    settings = SETTINGS | {"problems": 7, "problems_hash": problems_hash(others), "k": 2}
    with pytest.raises(UsageError, match="problems was 3, is 7"):
        run_job(Job(Path("a.jsonl"), Problems(others), Head(settings, ORIGIN)), Sampling(k=2, max_new_tokens=9), never)
    larger = of_size(7, 2)
    warmer = Job(larger.path, larger.problems, Head(larger.head.settings | {"temperature": 2.0}, ORIGIN))
    with pytest.raises(UsageError, match=r"\(temperature was 1.0, is 2.0\)"):
        run_job(warmer, Sampling(k=2, max_new_tokens=9), never)
    assert Path("a.jsonl").read_bytes() == content


def test_an_extended_file_is_locked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_job(of_size(3, 2), Sampling(k=2, max_new_tokens=9), Canned)
    larger = of_size(7, 2)
    arguments = (larger.path, larger.head, False, larger.problems.rows)
    with CompletionFile(*arguments) as file:
        assert len(file.done) == 6
        with pytest.raises(UsageError, match="is in use by another evaluation"), CompletionFile(*arguments):
            pass
    assert read_completions(larger.path)[0].settings["problems"] == 7


def test_overwrite_also_discards_the_scores(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    fill(path)
    scores_path(path).write_text("{}")
    fill(path)
    assert scores_path(path) == tmp_path / "a.json"
    assert scores_path(path).is_file()
    fill(path, overwrite=True)
    assert not scores_path(path).exists()


def test_a_file_of_an_earlier_revision_is_read(tmp_path: Path) -> None:
    """The bytes that the first release wrote: these names may not change."""
    settings = {"benchmark": "arithmetic", "problems": 1, "problems_hash": "7c0e", "k": 2, "batch_size": None}
    about = {"model": "tiny", "adapter": None, "checkpoint": None, "environment": {}}
    lines = [
        json.dumps({"settings": settings, "about": about}),
        '{"id": "arithmetic/0", "sample": 1, "completion": "caf\\u00e9", "tokens": 31, "finished": true}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + "\n")
    head, rows = read_completions(path)
    assert head == Head(settings, Origin("tiny"))
    assert rows == [{"id": "arithmetic/0", "sample": 1, "completion": "café", "tokens": 31, "finished": True}]
    with CompletionFile(path, Head(settings, ORIGIN)) as file:
        assert file.done == {("arithmetic/0", 1)}
        file.append(rows[:0])
    assert path.read_text() == "\n".join(lines) + "\n"


def test_one_process_writes_a_file(tmp_path: Path) -> None:
    with CompletionFile(tmp_path / "a.jsonl", HEAD), pytest.raises(UsageError, match="another evaluation"):
        fill(tmp_path / "a.jsonl")
    fill(tmp_path / "a.jsonl")


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    content = fill(tmp_path / "a.jsonl")
    path = tmp_path / "b.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))  # in the middle of a line
    try:
        with pytest.raises(OSError, match="File too large"):
            fill(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 0 < path.stat().st_size <= 700
    assert fill(path) == content


def test_a_short_write_is_continued(tmp_path: Path) -> None:
    content = fill(tmp_path / "a.jsonl")
    with CompletionFile(tmp_path / "b.jsonl", HEAD) as file:
        raw = file._file
        file._file = SimpleNamespace(write=lambda data: raw.write(data[:7]), close=raw.close)  # type: ignore[assignment]
        file.append(read_completions(tmp_path / "a.jsonl")[1])
    assert (tmp_path / "b.jsonl").read_bytes() == content


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [lines[0], b'{"id": "arith', *lines[2:]], "line 2 is not a completion"),
        (lambda lines: [lines[0], b"[]", *lines[2:]], "line 2 is not a completion"),
        (lambda lines: lines[1:], r"is not a completion file \(line 1: KeyError\('settings'\)\): move it elsewhere"),
        (lambda lines: [b"id,completion", *lines[1:]], r"is not a completion file \(line 1: JSONDecodeError"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "a.jsonl"
    content = fill(path)
    path.write_bytes(b"\n".join(damage(content.split(b"\n"))))
    with pytest.raises(UsageError, match=message):
        fill(path)


def test_a_path_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write .*file/a\.jsonl.*--output_dir"):
        fill(tmp_path / "file" / "a.jsonl")


def test_a_full_disk_is_left_to_the_script_which_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(Path, "mkdir", full)
        fill(tmp_path / "new" / "a.jsonl")
    with CompletionFile(tmp_path / "a.jsonl", HEAD) as file, pytest.raises(OSError, match="No space left"):
        file._file.close()
        file._file = SimpleNamespace(write=full, close=lambda: None)
        file.append([{"id": "a", "sample": 0, "completion": "", "tokens": 0, "finished": True}])


def test_fingerprint_sees_any_changed_byte(tmp_path: Path) -> None:
    weights = bytearray(300_000)
    path = tmp_path / "model.safetensors"
    path.write_bytes(weights)
    seen = {fingerprint(tmp_path)}
    for position in (0, 65_536, 150_001, 299_999):
        changed = bytearray(weights)
        changed[position] = 1
        path.write_bytes(changed)
        seen.add(fingerprint(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    seen.add(fingerprint(tmp_path))
    (tmp_path / "README.md").write_text("not a weight")
    assert fingerprint(tmp_path) in seen
    assert len(seen) == 6
    assert fingerprint("Qwen/Qwen2.5-3B-Instruct") is None


def test_a_shard_of_other_settings_or_in_use_is_not_merged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    shard = shard_path(path, "1/2")
    fill(shard, SETTINGS | {"temperature": 0.5})
    for options in ({}, {"shard": "2/2"}):
        with pytest.raises(UsageError, match=r"shard-1-of-2 was created with other settings \(temperature was"):
            fill(path, load=never, **options)
    shard.unlink()
    content = fill(shard)
    with CompletionFile(shard, HEAD), pytest.raises(UsageError, match=r"shard-1-of-2 is in use by another evaluation"):
        fill(path, load=never)
    assert shard.read_bytes() == content and not path.exists()
    head = Head(SETTINGS, Origin("of the merge"))
    run_job(Job(path, Problems(ROWS), head), Sampling(k=3, max_new_tokens=9), never)
    assert path.read_bytes() == content and read_head(path).origin == ORIGIN  # that of what sampled them
    shard.write_bytes(content)  # as if it was killed before it deleted the shard
    run_job(Job(path, Problems(ROWS), head), Sampling(k=3, max_new_tokens=9), never)
    assert path.read_bytes() == content and not shard.exists()


def test_overwrite_discards_shards(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    fill(shard_path(path, "1/2"), SETTINGS | {"temperature": 0.5})
    assert fill(path, overwrite=True) == fill(tmp_path / "b.jsonl")
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "b.jsonl"]


def test_the_hash_of_problems_depends_on_what_is_asked() -> None:
    assert problems_hash(ROWS) == "0ea25ba5d2ded379"  # stored with completions: it may not change
    other_gold = [replace(problem, gold="7") for problem in ROWS]
    assert problems_hash(other_gold) == problems_hash(ROWS)
    assert problems_hash(ROWS[:6]) != problems_hash(ROWS)
    assert problems_hash([replace(ROWS[0], question="Why?"), *ROWS[1:]]) != problems_hash(ROWS)


def test_without_completions_no_file_is_left(tmp_path: Path) -> None:
    """After Ctrl-C before the first completion the evaluation can be started with other settings."""

    def interrupted() -> Canned:
        raise KeyboardInterrupt

    path = tmp_path / "label" / "a.jsonl"
    with pytest.raises(KeyboardInterrupt):
        fill(path, load=interrupted)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    fill(path)
    with pytest.raises(KeyboardInterrupt):
        fill(path, {**SETTINGS, "seed": 1}, load=interrupted, overwrite=True)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", [b"", b'{"settings": {"k": 9}, "about": {}}\n', b'{"settings": {"k": 9}, "about": {}}\n{"i']
)
def test_a_file_without_completions_is_created_again(tmp_path: Path, content: bytes) -> None:
    """As after kill -9."""
    path = tmp_path / "label" / "a.jsonl"
    path.parent.mkdir()
    path.write_bytes(content)
    check_settings(path, SETTINGS)
    assert find_completion_files(tmp_path, ["a"]) == []
    assert fill(path) == fill(tmp_path / "b.jsonl")
    assert find_completion_files(tmp_path, ["a"]) == [path]


def test_a_file_that_was_deleted_while_it_was_opened_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    monkeypatch.setattr("fcntl.flock", lambda *_: path.unlink())
    with pytest.raises(UsageError, match="is in use by another evaluation"):
        fill(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample": True}, "line 2 is not a completion with exactly the keys"),
        ({"extra": 1}, r"line 2 is not a completion with exactly the keys id \(str\), sample \(int\)"),
        ({"tokens": "9"}, "line 2 is not a completion with exactly the keys"),
        ({"completion": None}, "line 2 is not a completion with exactly the keys"),
    ],
)
def test_lines_that_are_no_completions_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "a.jsonl"
    head, first, *lines = fill(path).decode().splitlines(keepends=True)
    path.write_text("".join([head, json.dumps(json.loads(first) | change) + "\n", *lines]))
    with pytest.raises(UsageError, match=message):
        fill(path, load=never)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"id": "gsm8k/0"}, {"sample": 3}, {"sample": -1}])
def test_a_completion_of_another_problem_is_ignored_and_the_missing_one_sampled(
    tmp_path: Path, change: dict[str, object]
) -> None:
    path = tmp_path / "a.jsonl"
    head, first, *lines = fill(path).decode().splitlines(keepends=True)
    path.write_text("".join([head, json.dumps(json.loads(first) | change) + "\n", *lines]))
    assert fill(path).decode().splitlines(keepends=True)[-1] == first


def test_a_completion_without_a_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(fill(path).replace(b'"tokens": 1, ', b"", 1))
    with pytest.raises(UsageError, match="line 2 is not a completion with exactly the keys"):
        read_completions(path)


def test_done_has_every_appended_completion(tmp_path: Path) -> None:
    content = fill(tmp_path / "a.jsonl")
    rows = read_completions(tmp_path / "a.jsonl")[1]
    with CompletionFile(tmp_path / "b.jsonl", HEAD) as file:
        for part in (rows[:2], rows[2:]):
            file.append(part)
        assert file.done == {(row["id"], row["sample"]) for row in rows}
    assert (tmp_path / "b.jsonl").read_bytes() == content


def test_a_setting_that_only_the_file_has_is_refused_by_name(tmp_path: Path) -> None:
    fill(tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match=r"\(temperature was 1.0, is None\)"):
        fill(tmp_path / "a.jsonl", {name: value for name, value in SETTINGS.items() if name != "temperature"})


def test_a_hash_is_named_if_nothing_else_differs(tmp_path: Path) -> None:
    fill(tmp_path / "a.jsonl", SETTINGS | {"problems_hash": "7c0e"})
    with pytest.raises(UsageError, match=r"\(problems_hash was '7c0e', is '0ea2'\)"):
        fill(tmp_path / "a.jsonl", SETTINGS | {"problems_hash": "0ea2"})


def test_a_partly_written_last_line_is_not_read(tmp_path: Path) -> None:
    content = fill(tmp_path / "a.jsonl")
    rows = read_completions(tmp_path / "a.jsonl")[1]
    (tmp_path / "a.jsonl").write_bytes(content[:-3])
    assert read_completions(tmp_path / "a.jsonl")[1] == rows[:-1]


def test_fingerprint_of_a_large_file_sees_its_end(tmp_path: Path) -> None:
    size = 256 * 80_000  # 256 blocks of 64 KiB are 16.8 MB
    seen = set()
    for byte in (b"\0", b"\1"):
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(size)
            file.seek(255 * 80_000)
            file.write(byte)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 2


SAVE = """
import sys
from pathlib import Path
from peft import LoraConfig
from gtpo.arguments import ModelArguments
from gtpo.evaluation.storage import fingerprint
from gtpo.models.load import build_policy

base, plain, ours = sys.argv[1:]
modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LoraConfig(target_modules=modules).save_pretrained(plain)
build_policy(ModelArguments(model=base), "transformers", seed=0)[0].save_pretrained(ours)
print(fingerprint(plain), fingerprint(ours))
"""


def test_the_order_of_the_modules_of_an_adapter_does_not_matter(tmp_path: Path) -> None:
    seen = []
    for modules in (["v_proj", "q_proj"], ["q_proj", "v_proj"], ["q_proj"]):
        stored = {"r": 4, "target_modules": modules}
        (tmp_path / "adapter_config.json").write_text(json.dumps(stored, indent=2, sort_keys=True))
        seen.append(fingerprint(tmp_path))
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000], ids=["cut off", "list", "deep"])
def test_damaged_settings_of_an_adapter_in_the_base_have_a_fingerprint(text: str, tmp_path: Path) -> None:
    assert fingerprint(tmp_path) is not None
    before = fingerprint(tmp_path)
    (tmp_path / "adapter_config.json").write_text(text)
    assert fingerprint(tmp_path) not in (None, before)


@pytest.mark.slow
def test_an_adapter_saved_by_another_process_is_the_same(tiny: Path, tmp_path: Path) -> None:
    """PEFT writes the names of modules in the order of the hash seed; the adapters of a run have them sorted."""
    printed = []
    for seed in ("1", "2"):
        saved = [tmp_path / f"{name}-{seed}" for name in ("plain", "ours")]
        done = subprocess.run(
            [sys.executable, "-c", SAVE, tiny, *saved],
            env=user_environment() | {"PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    plain, ours = ([(tmp_path / f"{name}-{s}" / "adapter_config.json") for s in "12"] for name in ("plain", "ours"))
    assert plain[0].read_bytes() != plain[1].read_bytes()
    assert ours[0].read_bytes() == ours[1].read_bytes()
    changed = json.loads(plain[0].read_bytes()) | {"target_modules": ["q_proj"]}
    plain[1].write_text(json.dumps(changed))
    assert fingerprint(plain[1].parent) != printed[0].split()[0]
