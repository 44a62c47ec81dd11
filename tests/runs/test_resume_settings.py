"""What --resume may change: every other setting, and other rows, are refused by name."""

from pathlib import Path
from typing import Any

import pytest
from helpers.files import read_json, write_json, write_lines
from helpers.refusals import refused
from helpers.runs import checkpoint
from helpers.settings import CLASSES, parsed
from pytest import LogCaptureFixture, MonkeyPatch

from gtpo.arguments import fields_of
from gtpo.grading.user_functions import load_rewards
from gtpo.runs.directory import MAY_CHANGE, RunDirectory
from gtpo.runs.provenance import prompt_keys
from gtpo.runs.start import check_run, start_run

ROWS = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(30)]
SMALL = ("--num_generations", "4", "--prompts_per_step", "2")


def begin(run: Path, *argv: str, rows: Any = ROWS, held_out: Any = None, method: str = "gtpo") -> None:
    """A run with a checkpoint of step 5 of 10."""
    flags = SMALL if method != "sft" else ()
    settings = parsed("--output_dir", str(run), "--max_steps", "10", *flags, *argv, method=method)
    check_run(settings, rows, held_out)
    start_run(settings)
    checkpoint(run, 5)


def resume(run: Path, *argv: str, rows: Any = ROWS, held_out: Any = None, method: str = "gtpo") -> str | None:
    return check_run(parsed("--resume", str(run), *argv, method=method), rows, held_out)


