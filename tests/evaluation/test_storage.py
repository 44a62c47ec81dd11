"""The completion file: resumed after any interruption, refused with other settings, hashes of models and problems."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.files import read_json
from helpers.refusals import refused
from helpers.results import files_up_to, grade_file
from helpers.runs import fake_run
from helpers.scripts import ROOT, Command
from pytest import mark, raises

from gtpo.arguments import ModelArguments
from gtpo.data.load import load_benchmark
from gtpo.evaluation.jobs import EvaluationPlan
from gtpo.evaluation.records import CompletionSettings, Head, Job, Origin, Problems, Sampling, read_entries
from gtpo.evaluation.sampling import Request
from gtpo.evaluation.storage import (
    Completions,
    Key,
    by_key,
    check_settings,
    find_completion_files,
    key_of,
    keys_of,
    open_completions,
    problems_hash,
    read_completions,
    read_head,
    scores_path,
    weights_have_changed,
)
from gtpo.files import fingerprint
from gtpo.models.hub import TINY_BASE
from gtpo.models.load import build_policy
from gtpo.models.source import model_source

ROWS = load_benchmark("arithmetic")[:7]
SETTINGS = CompletionSettings(
    benchmark="arithmetic", sampling=Sampling(k=3), problems=7, problems_hash=problems_hash(ROWS)
)
ORIGIN = Origin("canned")
HEAD = Head(SETTINGS, ORIGIN)


class Canned:
    """A sampler that answers with the id of the request, two at a time."""

    context_length = 1000
    base = model_source(str(TINY_BASE))

    def sample(self, requests: Sequence[Request], done: set[Key], *_: object) -> Iterator[list[dict]]:
        rows = [
            {"id": r.id, "sample": r.sample, "completion": f"{r.id} é", "tokens": 1, "finished": True}
            for r in requests
            if r.key not in done
        ]
        for start in range(0, len(rows), 2):
            yield rows[start : start + 2]


def run_job(job: Job, load: Any, **options: Any) -> Completions:
    how = replace(job.head.settings.sampling, max_new_tokens=9)
    return EvaluationPlan([job], how, load, **options).run_job(job)


def fill(path: Path, settings: CompletionSettings = SETTINGS, load: Any = Canned, **options: Any) -> bytes:
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
    for cut in (0, 40, 1000, -1):
        path.write_bytes(content[:cut])
        assert cut != -1 or read_completions(path)[1] == rows[:-1]  # without a partly written line
        assert fill(path) == content


def test_completions_that_another_file_grades_name_it(tmp_path: Path) -> None:
    """The same questions with other gold answers: --regrade reads the answers that the scores are of."""
    path = tmp_path / "a.jsonl"
    content = fill(path)
    other = Origin("canned", data={"source": "other/test.csv"})
    run_job(Job(path, Problems(ROWS), Head(SETTINGS, other)), never)
    assert path.read_bytes().startswith(content) and read_head(path).origin == other
    assert len(read_completions(path)[1]) == 21


def test_changed_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    content = fill(path)
    scores_path(path).write_text("{}")
    changed = replace(SETTINGS, sampling=Sampling(k=3, temperature=0.5, seed=1))
    with refused(r"\(temperature was 1.0, is 0.5, seed was 0, is 1\)"):
        fill(path, changed, load=never)
    assert path.read_bytes() == content and scores_path(path).is_file()
    assert fill(path, changed, overwrite=True).split(b"\n")[1:] == content.split(b"\n")[1:]
    assert read_completions(path)[0].settings == changed
    assert not scores_path(path).exists()


def of_size(problems: int, k: int) -> Job:
    sizes = {"problems": problems, "problems_hash": problems_hash(ROWS[:problems])}
    settings = replace(SETTINGS, sampling=Sampling(k=k), **sizes)
    return Job(Path("a.jsonl"), Problems(ROWS[:problems]), Head(settings, Origin(f"of {problems} and {k}")))


def test_completions_of_fewer_problems_and_samples_are_kept(here: Path) -> None:
    small = of_size(3, 2)
    large = of_size(7, 5)
    run_job(small, Canned)
    before = small.path.read_bytes()
    run_job(large, Canned)
    content = large.path.read_bytes()
    assert content.startswith(before) and read_head(large.path) == large.head
    found = [key_of(row) for row in read_completions(large.path)[1]]
    assert len(found) == 35 and set(found) == keys_of(ROWS, 5)
    large.path.write_bytes(content[:-200])  # killed
    completions = run_job(large, Canned)
    assert large.path.read_bytes() == content
    # graded are those that were there, and those that were sampled now
    assert completions == by_key(read_completions(large.path)[1]) == run_job(large, never)


def test_only_first_problems_and_samples_are_extended(here: Path) -> None:
    large = of_size(7, 5)
    run_job(large, Canned)
    swapped = Problems([ROWS[1], ROWS[0], *ROWS[2:]])
    hotter = replace(large.head.settings, sampling=Sampling(k=5, temperature=2.0))
    in_other_order = replace(large.head.settings, problems_hash=problems_hash(swapped.rows))
    fewer = of_size(2, 5).head.settings
    for settings, rows in ((hotter, ROWS), (in_other_order, swapped.rows), (fewer, ROWS[:2])):
        job = replace(large, problems=Problems(rows), head=Head(settings, ORIGIN))
        with refused("was created with other settings"):
            run_job(job, never)


def test_a_smaller_k_takes_the_first_samples(here: Path) -> None:
    run_job(of_size(3, 5), Canned)
    few = of_size(3, 2)
    run_job(few, never)
    entry = grade_file(few.path, few.problems)
    assert (entry.k, {problem.n for problem in entry.per_problem}) == (2, {2})
    run_job(of_size(3, 5), never)
    assert grade_file(few.path, few.problems).k == 5 and len(read_completions(few.path)[1]) == 15


STORED = ROOT / "tests" / "stored" / "evaluation_of_eada378"


def test_an_evaluation_of_revision_eada378_can_be_used(tmp_path: Path, run_evaluate: Command) -> None:
    """Its key ``judge`` of the source is read as ``grader``."""
    directory = shutil.copytree(STORED, tmp_path / "evaluation")
    assert '"judge"' in (directory / "gtpo-s3" / "arithmetic.jsonl").read_text()
    (before,) = read_entries(directory / "results.json")
    run_evaluate("--regrade", "--output_dir", directory)
    (after,) = read_entries(directory / "results.json")
    assert replace(after, graded_by={}) == replace(before, graded_by={})
    assert "judge" not in read_json(directory / "results.json")["results"][0]["data"]


def test_one_process_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open_completions(path, HEAD), refused(r"a\.jsonl is in use .* --output_dir"):
        fill(path)
    fill(path)


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    content = fill(tmp_path / "a.jsonl")
    path = tmp_path / "b.jsonl"
    with files_up_to(700), raises(OSError, match="File too large"):  # in the middle of a line
        fill(path)
    assert 0 < path.stat().st_size <= 700
    assert fill(path) == content


@mark.parametrize(
    ("number", "line"),
    [
        (1, "id,completion"),
        (6, "[]"),
        (2, '{"id": "arithmetic/0", "sample": 0, "completion": "", "tokens": 0, "finished": true, "extra": 1}'),
    ],
)
def test_a_damaged_file_is_refused_and_not_changed(tmp_path: Path, number: int, line: str) -> None:
    path = tmp_path / "a.jsonl"
    lines = fill(path).decode().split("\n")
    lines.insert(number - 1, line)
    path.write_text("\n".join(lines))
    with refused(f"line {number}"):
        fill(path, load=never)
    assert path.read_text().split("\n") == lines


def test_the_hash_of_problems_depends_on_what_is_asked() -> None:
    assert problems_hash(ROWS) == "0ea25ba5d2ded379"  # stored with completions: it may not change
    assert problems_hash([replace(problem, gold="7") for problem in ROWS]) == problems_hash(ROWS)
    assert problems_hash(ROWS[1:]) != problems_hash(ROWS)


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
    policy, _ = build_policy(model_source(tiny), ModelArguments(lora_rank=4), "transformers", seed=0)
    policy.save_pretrained(tmp_path)
    modules = read_json(tmp_path / "adapter_config.json")["target_modules"]
    assert modules == sorted(modules) and len(modules) == 7


@mark.parametrize("changed", ["adapter_config.json", "adapter_model.safetensors", "later.safetensors"])
def test_any_file_that_has_changed_makes_other_weights(changed: str, tmp_path: Path) -> None:
    """In one process, which has read the directory before."""
    adapter = fake_run(tmp_path / "run", saved=["adapter"]).adapter
    head = Head(CompletionSettings(adapter=fingerprint(adapter)), Origin("some/model", str(adapter)))
    assert not weights_have_changed(head)
    (adapter / changed).write_text("others")
    assert weights_have_changed(head)
