"""What --resume may change: every other setting, and other rows, are refused by name."""

import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from helpers.files import read_json, write_json, write_lines
from helpers.refusals import refused
from helpers.runs import checkpoint
from helpers.settings import CLASSES, parsed
from pytest import LogCaptureFixture, MonkeyPatch

from gtpo.arguments import fields_of
from gtpo.files import fingerprint
from gtpo.grading.user_functions import load_rewards
from gtpo.models.hub import TINY_BASE
from gtpo.runs.directory import MAY_CHANGE, RunDirectory, write_manifest
from gtpo.runs.provenance import prompt_keys
from gtpo.runs.start import check_run, start_run

ROWS = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(30)]
SMALL = ("--num_generations", "4", "--prompts_per_step", "2")


def begin(run: Path, *argv: str, rows: Any = ROWS, held_out: Any = None) -> None:
    """A run with a checkpoint of step 5 of 10."""
    settings = parsed("--output_dir", str(run), "--max_steps", "10", *SMALL, *argv)
    check_run(settings, rows, held_out)
    start_run(settings)
    checkpoint(run, 5)


def resume(run: Path, *argv: str, rows: Any = ROWS, held_out: Any = None) -> str | None:
    return check_run(parsed("--resume", str(run), *argv), rows, held_out)


@pytest.fixture
def run(here: Path) -> Path:
    return here / "run"


@pytest.mark.parametrize(
    "words",
    [
        "--learning_rate 1e-5",
        "--lr_scheduler_type constant",
        """--lr_scheduler_kwargs '{"num_cycles":2}'""",
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
        '--tags "<a> </a> <b> </b>"',
        "--model other/model",
        "--lora_target_modules q_proj",
        "--system_prompt none",
        '--chat_template "{{ messages }}"',
        """--chat_template_kwargs '{"enable_thinking":false}'""",
        "--ignore_data_skip true",
    ],
)
def test_what_lies_in_the_checkpoint_is_refused_by_name(words: str, run: Path) -> None:
    begin(run)
    config = (run / "config.yaml").read_text()
    flag, *values = shlex.split(words)
    with refused(f"cannot be resumed with {flag} .*--run_name.*--model {run}/checkpoint-5"):
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
def test_what_a_resume_may_change_is_logged(words: str, run: Path, caplog: LogCaptureFixture) -> None:
    begin(run)
    assert resume(run, *words.split()) == str(run / "checkpoint-5")
    assert (words.split()[0] in caplog.text) is (words != "--report_to wandb")


@pytest.mark.parametrize(
    "words",
    [
        "--run_name other --data_dir . --merge 16bit --hub_private_repo true --push_to_hub true --hub_model_id a/b "
        "--save_strategy epoch --save_total_limit 2 --save_on_each_node true --num_train_epochs 2 --project a "
        "--log_completions_hub_repo a/b --trackio_space_id a --trackio_bucket_id a --trackio_static_space_id a",
        "--logging_steps 2 --logging_first_step true --logging_nan_inf_filter false --log_level debug "
        "--log_level_replica debug --log_on_each_node false --log_completions false --log_unique_prompts true "
        "--num_completions_to_print 3 --eval_steps 3 --eval_delay 2 --eval_on_start true --num_generations_eval 2 "
        "--per_device_eval_batch_size 4 --metric_for_best_model reward --greater_is_better true --eval_rows 4",
        "--logging_strategy epoch --eval_strategy epoch --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 4 --backend transformers --gpu_memory_utilization 0.2 "
        '--gradient_checkpointing true --gradient_checkpointing_kwargs {"use_reentrant":true} --ddp_timeout 9 '
        "--torch_empty_cache_steps 3 --dataloader_num_workers 1 --dataloader_pin_memory true "
        "--dataloader_prefetch_factor 2 --dataloader_persistent_workers true --vllm_mode server",
        "--vllm_enable_sleep_mode true --vllm_group_port 9 --vllm_server_timeout 9 "
        "--vllm_max_model_length 9 --vllm_server_port 9 --vllm_tensor_parallel_size 2 --vllm_server_host a "
        "--vllm_server_base_url http://a --seed 7 --top_p 0.5 --zero_advantage skip --entropy_threshold 0.5 "
        "--entropy_filter on --conflict_correction false --conflict_positive_weight 3 --conflict_span common "
        "--conflict_tokens tags --max_grad_norm 2 --max_completion_length 9",
        "--dataset own.jsonl --dataset_config a --split test --prompt_column q --answer_column a --answer_list all "
        "--solution_column s --limit 9 --eval_dataset own.jsonl --eval_split test --eval_rows 4",
    ],
)
def test_a_resume_may_change_them_together(words: str, run: Path, caplog: LogCaptureFixture) -> None:
    """Each is named, but for where the run is and what it sends elsewhere."""
    begin(run, "--eval_rows", "5", held_out=ROWS[:4])
    write_lines(Path("own.jsonl"), ROWS)
    assert resume(run, *words.split(), held_out=ROWS[:4])
    unsaid = {*MAY_CHANGE["place"], *MAY_CHANGE["remote"]}
    given = [flag for flag in re.findall(r"--(\w+)", words) if flag not in unsaid]
    assert [flag for flag in given if f"--{flag} " not in caplog.text] == []


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("gtpo", "use_cpu use_vllm vllm_gpu_memory_utilization eval_accumulation_steps log_multimodal"),
        ("gtpo", "hub_revision hub_strategy hub_always_push"),
        ("sft", "use_cpu dataset_num_proc eval_accumulation_steps hub_revision hub_strategy hub_always_push"),
    ],
)
def test_another_machine_may_have_other_values_of_them(method: str, names: str, run: Path) -> None:
    """Which a command line here refuses, or derives. A step of SFT takes 48 rows."""
    words = ("--output_dir", str(run), "--max_steps", "10")
    start_run(parsed(*words, method=method))
    checkpoint(run, 5)
    settings = parsed("--resume", str(run), method=method)
    settings.given |= dict.fromkeys(names.split(), "another")
    assert {*names.split()} <= settings.to_dict().keys() and check_run(settings, 2 * ROWS)
    settings.given["optim"] = "another"
    with refused("cannot be resumed with --optim another"):
        check_run(settings, 2 * ROWS)