@pytest.mark.parametrize(
    "words",
    [
        "--learning_rate 1e-5",
        "--lr_scheduler_type constant",
        '--lr_scheduler_kwargs {"num_cycles":2}',
        "--warmup_steps 3",
        "--optim sgd",
        "--optim_args beta1=0.5",
        "--adam_beta1 0.5",
        "--adam_beta2 0.5",
        "--adam_epsilon 1e-3",
        "--weight_decay 0.5",
        "--loss_type dapo",
        "--scale_rewards none",
        "--reward_weights 1 2",
        "--num_generations 8",
        "--num_iterations 2",
        "--steps_per_generation 2",
        "--initial_entropy 0.5",
        "--bf16 true",
        "--max_prompt_length 100",
        "--lora_rank 8",
        "--tags <a> </a> <b> </b>",
        "--model other/model",
        "--lora_target_modules q_proj",
        "--system_prompt none",
        "--chat_template {{ messages }}",
        '--chat_template_kwargs {"enable_thinking":false}',
        "--ignore_data_skip true",
    ],
)
def test_what_lies_in_the_checkpoint_is_refused_by_name(words: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (flag, _, value) = words.partition(" ")
    begin(run)
    config = (run / "config.yaml").read_text()
    values = value.split() if flag == "--reward_weights" else [value]
    with refused(f"was started with {flag} .*--run_name.*--model {run}/checkpoint-5"):
        resume(run, flag, *values)
    assert (run / "config.yaml").read_text() == config


@pytest.mark.parametrize(
    "words",
    [
        *("--max_steps 20", "--save_steps 3", "--save_total_limit 2", "--logging_steps 2", "--disable_tqdm true"),
        *("--report_to wandb", "--gpu_memory_utilization 0.2", "--temperature 0.7", "--gamma 0.3", "--seed 7"),
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 4",
    ],
)
def test_what_a_resume_may_change_is_logged(words: str, tmp_path: Path, caplog: LogCaptureFixture) -> None:
    begin(tmp_path / "run")
    assert resume(tmp_path / "run", *words.split()) == str(tmp_path / "run" / "checkpoint-5")
    is_told = words.split()[0] not in ("--report_to",)
    assert (words.split()[0] in caplog.text) == is_told


def test_the_names_of_the_table_are_settings() -> None:
    known = {name for classes in CLASSES.values() for name in fields_of(classes)}
    named = [name for names in MAY_CHANGE.values() for name in names]
    assert len(named) == len({*named}) and {*named} <= known


def test_a_step_keeps_its_completions_with_other_processes(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    run = tmp_path / "run"
    begin(run, "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2")
    settings = parsed("--resume", str(run))
    monkeypatch.setenv("WORLD_SIZE", "2")  # parsed with it, torch would wait for the other process
    with refused(r"8 completions, and 16 with"):
        check_run(settings, ROWS)
    settings.trainer.gradient_accumulation_steps = 1
    assert check_run(settings, ROWS)


# ---- rows ----


def test_other_rows_are_refused_and_moved_ones_are_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(run, "--eval_rows", "4", held_out=ROWS[:4])
    same = {"rows": [dict(reversed(row.items())) for row in ROWS], "held_out": ROWS[:4]}
    assert resume(run, **same)  # the order of the columns is no change
    for other in ({"rows": ROWS[::-1]}, {"held_out": ROWS[1:5]}, {"held_out": None}, {"rows": [*ROWS, ROWS[0]]}):
        with refused("rows are not those"):
            resume(run, **(same | other))
    for gold in ("77", 1):
        with refused("rows are not those"):
            resume(run, rows=[row | {"answer": gold} for row in ROWS], held_out=ROWS[:4])


def test_the_seed_that_chose_the_held_out_rows_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(run, "--eval_rows", "4", held_out=ROWS[:4])
    with refused("rows are not those .* --seed"):
        resume(run, "--seed", "7", held_out=ROWS[1:5])


def test_untrained_rows_may_be_held_out_later(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "held_out.jsonl"
    write_lines(file, ROWS[:4])
    begin(run)
    assert resume(run, "--eval_dataset", str(file), held_out=ROWS[:4])


def test_a_data_file_may_move_but_not_change(tmp_path: Path) -> None:
    for name in ("first.jsonl", "moved.jsonl"):
        write_lines(tmp_path / name, ROWS)
    first = str(tmp_path / "first.jsonl")
    moved = str(tmp_path / "moved.jsonl")
    run = tmp_path / "run"
    begin(run, "--dataset", first)
    assert resume(run, "--dataset", moved)
    with refused("remove --dataset,"):
        resume(run, "--dataset", moved, rows=ROWS[:-1])
    with refused("remove --limit,"):
        resume(run, "--limit", "12", rows=ROWS[:12])


def test_an_earlier_run_without_a_hash_resumes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(run)
    environment = read_json(run / "environment.json")
    del environment["made_from"]
    write_json(run / "environment.json", environment)
    assert resume(run, rows=ROWS[::-1])
    with refused("remove --limit,"):
        resume(run, "--limit", "12", rows=ROWS[:12])


def test_a_changed_reward_is_refused_unless_it_is_said(here: Path, caplog: LogCaptureFixture) -> None:
    """It may be the repair of the error that stopped the run."""
    (here / "mine.py").write_text("def f(completions, **_):\n    return [1.0] * len(completions)\n")
    flags = ("--reward", "format", "mine.py:f")
    begin(here / "run", *flags)
    resume(here / "run", *flags)
    assert "mine.py" not in caplog.text
    (here / "mine.py").write_text("def f(completions, **_):\n    return [-1.0] * len(completions)\n")
    with refused("run was started with another mine.py:f: .* add --changed_reward true"):
        resume(here / "run", *flags)
    assert resume(here / "run", *flags, "--changed_reward", "true") == str(here / "run" / "checkpoint-5")
    assert "another mine.py:f" in caplog.text


# A file that the reward imports, directly or not, and how.
IMPORTED = {
    "helper.py": "import helper",
    "below.py": "from helper import S",  # helper imports it
    "lazy.py": "def g():\n    import lazy",
    "package/__init__.py": "from package.inner import T",
    "package/inner.py": "from package import inner",
    "package/sibling.py": "import package.inner",  # which imports it by a relative name
}


@pytest.mark.parametrize("name", IMPORTED)
@pytest.mark.parametrize("place", [".", "rewards"])  # the working directory, or another directory of the reward
def test_a_changed_module_of_a_reward_is_refused(name: str, place: str, here: Path, caplog: LogCaptureFixture) -> None:
    (here / place / "package").mkdir(parents=True)
    for file in {*IMPORTED, "unused.py"}:
        (here / place / file).write_text("S = 1\n")
    (here / place / "helper.py").write_text("import math, below\nimport gtpo.grading\nS = 1\n")
    (here / place / "package/inner.py").write_text("from . import sibling\nT = 1\n")
    (here / place / "mine.py").write_text(f"import numpy\n{IMPORTED[name]}\ndef f(completions, **_): pass\n")
    flags = ("--reward", f"{place}/mine.py:f")
    begin(here / "run", *flags)
    made_from = read_json(here / "run" / "environment.json")["made_from"]
    assert made_from.keys() <= {"rows", flags[1], *IMPORTED}  # neither numpy nor ours
    for unused in ("unused.py", "mine.txt"):
        (here / place / unused).write_text("S = -1\n")
    resume(here / "run", *flags)
    assert caplog.messages == []
    with (here / place / name).open("a") as file:
        file.write("S = -1\n")
    with refused(f"run was started with another {name}: restore the file"):
        resume(here / "run", *flags)
    assert resume(here / "run", *flags, "--changed_reward", "true")


def test_a_reward_of_a_module_has_its_file(here: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "pack").mkdir()
    for file in ("pack/__init__.py", "pack/of_mine.py", "mine.py"):
        (here / file).write_text("def f(completions, **_): pass\n")
    names = ["pack.of_mine:f", "mine:f"]
    load_rewards(names[:1], {}, [])
    begin(here / "run", "--reward", *names)
    for name, file in zip(names, ("pack/of_mine.py", "mine.py"), strict=True):
        before = (here / file).read_text()
        (here / file).write_text("def f(completions, **_): return 1\n")
        with refused(f"run was started with another {name}: "):
            resume(here / "run", "--reward", *names)
        (here / file).write_text(before)
    assert resume(here / "run", "--reward", *names)


def test_a_run_stores_the_prompts_of_all_its_training(here: Path) -> None:
    begin(here / "first", rows=[*ROWS, *ROWS], held_out=[{"prompt": "held out?"}])
    assert (here / "first" / "prompts.bin").stat().st_size == 8 * len(ROWS)
    settings = parsed("--output_dir", str(here / "second"), *SMALL)
    settings.model.initial_adapter = str(here / "first" / "adapter")
    check_run(settings, [{"prompt": f"{i} + 2?"} for i in range(10)])
    start_run(settings)
    stored = RunDirectory(here / "second").read_prompts()
    expected = prompt_keys([*(row["prompt"] for row in ROWS), *(f"{i} + 2?" for i in range(10))])
    assert stored == {*expected} and len(stored) == 40


# Another form of the question "What is 1 + 1?" -> whether it is the same prompt.
FORMS: list[tuple[Any, bool]] = [
    (" What is\n1 + 1? ", True),
    ([{"role": "user", "content": "What is 1 + 1?"}], True),
    ([{"role": "system", "content": "Think."}, {"role": "user", "content": "What is  1 + 1?"}], True),
    ("What is 1 + 2?", False),
    ([{"role": "user", "content": "Hi"}, {"role": "user", "content": "What is 1 + 1?"}], False),
]


@pytest.mark.parametrize(("form", "same"), FORMS)
def test_a_prompt_is_known_in_another_form(form: Any, same: bool) -> None:
    (plain,) = prompt_keys(["What is 1 + 1?"])
    assert (prompt_keys([form]) == [plain]) is same and len(plain) == 8
