"""evaluate.py from the flags to the table, and that a kill loses nothing."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentError
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.scripts import ROOT

import evaluate
from gtpo.data.load import load_benchmark
from gtpo.errors import UsageError
from gtpo.evaluation.storage import read_completions
from gtpo.runs.script import run_script

SAMPLER = "gtpo.evaluation.sampling.TransformersSampler"


def run(monkeypatch: pytest.MonkeyPatch, *argv: object) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, argv)])
    evaluate.main()


def results(directory: Path) -> list[dict]:
    return json.loads((directory / "results.json").read_text())["results"]


# Flags


@pytest.mark.slow
def test_importing_the_script_imports_nothing_heavy_and_the_libraries_import_beside_it() -> None:
    code = (
        "import sys, evaluate\n"
        "assert evaluate.__file__.startswith(sys.argv[1]), evaluate.__file__\n"
        "heavy = {'torch', 'transformers', 'datasets', 'peft', 'trl', 'numpy', 'vllm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "del sys.modules['evaluate']\n"
        "from transformers import Trainer; from trl import GRPOTrainer; from peft import get_peft_model\n"
        "assert 'evaluate' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(ROOT)], cwd=ROOT, check=True)


REFUSED = """
--k 0|--k 10001|--output_dir=|--k x|--limit 0|--temperature -1|--temperature nan|--tensor_parallel_size 0|--shard 5/4
--shard 0/4|--shard 1|--overwrite --shard 1/2|--regrade --shard 1/2|--shard 1/2 --compare a b|--temperature 0|--top_p 0
--seed -1|--batch_size 0|--max_new_tokens 0|--checkpoint newest|--backend unsloth|--modle x|--regrade --k 8
--regrade --overwrite|--compare a b --runs a|--compare a b --model tiny|--compare a b --regrade
--compare a b --overwrite|--model tiny --tensor_parallel_size 2|--grader math-verify|--config none.yaml
"""


@pytest.mark.parametrize("flags", REFUSED.strip().replace("\n", "|").split("|"))
def test_invalid_flags_are_refused_by_name(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SAMPLER, lambda *_: pytest.fail("a model was loaded"))
    argv = flags.split()
    with pytest.raises((UsageError, ArgumentError)) as refused:
        run(monkeypatch, "--benchmarks", "arithmetic", *argv)
    named = [word.partition("=")[0] for word in argv if word.startswith("--")]
    assert any(name in str(refused.value) for name in [*named, "none.yaml"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("benchmark: [gsm8k]", "benchmark"),
        ("benchmarks: [gsm9k]", "gsm8k"),
        ("benchmarks: [gsm8k]\nk: 0", "--k"),
        ("benchmarks: [gsm8k]\nregrade: true", "regrade"),
    ],
)
def test_a_file_of_settings_is_checked_like_flags(
    settings: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.yaml").write_text(settings)
    with pytest.raises(UsageError, match=named):
        run(monkeypatch, "--config", tmp_path / "settings.yaml")


def test_unreadable_data_is_reported_before_anything_is_sampled(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SAMPLER, lambda *_: pytest.fail("a model was loaded"))
    argv = ["--model", tiny, "--k", 1, "--limit", 2, "--benchmarks", "arithmetic"]
    with pytest.raises(UsageError, match="amc2023"):
        run(monkeypatch, *argv, "amc23", "--data_dir", tmp_path)
    with pytest.raises(UsageError, match="mine"):
        run(monkeypatch, *argv, "mine.csv")
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no route")))
    with pytest.raises(UsageError, match=r"math-ai/amc23.*--data_dir"):
        run(monkeypatch, *argv, "amc23")
    assert not Path("outputs").exists()


# Evaluating

SMALL = ["--benchmarks", "arithmetic", "--limit", 10, "--k", 4, "--max_new_tokens", 6, "--batch_size", 3]


def evaluate_in_child(directory: str, argv: list[str]) -> None:
    os.chdir(directory)
    sys.argv = ["evaluate.py", *argv]
    evaluate.main()


@pytest.mark.slow
def test_five_kills_change_nothing(
    tiny: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 after a random number of lines, five times: completions and results are those without a kill."""
    monkeypatch.chdir(tmp_path)
    argv = [str(value) for value in (*SMALL, "--runs", adapters[0], "--output_dir")]
    run(monkeypatch, *argv, "uninterrupted")
    [expected] = Path("uninterrupted").glob("*/arithmetic.jsonl")
    resumed = Path("killed") / expected.relative_to("uninterrupted")

    context = multiprocessing.get_context("forkserver")
    libraries = ["peft", "transformers.models.llama.modeling_llama"]
    context.set_forkserver_preload(["test_evaluate", "gtpo.evaluation.jobs", *libraries])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'evaluation'}{os.pathsep}{ROOT / 'tests'}")
    picks = random.Random(0)
    lines = kills = 0
    while kills < 5:
        goal = lines + picks.randint(1, 7)
        child = context.Process(target=evaluate_in_child, args=(str(tmp_path), [*argv, "killed"]))
        child.start()
        while child.is_alive() and lines < goal:
            time.sleep(0.0005)
            lines = resumed.read_bytes().count(b"\n") if resumed.exists() else 0
        assert child.pid
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL, "it finished before it was killed"
        kills += 1
        lines = resumed.read_bytes().count(b"\n")
        if kills % 2:
            with resumed.open("ab") as file:
                file.write(b'{"id": "arithmetic/9", "sample"')  # killed while a line was written
    assert lines < 41
    assert not (Path("killed") / "results.json").exists()
    run(monkeypatch, *argv, "killed")
    assert resumed.read_bytes().split(b"\n")[1:] == expected.read_bytes().split(b"\n")[1:]
    assert read_completions(resumed)[0].settings == read_completions(expected)[0].settings
    [entry], [other] = results(Path("killed")), results(Path("uninterrupted"))
    for name in ("environment", "graded_by"):  # the git revision may change while the tests run
        del entry[name], other[name]
    assert entry == other