def test_the_names_of_the_table_are_settings() -> None:
    known = {name for classes in CLASSES.values() for name in fields_of(classes)}
    known |= {"activation_checkpointing", "activation_checkpointing_kwargs"}  # of Transformers 5.24
    named = [name for names in MAY_CHANGE.values() for name in names]
    assert len(named) == len({*named}) and {*named} <= known


def test_a_step_keeps_its_completions_with_other_processes(run: Path, monkeypatch: MonkeyPatch) -> None:
    begin(run, "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2")
    settings = parsed("--resume", str(run))
    monkeypatch.setenv("WORLD_SIZE", "2")  # parsed with it, torch would wait for the other process
    with refused(r"completions of a step 16 \(before: 8\)"):
        check_run(settings, ROWS)
    settings.trainer.gradient_accumulation_steps = 1
    assert check_run(settings, ROWS)
    write_json(run / "environment.json", read_json(run / "environment.json") | {"world_size": 4})
    with refused(r"completions of a step 8 \(before: 32\)"):
        check_run(settings, ROWS)


def test_a_base_that_was_replaced_in_place_is_refused(run: Path) -> None:
    begin(run)
    config = run / "checkpoint-5" / "adapter_config.json"
    for fingerprint_, fits in ((fingerprint(TINY_BASE), True), ("of other files", False)):
        write_json(config, {"auto_mapping": {"base_fingerprint": fingerprint_}})
        write_manifest(config.parent)
        with nullcontext() if fits else refused("checkpoint-5 was trained from other files than .* has now"):
            assert resume(run)


# ---- rows ----


def test_other_rows_are_refused_and_moved_ones_are_not(run: Path) -> None:
    begin(run, "--eval_rows", "4", held_out=ROWS[:4])
    same = {"rows": [dict(reversed(row.items())) for row in ROWS], "held_out": ROWS[:4]}
    assert resume(run, **same)  # the order of the columns is no change
    for other in (
        {"rows": ROWS[::-1]},
        {"rows": [*ROWS, ROWS[0]]},
        {"rows": [ROWS[0] | {"answer": 1}, *ROWS[1:]]},
        {"held_out": ROWS[1:5]},
        {"held_out": None},
    ):
        with refused("resumed with changed (rows|held_out)"):
            resume(run, **(same | other))
    with refused("resumed with --seed 7 .*, changed held_out"):  # which chose the held-out rows
        resume(run, "--seed", "7", held_out=ROWS[1:5])


