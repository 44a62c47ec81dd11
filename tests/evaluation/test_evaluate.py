"""evaluate.py from the flags to the table: what is stored, split, graded again and compared."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from helpers.files import read_json, write_settings
from helpers.refusals import refused
from helpers.scripts import Command
from pytest import CaptureFixture, MonkeyPatch, approx, fail

from gtpo.data.load import load_benchmark
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.evaluation.jobs import plan_evaluation
from gtpo.evaluation.records import Sampling
from gtpo.evaluation.sampling import load_prompt_tokenizer, make_requests
from gtpo.evaluation.storage import read_completions

SAMPLER = "gtpo.evaluation.sampling.TransformersSampler"


def results(directory: Path) -> list[dict]:
    return read_json(directory / "results.json")["results"]


SMALL = ["--benchmarks", "arithmetic", "--limit", 5, "--k", 4, "--max_new_tokens", 6, "--batch_size", 3]


def test_base_and_adapters_side_by_side(
    outputs: Path,
    adapters: list[Path],
    tiny: Path,
    run_evaluate: Command,
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
) -> None:
    run_evaluate(*SMALL, "--runs", "base", "outputs/older", "outputs/older/best")
    directory = Path("outputs/evaluation")
    entries = {entry["label"]: entry for entry in results(directory)}
    assert list(entries) == [f"base-{tiny.name}", "older", "older-best"]
    adapters_of = ["outputs/older/adapter", "outputs/older/best"]
    assert [entry["adapter"] for entry in entries.values()] == [None, *adapters_of]
    graded_by = entries["older"]["graded_by"]
    assert graded_by.keys() == {"grader", "code", "grading", "git_revision", "math-verify", "timeouts"}
    completions = {label: read_completions(directory / label / "arithmetic.jsonl")[1] for label in entries}
    texts = [[row["completion"] for row in rows] for rows in completions.values()]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        different = sum(a != b for a, b in zip(texts[one], texts[other], strict=True))
        assert different > 10  # of 20, with the same seeds

    # An adapter alone gives the same completions as beside the others.
    run_evaluate(*SMALL, "--runs", "outputs/older", "--output_dir", "alone")
    assert read_completions(Path("alone/older/arithmetic.jsonl"))[1] == completions["older"]

    # Stored completions are not sampled again; the table has the rows in the order of the flags.
    capsys.readouterr()
    monkeypatch.setattr(SAMPLER, lambda *_: fail("the model was loaded again"))
    run_evaluate(*SMALL, "--runs", "outputs/older", "base")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    labels = ["older", f"base-{tiny.name}"]
    assert [line[0] for line in lines if line and line[0] in labels][:2] == labels
    shutil.copytree(adapters[1], outputs / "older" / "adapter", dirs_exist_ok=True)
    with refused("adapter"):  # another one, before a model is loaded
        run_evaluate(*SMALL, "--runs", "outputs/older")


ENDS_WITH_BOS = "{% for m in messages %}: {{ m.content }}{% if m.role == 'assistant' %}<s>{% endif %}{% endfor %}"


def test_a_score_does_not_depend_on_the_order_of_runs(
    outputs: Path, adapters: list[Path], tiny: Path, run_evaluate: Command
) -> None:
    """Neither the template of the first run nor the end of its turns is that of the others, which have none."""
    write_settings(outputs / "older" / "config.yaml", {"model": "tiny", "chat_template": ENDS_WITH_BOS})
    shutil.copytree(adapters[1], "foreign")
    argv = [*SMALL, "--runs"]
    run_evaluate(*argv, "outputs/older", "foreign", "outputs/demo/newer", "--output_dir", "one")
    run_evaluate(*argv, "outputs/demo/newer", "foreign", "outputs/older", "--output_dir", "two")
    run_evaluate(*argv, "foreign", "--output_dir", "alone")
    for label in ("older", "foreign", "demo-newer"):
        one, two = (Path(name) / label / "arithmetic.jsonl" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    assert Path("alone/foreign/arithmetic.jsonl").read_bytes() == Path("one/foreign/arithmetic.jsonl").read_bytes()


def test_a_sampler_ends_completions_as_its_base_does(outputs: Path) -> None:
    """With the tokens of the base alone: those of a target's template are of its requests."""
    write_settings(outputs / "older" / "config.yaml", {"model": "tiny", "chat_template": ENDS_WITH_BOS})
    plan = plan_evaluation(EvaluationArguments(["arithmetic"], runs=["outputs/older", "base"], output_dir="out"))
    sampler = plan.load()
    ends = []
    for job in plan.jobs:
        prompt = job.head.settings.prompt
        tokenizer = load_prompt_tokenizer(sampler, job.adapter, prompt)
        [request] = make_requests(sampler, job.problems.rows[:1], Sampling(k=1), prompt, tokenizer)
        ends.append(tokenizer.convert_ids_to_tokens(request.end_ids))
    assert sampler.end_ids == [sampler.tokenizer.eos_token_id] and ends == [["<s>"], ["<s>"]]