def test_base_and_adapters_side_by_side(
    outputs: Path, adapters: list[Path], tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, *SMALL, "--runs", "base", "outputs/older", "outputs/older/best")
    directory = Path("outputs/evaluation")
    entries = {entry["label"]: entry for entry in results(directory)}
    assert list(entries) == [f"base-{tiny.name}", "older", "older-best"]
    base, older, best = entries.values()
    assert (base["adapter"], older["adapter"], best["adapter"]) == (
        None,
        "outputs/older/adapter",
        "outputs/older/best",
    )
    assert base["model"] == older["model"] == str(tiny)
    assert older["checkpoint"] == "last"
    assert base["settings"]["adapter"] is None
    assert older["settings"]["adapter"] != best["settings"]["adapter"]
    assert base["problems"] == len(base["per_problem"]) == 10
    assert base["settings"] | {"k": 4, "seed": 0, "temperature": 1.0, "batch_size": 3} == base["settings"]
    assert base["environment"]["packages"]["transformers"]
    assert {"grader", "git_revision", "math-verify", "timeouts"} == set(base["graded_by"])
    assert json.loads((directory / "older" / "arithmetic.json").read_text()) == older
    texts = [
        [row["completion"] for row in read_completions(directory / label / "arithmetic.jsonl")[1]] for label in entries
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        different = sum(a != b for a, b in zip(texts[one], texts[other], strict=True))
        assert different > 20  # of 40, with the same seeds

    # An adapter alone gives the same completions as beside the others.
    run(monkeypatch, *SMALL, "--runs", "outputs/older", "--output_dir", "alone")
    alone = Path("alone") / "older" / "arithmetic.jsonl"
    assert read_completions(alone)[1] == read_completions(directory / "older" / "arithmetic.jsonl")[1]

    # Stored completions are not sampled again; the table has the rows in the order of the flags.
    capsys.readouterr()
    monkeypatch.setattr(SAMPLER, lambda *_: pytest.fail("the model was loaded again"))
    run(monkeypatch, *SMALL, "--runs", "outputs/older", "base")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines if line and line[0] == tiny.name] == ["older", "base"]

    # Other settings are refused before a model is loaded.
    with pytest.raises(UsageError, match="seed was 0, is 1"):
        run(monkeypatch, *SMALL, "--runs", "outputs/older", "--seed", 1)
    shutil.copytree(adapters[1], outputs / "older" / "adapter", dirs_exist_ok=True)
    with pytest.raises(UsageError, match=r"adapter was '.*', is '"):
        run(monkeypatch, *SMALL, "--runs", "outputs/older")