def test_untrained_rows_may_be_held_out_later(run: Path) -> None:
    write_lines(Path("held_out.jsonl"), ROWS[:4])
    begin(run)
    assert resume(run, "--eval_dataset", "held_out.jsonl", held_out=ROWS[:4])


def test_a_data_file_may_move_but_not_change(run: Path) -> None:
    for name in ("first.jsonl", "moved.jsonl"):
        write_lines(Path(name), ROWS)
    begin(run, "--dataset", "first.jsonl")
    moved = ("--dataset", "moved.jsonl")
    assert resume(run, *moved)
    for flags in (moved, ("--limit", "12")):
        with refused(f"resumed with {flags[0]} .*, changed rows"):
            resume(run, *flags, rows=ROWS[:12])


def test_an_earlier_run_without_a_hash_resumes(run: Path) -> None:
    begin(run)
    environment = read_json(run / "environment.json")
    del environment["made_from"]
    write_json(run / "environment.json", environment)
    assert resume(run, rows=ROWS[::-1])
    with refused("resumed with --limit 12"):
        resume(run, "--limit", "12", rows=ROWS[:12])


# ---- code of rewards ----

# Files that the reward imports, directly or not, and what they import.
IMPORTED = {"helper": "import math, package.inner, gtpo.grading", "package/inner": "from . import below"}
IMPORTED |= {"package/__init__": "", "package/below": "", "unused": ""}


@pytest.mark.parametrize("name", ["mine", "helper", "package/__init__", "package/inner", "package/below"])
@pytest.mark.parametrize("place", [Path(), Path("rewards")])  # the working directory, or another one of the reward
def test_changed_code_of_a_reward_is_refused_unless_said(
    name: str, place: Path, run: Path, caplog: LogCaptureFixture
) -> None:
    """It may be the repair of the error that stopped the run."""
    (place / "package").mkdir(parents=True)
    code = IMPORTED | {"mine": "import numpy\ndef f(completions, **_): import helper\n"}
    for file, text in code.items():
        (place / f"{file}.py").write_text(text)
    reward = ("--reward", f"{place}/mine.py:f")
    begin(run, *reward)
    made_from = read_json(run / "environment.json")["made_from"]
    assert len(made_from) == 6  # the rows and five files: neither numpy nor ours
    (place / "unused.py").write_text("S = -1\n")
    resume(run, *reward)
    assert caplog.messages == []
    (place / f"{name}.py").write_text(code[name] + "\nS = -1\n")
    told = f"changed {reward[1] if name == 'mine' else f'{name}.py'}"
    with refused(f"resumed with {told}: undo it or add --changed_reward true"):
        resume(run, *reward)
    assert resume(run, *reward, "--changed_reward", "true")
    assert told in caplog.text


def test_a_reward_of_a_module_has_its_file(here: Path, run: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(here)
    Path("pack").mkdir()
    for name in ("__init__", "of_mine"):
        Path(f"pack/{name}.py").write_text("def f(completions, **_): pass\n")
    load_rewards(["pack.of_mine:f"], {}, [])  # by which the module is known
    flags = ("--reward", "pack.of_mine:f")
    begin(run, *flags)
    Path("pack/of_mine.py").write_text("def f(completions, **_): return 1\n")
    with refused("resumed with changed pack.of_mine:f: "):
        resume(run, *flags)


# ---- prompts ----


def test_a_run_stores_the_prompts_of_all_its_training(here: Path) -> None:
    begin(here / "first", rows=[*ROWS, *ROWS], held_out=[{"prompt": "held out?"}])
    assert (here / "first" / "prompts.bin").stat().st_size == 8 * len(ROWS)
    settings = parsed("--output_dir", "second", *SMALL)
    settings.model.initial_adapter = "first/adapter"
    rows = [{"prompt": f"{i} + 2?"} for i in range(10)]
    check_run(settings, rows)
    start_run(settings)
    expected = {*prompt_keys(row["prompt"] for row in [*ROWS, *rows])}
    assert RunDirectory("second").read_prompts() == expected and len(expected) == 40


def test_a_prompt_is_known_in_another_form() -> None:
    """As text and as a conversation; the system prompt and white space do not count."""
    question = "What is 1 + 1?"
    user = {"role": "user", "content": question}
    same = [question, " What is\n1 + 1? ", [user], [{"role": "system", "content": "Think."}, user]]
    assert len({*prompt_keys(same)}) == 1
    assert len({*prompt_keys([question, "What is 1 + 2?", [{"role": "user", "content": "Hi"}, user]])}) == 3
