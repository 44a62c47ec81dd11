"""The completion file: resumed after any interruption, refused with other settings, hashes of models and problems."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.files import read_json
from helpers.refusals import refused
from helpers.results import files_up_to
from helpers.scripts import ROOT, Command
from pytest import CaptureFixture, MonkeyPatch, mark, raises
from transformers import AutoTokenizer

from gtpo.arguments import ModelArguments, PromptArguments
from gtpo.data.load import load_benchmark
from gtpo.errors import UsageError
from gtpo.evaluation.jobs import EvaluationPlan, Job
from gtpo.evaluation.records import Head, Origin, Problems, read_entries
from gtpo.evaluation.sampling import Request, Sampling
from gtpo.evaluation.scores import grade
from gtpo.evaluation.storage import (
    Key,
    check_settings,
    find_completion_files,
    open_completions,
    problems_hash,
    read_completions,
    read_head,
    scores_path,
    shard_path,
)
from gtpo.models.hub import TINY_BASE
from gtpo.models.load import build_policy

ROWS = load_benchmark("arithmetic")[:7]
SETTINGS = {"benchmark": "arithmetic", "k": 3, "temperature": 1.0} | vars(PromptArguments())
ORIGIN = Origin("canned")
HEAD = Head(SETTINGS, ORIGIN)


class Canned:
    """A sampler that answers with the id of the request, two at a time."""

    context_length = 1000
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)

    def sample(
        self, requests: Sequence[Request], done: set[Key], adapter: Path | None, count_tokens: Callable[[int], object]
    ) -> Iterator[list[dict]]:
        missing = [request for request in requests if request.key not in done]
        for start in range(0, len(missing), 2):
            yield [
                {"id": r.id, "sample": r.sample, "completion": f"{r.id} é", "tokens": 1, "finished": True}
                for r in missing[start : start + 2]
            ]


def run_job(job: Job, load: Any, **options: Any) -> None:
    how = Sampling(k=job.head.settings["k"], max_new_tokens=9)
    EvaluationPlan([job], how, load, **options).run_job(job)


def fill(path: Path, settings: dict = SETTINGS, load: Any = Canned, **options: Any) -> bytes:
    run_job(Job(path, Problems(ROWS), Head(settings, ORIGIN)), load, **options)
    return path.read_bytes()


def never() -> Canned:
    raise AssertionError("the model was loaded")


def test_a_truncated_file_is_completed_to_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    content = fill(path)
    assert content.count(b"\n") == 1 + 7 * 3
    assert fill(path, load=never) == content
    head, rows = read_completions(path)
    assert head == HEAD
    assert rows[0] == {"id": "arithmetic/0", "sample": 0, "completion": "arithmetic/0 é", "tokens": 1, "finished": True}
    assert [found.name for found in path.parent.iterdir()] == ["a.jsonl"]
    with open_completions(tmp_path / "b.jsonl", HEAD) as file:
        file.append(rows)
        assert (tmp_path / "b.jsonl").read_bytes() == content  # kept if the process is killed here
    for cut in (0, 1, 40, 200, 500, 1000, -1):
        path.write_bytes(content[:cut])
        assert cut != -1 or read_completions(path)[1] == rows[:-1]  # without a partly written line
        assert fill(path) == content


def test_completions_that_another_file_grades_name_it(tmp_path: Path) -> None:
    """The same questions with other gold answers: --regrade reads the answers that the scores are of."""
    path = tmp_path / "a.jsonl"
    first, second = (Origin("canned", data={"source": f"{name}/test.csv"}) for name in "ab")
    job = Job(path, Problems(ROWS), Head(SETTINGS, first))
    run_job(job, Canned)
    content = path.read_bytes()
    run_job(job, never)
    assert path.read_bytes() == content
    run_job(replace(job, head=Head(SETTINGS, second)), never)
    assert path.read_bytes().startswith(content) and read_head(path).origin == second
    assert len(read_completions(path)[1]) == 21


@mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 0.5, "seed": 1}, ["temperature", "seed"]),
        ({"temperature": None}, ["temperature"]),  # a setting that only the file has
        ({"problems_hash": "0ea2"}, ["problems_hash"]),
    ],
)
def test_changed_settings_are_refused_by_name(changes: dict[str, Any], named: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    content = fill(path)
    scores_path(path).write_text("{}")
    changed = {name: value for name, value in (SETTINGS | changes).items() if value is not None}
    with raises(UsageError) as caught:
        fill(path, changed, load=never)
    assert [name for name in ("temperature", "seed", "problems_hash") if f"{name} was" in str(caught.value)] == named
    assert path.read_bytes() == content and scores_path(path).is_file()
    assert fill(path, changed, overwrite=True).split(b"\n")[1:] == content.split(b"\n")[1:]
    assert read_completions(path)[0].settings == changed
    assert not scores_path(path).exists()


def of_size(problems: int, k: int) -> Job:
    settings = SETTINGS | {"problems": problems, "problems_hash": problems_hash(ROWS[:problems]), "k": k}
    return Job(Path("a.jsonl"), Problems(ROWS[:problems]), Head(settings, Origin(f"of {problems} and {k}")))


@mark.parametrize("larger", [(7, 2), (3, 5), (7, 5)])
def test_completions_of_fewer_problems_and_samples_are_kept(larger: tuple[int, int], here: Path) -> None:
    small = of_size(3, 2)
    large = of_size(*larger)
    run_job(small, Canned)
    before = small.path.read_bytes()
    with raises(AssertionError, match="loaded"):
        run_job(large, never)
    assert small.path.read_bytes() == before  # nothing is written before the first completion
    run_job(large, Canned)
    assert large.path.read_bytes().startswith(before) and read_head(large.path) == large.head
    found = [(row["id"], row["sample"]) for row in read_completions(large.path)[1]]
    assert len(found) == larger[0] * larger[1]
    assert set(found) == {(problem.id, sample) for problem in large.problems.rows for sample in range(larger[1])}
    content = large.path.read_bytes()
    run_job(large, never)
    warmer = large.head.settings | {"temperature": 2.0}
    swapped = Problems([ROWS[1], ROWS[0], *ROWS[2:]])
    of_swapped = large.head.settings | {"problems_hash": problems_hash(swapped.rows)}
    others = replace(large, problems=swapped, head=Head(of_swapped, ORIGIN))
    for job in (of_size(2, 2), replace(large, head=Head(warmer, ORIGIN)), others):  # no extension of what is stored
        with refused("was created with other settings"):
            run_job(job, never)
    large.path.write_bytes(content[:-200])  # killed
    run_job(large, Canned)
    assert large.path.read_bytes() == content


def test_a_smaller_k_takes_the_first_samples(here: Path) -> None:
    few = of_size(3, 2)
    run_job(of_size(3, 5), Canned)
    stored = few.path.read_bytes()
    run_job(few, never)
    assert few.path.read_bytes().startswith(stored) and read_head(few.path) == few.head
    entry = grade(few.path, few.problems)
    assert (entry.k, {problem.n for problem in entry.per_problem}) == (2, {2})
    assert list(entry.scores["pass"]) == ["1", "2"]
    run_job(of_size(3, 5), never)
    assert grade(few.path, few.problems).k == 5 and len(read_completions(few.path)[1]) == 15


STORED = ROOT / "tests" / "stored" / "evaluation_of_eada378"


def test_an_evaluation_of_revision_eada378_can_be_used(
    tmp_path: Path, run_evaluate: Command, capsys: CaptureFixture[str]
) -> None:
    """Its key ``judge`` of the source is read as ``grader``; its (n, c) are those of the strict verdicts."""
    directory = shutil.copytree(STORED, tmp_path / "evaluation")
    path = directory / "gtpo-s3" / "arithmetic.jsonl"
    assert '"judge"' in path.read_text()
    (before,) = read_entries(directory / "results.json")
    run_evaluate("--regrade", "--output_dir", directory)
    (after,) = read_entries(directory / "results.json")
    assert replace(after, graded_by={}) == replace(before, graded_by={})
    assert "judge" not in read_json(directory / "results.json")["results"][0]["data"]
    assert all((p.n, p.c) == (2, p.correct.count("1")) for p in after.per_problem)
    capsys.readouterr()
    run_evaluate("--compare", directory, STORED / "gtpo-s3")
    scores = [line for line in capsys.readouterr().out.splitlines() if "pass@1 " in line and "lenient" not in line]
    assert all(any(value in line for line in scores) for value in ("+0.0", "0 / 0 / 2"))
    with open_completions(path, read_head(path), load_benchmark("arithmetic")[:2]) as file:
        assert file.done == {(f"arithmetic/{i}", sample) for i in range(2) for sample in range(2)} and file.has_head


def test_one_process_writes_a_file(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    in_use = r"a\.jsonl is in use by another evaluation: wait for it, or set --output_dir"
    with open_completions(tmp_path / "a.jsonl", HEAD), refused(in_use):
        fill(tmp_path / "a.jsonl")
    fill(tmp_path / "a.jsonl")


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    content = fill(tmp_path / "a.jsonl")
    path = tmp_path / "b.jsonl"
    with files_up_to(700), raises(OSError, match="File too large"):  # in the middle of a line
        fill(path)
    assert 0 < path.stat().st_size <= 700
    assert fill(path) == content


def changed(change: dict[str, object]) -> Callable[[list[bytes]], list[bytes]]:
    return lambda lines: [lines[0], json.dumps(json.loads(lines[1]) | change).encode(), *lines[2:]]


@mark.parametrize(
    ("damage", "named"),
    [
        (lambda lines: [lines[0], b'{"id": "arith', *lines[2:]], "line 2"),
        (lambda lines: [*lines[:5], b"[]", *lines[5:]], "line 6"),
        (lambda lines: [*lines[:5], b"null", *lines[5:]], "line 6"),
        (changed({"extra": 1}), "line 2"),
        (lambda lines: [b"id,completion", *lines], "line 1"),
    ],
)
def test_a_damaged_file_is_refused_and_not_changed(
    tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]], named: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(damage(fill(path).split(b"\n"))))
    damaged = path.read_bytes()
    with refused(named):
        fill(path, load=never)
    assert path.read_bytes() == damaged


@mark.parametrize("change", [{"id": "gsm8k/0"}, {"sample": 3}, {"sample": -1}])
def test_a_completion_of_another_problem_is_replaced(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "a.jsonl"
    lines = fill(path).split(b"\n")
    path.write_bytes(b"\n".join(changed(change)(lines)))
    assert fill(path).split(b"\n")[-2] == lines[1]


def test_a_shard_of_other_settings_is_not_merged(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    shard = shard_path(path, "1/2")
    fill(shard, SETTINGS | {"temperature": 0.5})
    for options in ({}, {"shard": "2/2"}):
        with refused(r"shard-1-of-2 was created with other settings \(temperature was"):
            fill(path, load=never, **options)
    shard.unlink()
    content = fill(shard)
    with open_completions(shard, HEAD), refused("shard-1-of-2 is in use"):
        fill(path, load=never)
    assert shard.read_bytes() == content and path.read_bytes() == b""
    head = Head(SETTINGS, Origin("of the merge"))
    for _ in range(2):  # the second time as if it was killed before it deleted the shard
        run_job(Job(path, Problems(ROWS), head), never)
        assert path.read_bytes() == content and read_head(path).origin == ORIGIN  # that of what sampled them
        assert not shard.exists()
        shard.write_bytes(content)
    fill(shard, SETTINGS | {"temperature": 0.5}, overwrite=True)
    path.unlink()
    assert fill(path, overwrite=True) == content
    assert [found.name for found in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_hash_of_problems_depends_on_what_is_asked() -> None:
    assert problems_hash(ROWS) == "0ea25ba5d2ded379"  # stored with completions: it may not change
    other_gold = [replace(problem, gold="7") for problem in ROWS]
    assert problems_hash(other_gold) == problems_hash(ROWS)
    assert problems_hash(ROWS[:6]) != problems_hash(ROWS)
    assert problems_hash([replace(ROWS[0], question="Why?"), *ROWS[1:]]) != problems_hash(ROWS)


def test_a_file_without_completions_is_created_again(tmp_path: Path) -> None:
    """As after Ctrl-C or kill -9."""
    path = tmp_path / "label" / "a.jsonl"
    path.parent.mkdir()
    for more in (b"", b'{"i'):
        path.write_bytes(b'{"settings": {"k": 9}, "about": {}}\n' + more)
        check_settings(path, SETTINGS)
        assert find_completion_files(tmp_path, ["a"]) == []
        assert fill(path) == fill(tmp_path / "b.jsonl")
    assert find_completion_files(tmp_path, ["a"]) == find_completion_files(tmp_path) == [path]


def test_every_process_saves_the_same_adapter_bytes(tiny: Path, tmp_path: Path) -> None:
    """PEFT keeps the names of modules in sets, whose order depends on the hash seed."""
    policy, _ = build_policy(ModelArguments(model=str(tiny), lora_rank=4), "transformers", seed=0)
    policy.save_pretrained(tmp_path)
    modules = read_json(tmp_path / "adapter_config.json")["target_modules"]
    assert modules == sorted(modules) and len(modules) == 7