def test_the_newest_run_is_evaluated_and_named(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(monkeypatch, *SMALL, "--k", 1)
    assert "evaluating outputs/demo/newer, the newest finished run; --runs selects others" in caplog.messages
    assert [entry["label"] for entry in results(Path("outputs/evaluation"))] == ["demo-newer"]


def test_the_command_line_overrides_the_file_of_settings(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("settings.yaml").write_text(
        f"benchmarks: [arithmetic, arithmetic_hard, arithmetic]\nmodel: {tiny}\nlimit: 2\nk: 3\nseed: 5\n"
        "max_new_tokens: 4\ntop_p: 0.5\nruns: null\noutput_dir: from-file\n"
    )
    run(monkeypatch, "--config", "settings.yaml", "--k", 1, "--output_dir", "from-flag")
    entries = results(Path("from-flag"))
    assert [entry["benchmark"] for entry in entries] == ["arithmetic", "arithmetic_hard"]
    expected = {"problems": 2, "k": 1, "seed": 5, "max_new_tokens": 4, "top_p": 0.5}
    for entry in entries:
        assert entry["settings"] | expected == entry["settings"]
    assert not Path("from-file").exists()


def test_overwrite_samples_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [*SMALL, "--model", tiny, "--output_dir", tmp_path]
    run(monkeypatch, *argv)
    path = tmp_path / f"base-{tiny.name}" / "arithmetic.jsonl"
    before = read_completions(path)[1]
    run(monkeypatch, *argv, "--seed", 1, "--overwrite")
    head, rows = read_completions(path)
    assert (head.settings["seed"], len(rows)) == (1, 40)
    assert results(tmp_path)[0]["settings"]["seed"] == 1
    run(monkeypatch, *argv, "--overwrite")
    assert read_completions(path)[1] == before


def test_a_larger_limit_and_k_keep_what_is_stored(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--benchmarks", "arithmetic", "--max_new_tokens", 4, "--model", tiny, "--output_dir", tmp_path]
    run(monkeypatch, *argv, "--limit", 2, "--k", 2)
    path = tmp_path / f"base-{tiny.name}" / "arithmetic.jsonl"
    before = read_completions(path)[1]
    run(monkeypatch, *argv, "--limit", 3, "--k", 4)
    head, rows = read_completions(path)
    assert rows[:4] == before and len(rows) == 12
    [entry] = results(tmp_path)
    assert (entry["problems"], entry["k"], head.settings["k"]) == (3, 4, 4)
    run(monkeypatch, "--regrade", "--output_dir", tmp_path)
    assert results(tmp_path)[0]["scores"] == entry["scores"]


def test_shards_sample_what_one_evaluation_samples(
    tiny: Path,
    adapters: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three disjoint parts of whole batches, then the merge: no completion and no score differs."""

    def rows_of(path: Path) -> dict[tuple[str, int], dict]:
        rows = read_completions(path)[1]
        assert len({(row["id"], row["sample"]) for row in rows}) == len(rows)
        return {(row["id"], row["sample"]): row for row in rows}

    argv = [*SMALL, "--runs", "base", adapters[0]]
    run(monkeypatch, *argv, "--output_dir", tmp_path / "one")
    [expected] = results(tmp_path / "one")[:1]
    capsys.readouterr()
    for shard in ("1/3", "2/3", "3/3"):
        run(monkeypatch, *argv, "--output_dir", tmp_path / "shards", "--shard", shard)
        assert capsys.readouterr().out.startswith(f"Shard {shard} is stored")
    assert not [path for path in (tmp_path / "shards").rglob("*") if path.suffix in (".json", ".jsonl")]
    wholes = sorted((tmp_path / "one").glob("*/arithmetic.jsonl"))
    assert len(wholes) == 2
    for whole in wholes:
        parts = [tmp_path / "shards" / whole.parent.name / f"arithmetic.jsonl.shard-{n}-of-3" for n in (1, 2, 3)]
        assert [len(rows_of(part)) for part in parts] == [15, 13, 12]  # 14 batches of 3, the last one of 1
        together = [item for part in parts for item in rows_of(part).items()]
        assert len(together) == 40 and dict(together) == rows_of(whole)
    monkeypatch.setattr(SAMPLER, lambda *_: pytest.fail("a model was loaded"))
    run(monkeypatch, *argv, "--output_dir", tmp_path / "shards")
    for whole in wholes:
        merged = tmp_path / "shards" / whole.relative_to(tmp_path / "one")
        assert rows_of(merged) == rows_of(whole)
        assert {path.name for path in merged.parent.iterdir()} == {"arithmetic.jsonl", "arithmetic.json"}
    [found] = results(tmp_path / "shards")[:1]
    assert (found["scores"], found["settings"]) == (expected["scores"], expected["settings"])


def test_shards_complete_what_is_stored(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted evaluation is split, then split in another way; what no shard has, the merge samples."""
    argv = [*SMALL, "--model", tiny, "--output_dir", tmp_path]
    run(monkeypatch, *argv)
    path = tmp_path / f"base-{tiny.name}" / "arithmetic.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:10]))  # three batches of 3 completions
    sampled: list[int] = []
    bar = "gtpo.runs.bars.CompletionBar.count_completions"
    monkeypatch.setattr(bar, lambda self, rows: sampled.append(len(rows)))
    for shard, new in (("1/2", 15), ("1/2", 0), ("2/4", 7)):  # batches 0, 2, ... and 1, 5, 9, 13 without the first 3
        run(monkeypatch, *argv, "--shard", shard)
        assert sum(sampled) == new, shard
        sampled.clear()
    run(monkeypatch, *argv)
    assert sum(sampled) == 40 - 9 - 15 - 7
    assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted(lines)
    assert list(path.parent.glob("*shard*")) == []


def test_ctrl_c_says_how_to_resume(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gtpo.evaluation.jobs.run_job", interrupt)
    monkeypatch.setattr(
        sys, "argv", ["evaluate.py", *map(str, SMALL), "--model", str(tiny), "--output_dir", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as ended:
        run_script(evaluate.main)
    assert ended.value.code == 130
    assert "evaluate.py: interrupted; continue with: python evaluate.py --benchmarks" in capsys.readouterr().err


def test_regrade_grades_stored_completions_without_a_model(
    store: Callable[..., Path],
    texts_by_hand: dict[str, list[str]],
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SAMPLER, lambda *_: pytest.fail("a model was loaded"))
    path = store(texts_by_hand)
    store(texts_by_hand, "other")
    run(monkeypatch, "--regrade", "--output_dir", tmp_path, "--benchmarks", "arithmetic")
    assert [entry["label"] for entry in results(tmp_path)] == ["other", "run"]
    assert results(tmp_path)[1]["scores"]["pass"]["4"] == pytest.approx(200 / 3, abs=1e-5)
    wrong, gold = texts_by_hand["arithmetic/2"][1], load_benchmark("arithmetic")[2].gold
    right = wrong.replace(str(int(gold) + 1), gold)
    path.write_text(path.read_text().replace(json.dumps(wrong), json.dumps(right)))
    run(monkeypatch, "--regrade", "--output_dir", tmp_path)
    assert [entry["scores"]["pass"]["4"] for entry in results(tmp_path)] == pytest.approx([200 / 3, 100.0], abs=1e-5)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    for more, named in (([], "has 11 of 12"), (["--model", tiny, "--benchmarks", "arithmetic"], "--regrade")):
        with pytest.raises(UsageError, match=named):
            run(monkeypatch, "--regrade", "--output_dir", tmp_path, *more)


def test_your_benchmark_is_evaluated_beside_ours_and_graded_again_from_what_is_stored(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text('task,gold\n1 + 1?,2\n"Two, and two?",004\n3 + 3?,$\n')
    argv = ["--model", tiny, "--k", 2, "--max_new_tokens", 3, "--output_dir", "out", "--limit", 2]
    columns = ["--prompt_column", "task", "--answer_column", "gold"]
    run(monkeypatch, *argv, *columns, "--benchmarks", "mine.csv", "arithmetic")
    assert {entry["benchmark"] for entry in results(Path("out"))} == {"arithmetic", "mine"}
    screen = capsys.readouterr().out
    assert "mine: 2 problems, k = 2" in screen and "Arithmetic: 2 problems" in screen
    own = next(entry for entry in results(Path("out")) if entry["benchmark"] == "mine")
    assert [problem["gold"] for problem in own["per_problem"]] == ["2", "004"]
    assert own["data"] == {"source": "mine.csv", "data_dir": None, "dataset_config": None, "split": None} | {
        "prompt_column": "task",
        "answer_column": "gold",
        "answer_list": "any",
        "grader": None,
    }
    assert own["dropped"] == {"without a readable gold answer": 1}
    assert "Rows dropped: 1 without a readable gold answer" in screen
    # a corrected gold answer: the completions are kept, and graded with the stored file and columns
    path = next(Path("out").glob("*/mine.jsonl"))
    path.write_text(path.read_text().replace('"completion": "', '"completion": "<answer>5</answer>'))
    Path("mine.csv").write_text('task,gold\n1 + 1?,2\n"Two, and two?",5\n')
    run(monkeypatch, "--regrade", "--output_dir", "out")
    own = next(entry for entry in results(Path("out")) if entry["benchmark"] == "mine")
    assert [(problem["gold"], problem["correct"]) for problem in own["per_problem"]] == [("2", "00"), ("5", "11")]
    Path("mine.csv").write_text("task,gold\nAnother?,2\n")
    with pytest.raises(UsageError, match="different problems"):
        run(monkeypatch, "--regrade", "--output_dir", "out", "--benchmarks", "mine.csv")
    with pytest.raises(UsageError, match="other settings"):
        run(monkeypatch, *argv, *columns, "--benchmarks", "mine.csv")
