"""evaluate.py from the flags to the table: what is evaluated, that a kill loses nothing, scores by hand."""

import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import evaluate
from config import UsageError
from data import BENCHMARK_NAMES, load_benchmark
from sampling import read_completions

ROOT = Path(__file__).parents[1]


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
    evaluate.main()


def results(folder: Path) -> list[dict]:
    return json.loads((folder / "results.json").read_text())["results"]


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of the tiny model with different weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
        lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        folders.append(tmp_path_factory.mktemp("adapter"))
        get_peft_model(model, lora).save_pretrained(folders[-1])
    return folders


@pytest.fixture
def outputs(adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose outputs/ holds an older and a newer finished run, and one that is still training."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs"
    for age, name in enumerate(("demo/newer", "older")):
        shutil.copytree(adapters[0], folder / name / "adapter")
        written = time.time() - 1000 * age
        os.utime(folder / name / "adapter" / "adapter_config.json", (written, written))
    shutil.copytree(adapters[1], folder / "older" / "best")
    shutil.copytree(adapters[1], folder / "unfinished" / "checkpoint-50")
    shutil.copytree(adapters[1], folder / "unfinished" / "adapter.tmp")
    return folder


# Starting


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


def test_without_a_run_and_without_a_gpu_it_ends_in_one_sentence_that_says_what_to_do(tmp_path: Path) -> None:
    words = ["--benchmarks", "aime24", "aime25", "amc23", "--k", "64"]
    ended = subprocess.run(
        [sys.executable, ROOT / "evaluate.py", *words],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "evaluate.py: no finished run under outputs/: train one (`python train_gtpo.py --model tiny --dataset "
        "arithmetic` on a CPU), name a run with --adapter RUN, or evaluate a base model with --model tiny.\n"
    )
    assert not list(tmp_path.iterdir())


def test_every_benchmark_has_a_title() -> None:
    assert tuple(evaluate.TITLES) == BENCHMARK_NAMES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--benchmarks is missing: name one or more of gsm8k, math, math500"),
        ("--benchmarks amc", r"benchmark 'amc' is unknown \(did you mean 'amc23'\?\)"),
        ("--benchmarks gsm8k --k 0", "--k is 0: expected at least 1"),
        ("--benchmarks gsm8k --k x", "argument --k: invalid int value: 'x'"),
        ("--benchmarks gsm8k --limit 0", "--limit is 0: expected at least 1"),
        ("--benchmarks gsm8k --temperature -1", "--temperature is -1.0: expected a number >= 0"),
        ("--benchmarks gsm8k --temperature nan", "--temperature is nan: expected a number >= 0"),
        ("--benchmarks gsm8k --temperature 0", "--temperature 0 draws one completion 64 times: add --k 1"),
        ("--benchmarks gsm8k --top_p 0", "--top_p is 0.0: expected a number over 0"),
        ("--benchmarks gsm8k --seed -1", "--seed is -1: expected a whole number >= 0"),
        ("--benchmarks gsm8k --batch_size 0", "--batch_size is 0: expected at least 1"),
        ("--benchmarks gsm8k --max_new_tokens 0", "--max_new_tokens is 0: expected at least 1"),
        (
            "--benchmarks gsm8k --checkpoint newest",
            "--checkpoint is newest: expected last, best or the number of a step",
        ),
        ("--benchmarks gsm8k --backend unsloth", "argument --backend: invalid choice: 'unsloth'"),
        ("--benchmarks gsm8k --adaptor x", r"--adaptor is no flag \(did you mean '--adapter'\?\)"),
        ("--regrade --k 8", "--regrade reads --k from the stored completions"),
        ("--regrade --overwrite", "--regrade keeps the stored completions and --overwrite drops them"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate.parse(words.split())


def test_data_that_cannot_be_read_is_named_before_a_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"amc2023\.jsonl does not exist: --data_dir"):
        run(monkeypatch, "--benchmarks", "amc23", "--model", "no-such/model", "--data_dir", tmp_path)
    monkeypatch.setattr("data.load_dataset", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no route")))
    with pytest.raises(UsageError, match=r"cannot read math-ai/amc23 from the Hub: no route\. .* give --data_dir"):
        run(monkeypatch, "--benchmarks", "amc23", "--model", "no-such/model")


# What is evaluated


def test_the_newest_finished_run_is_found_and_named_aloud(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [target] = evaluate.find_targets(None, None, "last")
    assert target == evaluate.Target("demo-newer", Path("outputs/demo/newer/adapter"), "last")
    assert "outputs/demo/newer, the newest finished run under outputs/" in capsys.readouterr().out
    shutil.rmtree(outputs / "demo")
    [target] = evaluate.find_targets(None, None, "best")
    assert target == evaluate.Target("older@best", Path("outputs/older/best"), "best")


def test_runs_and_adapter_folders_and_base_are_targets(outputs: Path) -> None:
    targets = evaluate.find_targets(
        ["base", "outputs/older", "outputs/older/best", "outputs/demo/newer/"], None, "last"
    )
    assert [target.label for target in targets] == ["", "older", "older-best", "demo-newer"]
    assert [target.adapter for target in targets] == [
        None,
        Path("outputs/older/adapter"),
        Path("outputs/older/best"),
        Path("outputs/demo/newer/adapter"),
    ]
    [target] = evaluate.find_targets(["outputs/unfinished"], None, "50")
    assert target == evaluate.Target("unfinished@50", Path("outputs/unfinished/checkpoint-50"), "50")


@pytest.mark.parametrize(
    ("names", "checkpoint", "message"),
    [
        (["outputs/oldest"], "last", r"--adapter outputs/oldest is no folder \(did you mean 'outputs/older'\?\)"),
        (["outputs/unfinished"], "last", r"unfinished has no adapter/adapter_config.json: --checkpoint takes 50 here"),
        (["outputs/older"], "9", r"older has no checkpoint-9/.*: --checkpoint takes best, last here"),
        (["outputs"], "last", r"outputs has no adapter/.*: its training has not finished\."),
        (["outputs/older/best"], "best", "--checkpoint best is part of a run, and outputs/older/best is an adapter"),
        (["base"], "last", "--adapter base alone names no base model"),
        (["outputs/older", "outputs/older/"], "last", "two of --adapter are called 'older'"),
    ],
)
def test_what_is_no_adapter_is_refused(outputs: Path, names: list[str], checkpoint: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate.find_targets(names, None, checkpoint)


def test_of_several_runs_the_unfinished_is_left_out(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    targets = evaluate.find_targets(["base", "outputs/older", "outputs/unfinished"], None, "last")
    assert [target.label for target in targets] == ["", "older"]
    assert "Left out: outputs/unfinished has no adapter" in capsys.readouterr().out
    (Path("outputs") / "failed").mkdir()
    with pytest.raises(UsageError, match="none of --adapter outputs/unfinished outputs/failed is finished"):
        evaluate.find_targets(["outputs/unfinished", "outputs/failed"], None, "last")
    with pytest.raises(UsageError, match=r"outputs/failed has no adapter/.*: its training has not finished"):
        evaluate.find_targets(["base", "outputs/failed"], None, "last")


def rename_base(adapter: Path, base: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": base and str(base)}))


def test_the_adapter_names_its_base_model(outputs: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = evaluate.find_targets(["outputs/older", "outputs/demo/newer"], None, "last")
    assert evaluate.base_model([older, newer], None) == str(tiny)
    with pytest.raises(UsageError, match=r"--model .*older is not the model that the adapter was trained on, .*tiny0"):
        run(monkeypatch, "--benchmarks", "arithmetic", "--adapter", "outputs/older", "--model", outputs / "older")
    rename_base(newer.adapter, "meta-llama/Llama-3.1-8B-Instruct")
    with pytest.raises(
        UsageError, match=r"older/adapter was trained on .*tiny0 and outputs/demo/newer/adapter on meta-"
    ):
        evaluate.base_model([older, newer], None)
    rename_base(newer.adapter, "elsewhere/outputs/tiny/base-1")
    with pytest.raises(UsageError, match=r"elsewhere/outputs/tiny/base-1, which is not here: name the base model with"):
        evaluate.base_model([newer], None)
    rename_base(newer.adapter, None)
    with pytest.raises(UsageError, match="names no base_model_name_or_path"):
        evaluate.base_model([newer], None)
    (older.adapter / "adapter_model.safetensors").rename(older.adapter / "adapter_model.bin")
    with pytest.raises(UsageError, match=r"older/adapter has no adapter_model.safetensors; .* a pickle, is not read"):
        evaluate.base_model([older], None)
    (newer.adapter / "adapter_config.json").write_text("{")
    with pytest.raises(UsageError, match=r"cannot read .*adapter_config.json"):
        evaluate.base_model([newer], None)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-3B-Instruct", True),
        ("meta-llama/Llama-3.1-8B-Instruct", "unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit", True),
        ("Qwen/Qwen2.5-3B-Instruct", "unsloth/Qwen2.5-3B-Instruct-bnb-4bit", True),
        ("here/outputs/tiny/base-1", "/was/there/outputs/tiny/base-1", True),
        ("here/outputs/tiny/base-1", "here/../here/outputs/tiny/base-1", True),
        ("here/outputs/tiny/base-1", "here/outputs/tiny/base-2", False),
        ("Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct", False),
        ("Qwen/Qwen2.5-3B-Instruct", "someone/Qwen2.5-3B-Instruct", False),
    ],
)
def test_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, a: str, b: str, same: bool) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base-1", "base-2"):
        (tmp_path / "here" / "outputs" / "tiny" / name).mkdir(parents=True)
    assert evaluate.same_model(a, b) is same
    assert evaluate.same_model(b, a) is same


def test_the_papers_models_need_a_gpu_unless_insisted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "gpu_is_available", lambda: False)
    for name in ("llama", "qwen", "Qwen/Qwen2.5-3B-Instruct"):
        with pytest.raises(UsageError, match="needs a GPU and PyTorch sees none here"):
            run(monkeypatch, "--benchmarks", "arithmetic", "--model", name)
    evaluate.refuse_large_model_without_gpu("HuggingFaceTB/SmolLM2-135M-Instruct")


# Evaluating

SMALL = ["--benchmarks", "arithmetic", "--limit", 10, "--k", 4, "--max_new_tokens", 6, "--batch_size", 3]


def evaluate_in_child(folder: str, words: list[str]) -> None:
    os.chdir(folder)
    sys.argv = ["evaluate.py", *words]
    evaluate.main()


def test_five_kills_change_nothing(
    tiny: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 after a random number of lines, five times: completions and results equal the uninterrupted ones'."""
    monkeypatch.chdir(tmp_path)
    words = [str(word) for word in (*SMALL, "--adapter", adapters[0], "--output_dir")]
    run(monkeypatch, *words, "whole")
    [whole] = Path("whole").glob("*/arithmetic.jsonl")
    continued = Path("killed") / whole.relative_to("whole")

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_evaluate", "tracking", "peft", "transformers.models.llama.modeling_llama"])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")  # else the preloading finds nothing
    picks = random.Random(0)
    lines = kills = 0
    while kills < 5:
        goal = lines + picks.randint(1, 7)
        child = context.Process(target=evaluate_in_child, args=(str(tmp_path), [*words, "killed"]))
        child.start()
        while child.is_alive() and lines < goal:
            time.sleep(0.0005)
            lines = continued.read_bytes().count(b"\n") if continued.exists() else 0
        assert child.pid
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL, "it ended by itself: the kill came too late"
        kills += 1
        lines = continued.read_bytes().count(b"\n")
        if kills % 2:
            with continued.open("ab") as file:
                file.write(b'{"id": "arithmetic/9", "sample"')  # killed within a line
    assert lines < 41
    assert not (Path("killed") / "results.json").exists()
    run(monkeypatch, *words, "killed")
    assert continued.read_bytes().split(b"\n")[1:] == whole.read_bytes().split(b"\n")[1:]
    assert read_completions(continued)[0]["settings"] == read_completions(whole)[0]["settings"]
    [entry], [expected] = results(Path("killed")), results(Path("whole"))
    for name in ("environment", "graded_by"):  # the git revision may change while the tests run
        del entry[name], expected[name]
    assert entry == expected


def test_base_and_adapters_side_by_side(
    outputs: Path, adapters: list[Path], tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, *SMALL, "--adapter", "base", "outputs/older", "outputs/older/best")
    folder = Path("outputs/evaluation")
    entries = {entry["label"]: entry for entry in results(folder)}
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
    assert {"git_revision", "math-verify", "timeouts"} == set(base["graded_by"])
    assert json.loads((folder / "older" / "arithmetic.json").read_text()) == older
    texts = [
        [row["completion"] for row in read_completions(folder / label / "arithmetic.jsonl")[1]] for label in entries
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert sum(a != b for a, b in zip(texts[one], texts[other], strict=True)) > 20  # of 40; they share their seeds

    # An adapter alone is what it was beside the others.
    run(monkeypatch, *SMALL, "--adapter", "outputs/older", "--output_dir", "alone")
    alone = Path("alone") / "older" / "arithmetic.jsonl"
    assert read_completions(alone)[1] == read_completions(folder / "older" / "arithmetic.jsonl")[1]

    # The same command again draws nothing; the table holds the three rows in the order of the flags.
    capsys.readouterr()
    monkeypatch.setattr(evaluate, "load_sampler", lambda *_: pytest.fail("the model was loaded again"))
    run(monkeypatch, *SMALL, "--adapter", "outputs/older", "base")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines if line and line[0] == tiny.name] == ["older", "base"]

    # Other settings are refused before a model is loaded.
    with pytest.raises(UsageError, match="seed was 0, is 1"):
        run(monkeypatch, *SMALL, "--adapter", "outputs/older", "--seed", 1)
    shutil.copytree(adapters[1], outputs / "older" / "adapter", dirs_exist_ok=True)
    with pytest.raises(UsageError, match=r"adapter was '.*', is '"):
        run(monkeypatch, *SMALL, "--adapter", "outputs/older")


def test_overwrite_draws_anew(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*SMALL, "--model", tiny, "--output_dir", tmp_path]
    run(monkeypatch, *words)
    path = tmp_path / f"base-{tiny.name}" / "arithmetic.jsonl"
    before = read_completions(path)[1]
    run(monkeypatch, *words, "--seed", 1, "--overwrite")
    head, rows = read_completions(path)
    assert (head["settings"]["seed"], len(rows)) == (1, 40)
    assert results(tmp_path)[0]["settings"]["seed"] == 1
    run(monkeypatch, *words, "--overwrite")
    assert read_completions(path)[1] == before


def test_ctrl_c_says_how_to_continue(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sampling.complete", interrupt)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *SMALL, "--model", tiny, "--output_dir", tmp_path)
    assert ended.value.code == 130
    assert "the same command continues where it stopped" in capsys.readouterr().err


# Scores

ANSWER = "<reasoning>\nso\n</reasoning>\n<answer>\n{}\n</answer>"


def store(folder: Path, texts: dict[str, list[str]], name: str = "run") -> Path:
    """A finished file of completions: for each arithmetic problem its k texts."""
    rows = load_benchmark("arithmetic")[: len(texts)]
    path = folder / name / "arithmetic.jsonl"
    path.parent.mkdir(parents=True)
    settings = {
        "problems": len(rows),
        "problems_hash": evaluate.problems_hash(rows),
        "k": len(texts["arithmetic/0"]),
        "seed": 0,
    }
    lines: list[dict] = [{"settings": settings, "about": {"model": "some/model", "adapter": None}}]
    for problem, completions in texts.items():
        for sample, text in enumerate(completions):
            lines.append({"id": problem, "sample": sample, "completion": text, "tokens": 10 + sample, "finished": True})
    lines[1:] = random.Random(0).sample(lines[1:], len(lines) - 1)  # vLLM finishes them in any order
    lines[-1]["finished"] = False
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def completions_by_hand() -> dict[str, list[str]]:
    """Three problems, k = 4. r: right, w and v: two wrong answers, x: no answer; lower-case f: right without format.

    problem | samples | c | first right | majority of 4
    0       | w r r f | 3 | 2nd         | right (3 votes)
    1       | w w v r | 1 | 4th         | wrong (2 votes)
    2       | x w v x | 0 | none        | wrong (tie: w, seen first)
    """
    golds = [row["gold"] for row in load_benchmark("arithmetic")[:3]]
    texts = {}
    for i, (gold, samples) in enumerate(zip(golds, ("wrrf", "wwvr", "xwvx"), strict=True)):
        written = {
            "r": ANSWER.format(gold),
            "w": ANSWER.format(int(gold) + 1),
            "v": ANSWER.format(int(gold) + 2),
            "x": "I do not know.",
            "f": f"<answer>{gold}</answer>",
        }
        texts[f"arithmetic/{i}"] = [written[sample] for sample in samples]
    return texts


def test_scores_by_hand(tmp_path: Path) -> None:
    entry = evaluate.grade(store(tmp_path, completions_by_hand()), load_benchmark("arithmetic")[:3])
    # pass@1 = (3/4 + 1/4 + 0) / 3; pass@2: 1 - C(1,2)/C(4,2) = 1, 1 - C(3,2)/C(4,2) = 1/2, 0
    assert entry["scores"]["pass"] == pytest.approx({"1": 100 / 3, "2": 50.0, "4": 200 / 3}, abs=1e-5)
    assert entry["scores"]["pass_first_k"] == pytest.approx({"1": 0.0, "2": 100 / 3, "4": 200 / 3}, abs=1e-5)
    # Of two: problem 0 has a tie that the wrong answer opens.
    assert entry["scores"]["maj"] == pytest.approx({"1": 0.0, "2": 0.0, "4": 100 / 3}, abs=1e-5)
    assert entry["scores"]["format"] == pytest.approx(100 * 9 / 12)
    assert entry["scores"]["finished"] == pytest.approx(100 * 11 / 12, abs=1e-5)
    assert entry["scores"]["tokens"] == 11.5
    marks = [(p["id"], p["n"], p["c"], p["formatted"], p["correct"]) for p in entry["per_problem"]]
    assert marks == [
        ("arithmetic/0", 4, 3, 3, "0111"),
        ("arithmetic/1", 4, 1, 4, "0001"),
        ("arithmetic/2", 4, 0, 2, "0000"),
    ]
    # Of 27 equally likely resamples of (0.75, 0.25, 0) the mean is 0 in one (3.7 %) and 0.75 in one.
    assert entry["intervals"]["pass"]["1"] == [0.0, 75.0]


def test_completions_that_are_missing_are_not_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path, completions_by_hand())
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UsageError, match=r"holds 11 of 12 completions: run its evaluation again without --regrade"):
        run(monkeypatch, "--regrade", "--output_dir", tmp_path)


def test_regrade_grades_what_is_stored_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = completions_by_hand()
    path = store(tmp_path, texts)
    store(tmp_path, texts, name="other")
    run(monkeypatch, "--regrade", "--output_dir", tmp_path, "--benchmarks", "arithmetic")
    assert [entry["label"] for entry in results(tmp_path)] == ["other", "run"]
    assert results(tmp_path)[1]["scores"]["pass"]["4"] == pytest.approx(200 / 3, abs=1e-5)
    wrong, right = texts["arithmetic/2"][1], ANSWER.format(load_benchmark("arithmetic")[2]["gold"])
    path.write_text(path.read_text().replace(json.dumps(wrong), json.dumps(right)))
    run(monkeypatch, "--regrade", "--output_dir", tmp_path)
    assert [entry["scores"]["pass"]["4"] for entry in results(tmp_path)] == pytest.approx([200 / 3, 100.0], abs=1e-5)

    path.write_text(
        path.read_text().replace(json.loads(path.read_text().splitlines()[0])["settings"]["problems_hash"], "")
    )
    with pytest.raises(UsageError, match="was made from other problems than arithmetic has now"):
        run(monkeypatch, "--regrade", "--output_dir", tmp_path)
    with pytest.raises(UsageError, match=r"no stored completions under .*: evaluate first"):
        run(monkeypatch, "--regrade", "--output_dir", tmp_path / "elsewhere")


def test_regrade_of_named_adapters_draws_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*SMALL, "--model", tiny, "--output_dir", tmp_path]
    monkeypatch.setattr(evaluate, "load_sampler", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(UsageError, match="holds no completions: run the evaluation without --regrade"):
        run(monkeypatch, *words, "--regrade")


def test_the_table_has_the_columns_of_the_paper() -> None:
    def entry(label: str, benchmark: str, k: int, scores: list[float]) -> dict:
        ks = [2**i for i in range(k.bit_length())]
        values = {str(k): score for k, score in zip(ks, scores, strict=True)}
        return {
            "label": label,
            "benchmark": benchmark,
            "problems": 40,
            "k": k,
            "model": "Qwen/Qwen2.5-3B-Instruct",
            "adapter": None if label == "base" else label,
            "scores": {
                "pass": values,
                "pass_first_k": {k: value / 2 for k, value in values.items()},
                "maj": {k: value / 4 for k, value in values.items()},
                "format": 97.5,
            },
            "intervals": {"pass": {"1": [30.0, 45.04]}},
        }

    base = entry("base", "amc23", 8, [37.5, 0, 40, 65])
    gtpo = entry("gtpo-gsm8k", "amc23", 8, [40, 0, 52, 100])
    elsewhere = entry("gtpo-gsm8k", "aime24", 1, [3.333])
    assert evaluate.table([base, elsewhere, gtpo]).splitlines() == [
        "AMC 2023: 40 problems, k = 8",
        "-" * 110,
        "                                 Pass@k (%), unbiased  Pass@k (%), first k  Maj@k (%)    Format  Pass@1",
        "Model                Method          1     8               1     8              4     8  (%)     "
        "95 % interval",
        "-" * 110,
        "Qwen2.5-3B-Instruct  base         37.5  65.0            18.8  32.5           10.0  16.2  97.5    30.0 to 45.0",
        "Qwen2.5-3B-Instruct  gtpo-gsm8k   40.0 100.0            20.0  50.0           13.0  25.0  97.5    30.0 to 45.0",
        "-" * 110,
        "",
        "AIME 2024: 40 problems, k = 1",
        "-" * 108,
        "                                 Pass@k (%), unbiased  Pass@k (%), first k  Maj@k (%)  Format  Pass@1",
        "Model                Method          1                     1                    1      (%)     95 % interval",
        "-" * 108,
        "Qwen2.5-3B-Instruct  gtpo-gsm8k    3.3                   1.7                  0.8      97.5    30.0 to 45.0",
        "-" * 108,
    ]


@pytest.mark.parametrize(
    ("k", "pass_columns", "maj_columns"),
    [
        (1, [1], [1]),
        (4, [1, 4], [4]),
        (8, [1, 8], [4, 8]),
        (12, [1, 8, 12], [4, 8, 12]),
        (64, [1, 8, 16, 32, 64], [4, 8, 16, 32, 64]),
        (100, [1, 8, 16, 32, 64, 100], [4, 8, 16, 32, 64, 100]),
    ],
)
def test_columns(k: int, pass_columns: list[int], maj_columns: list[int]) -> None:
    assert evaluate.columns_up_to(k, evaluate.PASS_COLUMNS) == pass_columns
    assert evaluate.columns_up_to(k, evaluate.MAJ_COLUMNS) == maj_columns
    reported = {2**power for power in range(int(math.log2(k)) + 1)} | {k}
    assert set(pass_columns) | set(maj_columns) <= reported
