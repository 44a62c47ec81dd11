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
from gtpo.runs.directory import MAY_CHANGE
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
    with refused("was started with --seed"):
        resume(run, "--seed", "7", held_out=ROWS[:4])


def test_a_run_without_held_out_rows_may_get_some_that_it_did_not_train_on(tmp_path: Path) -> None:
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
    with refused("--dataset "):
        resume(run, "--dataset", moved, rows=ROWS[:-1])
    with refused("--limit "):
        resume(run, "--limit", "12", rows=ROWS[:12])


def test_a_run_of_an_earlier_revision_has_no_hash_and_resumes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(run)
    environment = read_json(run / "environment.json")
    del environment["made_from"]
    write_json(run / "environment.json", environment)
    assert resume(run, rows=ROWS[::-1])
    with refused("--limit "):
        resume(run, "--limit", "12", rows=ROWS[:12])


def test_a_reward_file_that_has_changed_is_said(here: Path, caplog: LogCaptureFixture) -> None:
    """It may be the repair of the error that stopped the run."""
    (here / "mine.py").write_text("def f(completions, **_):\n    return [1.0] * len(completions)\n")
    flags = ("--reward", "format", "mine.py:f")
    begin(here / "run", *flags)
    resume(here / "run", *flags)
    assert "mine.py" not in caplog.text
    (here / "mine.py").write_text("def f(completions, **_):\n    return [-1.0] * len(completions)\n")
    assert resume(here / "run", *flags) == str(here / "run" / "checkpoint-5")
    assert "another file of the reward mine.py:f" in caplog.text