def test_missing_completions_are_sampled_as_before(
    tiny: Path, tmp_path: Path, run_evaluate: Command, monkeypatch: MonkeyPatch
) -> None:
    argv = [*SMALL, "--model", tiny, "--output_dir", tmp_path]
    with monkeypatch.context() as patch:
        for reader in ("storage.read_completions", "scores.read_entries"):
            patch.setattr(f"gtpo.evaluation.{reader}", lambda path: fail(f"{path} was written just now"))
        run_evaluate(*argv)
    path = tmp_path / f"base-{tiny.name}" / "arithmetic.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    [expected] = results(tmp_path)
    path.write_bytes(b"".join(lines[:9]))  # in the middle of a batch
    run_evaluate(*argv)
    assert path.read_bytes() == b"".join(lines)
    assert results(tmp_path)[0]["scores"] == expected["scores"]
    assert {found.name for found in path.parent.iterdir()} == {"arithmetic.jsonl", "arithmetic.json"}
    run_evaluate(*argv, "--seed", 1, "--overwrite")
    head, rows = read_completions(path)
    assert (head.settings.sampling.seed, len(rows), results(tmp_path)[0]["settings"]["seed"]) == (1, 20, 1)


def test_regrade_grades_stored_completions_without_a_model(
    store: Callable[..., Path],
    texts_by_hand: dict[str, list[str]],
    tmp_path: Path,
    run_evaluate: Command,
    monkeypatch: MonkeyPatch,
) -> None:
    monkeypatch.setattr(SAMPLER, lambda *_: fail("a model was loaded"))
    path = store(texts_by_hand)
    store(texts_by_hand, "other")
    run_evaluate("--regrade", "--output_dir", tmp_path, "--benchmarks", "arithmetic")
    assert [entry["label"] for entry in results(tmp_path)] == ["other", "run"]
    assert results(tmp_path)[1]["scores"]["pass"]["4"] == approx(200 / 3, abs=1e-5)
    wrong = texts_by_hand["arithmetic/2"][1]
    gold = load_benchmark("arithmetic")[2].gold
    right = wrong.replace(str(int(gold) + 1), gold)
    path.write_text(path.read_text().replace(json.dumps(wrong), json.dumps(right)))
    run_evaluate("--regrade", "--output_dir", tmp_path)
    assert [entry["scores"]["pass"]["4"] for entry in results(tmp_path)] == approx([200 / 3, 100.0], abs=1e-5)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with refused("11 of 12"):
        run_evaluate("--regrade", "--output_dir", tmp_path)


def test_your_benchmark_is_evaluated_and_graded_again(
    tiny: Path, here: Path, run_evaluate: Command, capsys: CaptureFixture[str]
) -> None:
    Path("mine.csv").write_text('task,gold\n1 + 1?,2\n3 + 3?,$\n"Two, and two?",004\n')
    argv = ["--model", tiny, "--k", 2, "--max_new_tokens", 3, "--output_dir", "out", "--limit", 2]
    columns = ["--prompt_column", "task", "--answer_column", "gold"]
    run_evaluate(*argv, *columns, "--benchmarks", "mine.csv", "arithmetic")
    assert {entry["benchmark"] for entry in results(Path("out"))} == {"arithmetic", "mine"}
    assert "Rows dropped: 1 without a readable gold answer" in capsys.readouterr().out
    own = next(entry for entry in results(Path("out")) if entry["benchmark"] == "mine")
    assert [problem["gold"] for problem in own["per_problem"]] == ["2", "004"]
    assert own["data"] == {"source": "mine.csv", "data_dir": None, "dataset_config": None, "split": None} | {
        "prompt_column": "task",
        "answer_column": "gold",
        "answer_list": "any",
        "grader": None,
    }
    assert own["dropped"] == {"without a readable gold answer": 1}
    # a corrected gold answer: the completions are kept, and graded with the stored file and columns
    path = next(Path("out").glob("*/mine.jsonl"))
    path.write_text(path.read_text().replace('"completion": "', '"completion": "<answer>5</answer>'))
    Path("mine.csv").write_text('task,gold\n1 + 1?,2\n"Two, and two?",5\n')
    run_evaluate("--regrade", "--output_dir", "out")
    own = next(entry for entry in results(Path("out")) if entry["benchmark"] == "mine")
    assert [(problem["gold"], problem["correct"]) for problem in own["per_problem"]] == [("2", "00"), ("5", "11")]
    Path("mine.csv").write_text("task,gold\nAnother?,2\n")
    with refused("different problems"):
        run_evaluate("--regrade", "--output_dir", "out", "--benchmarks", "mine.csv")
    with refused("other settings"):
        run_evaluate(*argv, *columns, "--benchmarks", "mine.csv")
