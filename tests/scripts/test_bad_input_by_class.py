"""Bad input by class: one sentence that names the flag, exit code 2, before a model is loaded, and no file is left."""

import contextlib
import importlib
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers.files import read_json, tables_of, write_json
from helpers.scripts import ROOT

from examples.tiny_base import save_untrained_tiny
from gtpo.arguments import name_of
from gtpo.runs.script import run_script

TABLES = tables_of(__file__)

TRAIN = ["--model", "tiny", "--G", "4", "--dry_run", "--dataset"]
ARITHMETIC = [*TRAIN, "arithmetic"]
FLAGS = """
--learning_rate fast|--learning_rate nan|--adam_epsilon inf|--logging_steps nan|--temperature 0|--temperature -1
--temperature inf|--gamma -0.1|--gamma nan|--entropy_threshold -1|--entropy_filter maybe|--conflict_span whole
--conflict_positive_weight -1|--conflict_positive_weight inf|--conflict_correction perhaps|--initial_entropy -2
--G 1|--G 2.5|--beta 0.1|--prompts_per_step 0|--max_steps -5|--max_completion_length 0
--max_completion_length -3|--max_prompt_length -1|--lora_rank -1
--backend jax|--merge 8bit|--optim adamx|--lr_scheduler_type zigzag|--warmup_steps -4
--save_steps 0|--save_steps -2|--num_iterations 0|--num_iterations -1|--top_p 1.5|--top_k -2
--min_p 2|--max_grad_norm -1|--lora_alpha 16|--gama 0.1|--loss_type cispo|--weight_decay -1
--per_device_train_batch_size 0|--gradient_accumulation_steps 0|--steps_per_generation 0|--loss_type magic
--scale_rewards sometimes|--epsilon -1|--nonsense 1|--learnin_rate 1|extra|--config nowhere.yaml|--run_name a/b
--eval_rows 0|--eval_rows 4000|--eval_rows 5000|--eval_steps 3|--limit 0|--split dev
--dataset_config main|--reward speed|--reward format format|--reward nowhere.py:f|--reward os:getcwd
--system_prompt missing.txt|--chat_template missing.jinja|--model_init_kwargs {"x":1}|--eval_split x
--hub_model_id a/b/c|--resume nowhere|--resume|--config|--lora_rank 0 --merge 16bit|--lora_rank 0 --load_in_4bit true
--gpu_memory_utilization 2|--num_generations_eval 2|--prompt_column task|--answer_column gold
--bf16 --fp16|--remove_unused_columns true
--model nowhere/at/all|--model /etc|--lora_target_modules|--lora_target_modules lm_head
--lora_target_modules all-linear q_proj|--gamma much|--gamma|--gamma inf|--initial_entropy nan|--G two|--G 1000000
--max_steps 999999999999999999999|--max_steps 0|--max_steps -1 --num_train_epochs 0|--repetition_penalty 0
--max_seq_length 0|--save_only_model|--resume_from_checkpoint x|--save_total_limit 0
--model tinny|--model gpt2|--max_completion_length 1025|--bf16 maybe|--learning 1
--per_device_train_batch_size 5|--reward_weights nan nan
--resume --overwrite|--gpu_memory_utilization 0|--save_strategy best|--eval_steps 0 --eval_rows 9
--num_generations_eval 0 --eval_rows 9|--eval_strategy steps|--eval_on_start true|--metric_for_best_model reward
--per_device_eval_batch_size 4 --num_generations_eval 3 --eval_rows 9|--load_best_model_at_end true --eval_rows 9
--eval_rows -1|--reward missing.py|--reward broken.py:f|--reward exits.py:f|--reward exits.py
--backend vllm|--reward json:no_such_function|--reward no_such_module:fn|--modle x
--epsilon_high -1|--num_completions_to_print -1|--per_device_eval_batch_size 0|--eval_delay 2|--greater_is_better true
"""
TRAINED = """
--learning_rate -1e-3|--adam_beta1 1.0|--seed 99999999999|--fsdp full_shard|--lr_scheduler_kwargs bad
--lr_scheduler_type cosine_with_min_lr|--optim_args garbage|--lora_target_modules nothing|--max_prompt_length 3
--lora_target_modules v_proj q_prj
--model no_eos|--report_to paper|--cache_implementation foo|--load_in_4bit true|--backend unsloth
"""  # without --dry_run: what torch, TRL, Transformers and PEFT refuse, and what the tokenizer shows
QUOTED = TABLES["quoted"]
ASKED = '"prompt": "a", "answer": "1"'
DATA: dict[str, str | bytes] = TABLES["data"] | {
    "binary.jsonl": b"\xff\xfe\x00a",
    "utf16.csv": "prompt,answer\na,1\n".encode("utf-16"),
    "latin.csv": "prompt,answer\né,1\n".encode("latin-1"),
    "x.jsonl.gz": b"\x1f\x8b",
    "deep.jsonl": f'{{{ASKED}, "x": {"[" * 600}{"]" * 600}}}',
    "integer.jsonl": f'{{{ASKED}, "n": {"9" * 400}}}',
}
START = ["--model", "tiny", "--dataset", "arithmetic", "--G", "4", "--prompts_per_step", "1", "--initial_entropy", "1"]
START += ["--max_steps", "1", "--max_completion_length", "4", "--limit", "100", "--output_dir", "run", "--overwrite"]
OF_ANY_METHOD = ["--model", "tiny", "--dataset", "arithmetic", "--max_steps", "1", "--output_dir", "run"]
SETTINGS = TABLES["settings"] | {"deep.yaml": ("[" * 5000, "deep.yaml")}  # --config: the file, and the named key
EVALUATE = ["--model", "tiny", "--benchmarks"]
EVALUATION = """
nothing|arithmetic --k 0|arithmetic --k -1|arithmetic --k 1000000000|arithmetic --limit 0|arithmetic --max_new_tokens 0
arithmetic --temperature -1|arithmetic --top_p 0|arithmetic --top_p 2|arithmetic --grader nowhere.py:f
arithmetic --temperature nan|arithmetic --seed -1|arithmetic --batch_size 0
arithmetic --modle x|arithmetic --regrade --k 8|arithmetic --regrade --overwrite
arithmetic --output_dir=|arithmetic --compare a b|amc2023
no_column.jsonl|object.jsonl
gsm8k --data_dir /nowhere|arithmetic --runs /nowhere|arithmetic --backend cuda
"""
OTHERS = """
evaluate --compare a|evaluate --compare /nowhere /nowhere2|evaluate --regrade --output_dir /nowhere|figures fig99
figures --runs /nowhere|figures --compare /nowhere|figures --search /nowhere|figures --window 0 --runs /nowhere
figures --output x --runs /nowhere|reproduce fig99|reproduce
reproduce fig3 --only zzz --list|reproduce fig3 --jobs 0|reproduce fig3 --gpus 0 0
reproduce smol --list|reproduce fig3 --slurm x|reproduce spans --scale paper|reproduce fig3 --scale paper --jobs 4
"""


CODE = TABLES["code"]  # rewards and objectives


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().replace("\n", "|").split("|")]


# script, arguments, and those of which the sentence names one
COMMANDS = {
    "flags": [("train_gtpo", [*ARITHMETIC, *flags], flags) for flags in (*words(FLAGS), *QUOTED)],
    "files of settings": [
        ("train_gtpo", [*ARITHMETIC, "--config", name], [key]) for name, (_, key) in SETTINGS.items()
    ],
    "data": [("train_gtpo", [*TRAIN, name], []) for name in (*DATA, ".", "/nowhere.jsonl", "", "gsm8", "loop.csv")],
    "training": [("train_gtpo", [*START, *flags], []) for flags in words(TRAINED)],
    "evaluation": [("evaluate", [*EVALUATE, *argv], argv) for argv in words(EVALUATION)],
    "other scripts": [(script, argv, []) for script, *argv in words(OTHERS)],
}


@pytest.fixture
def inputs(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with all files that are named."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr("gtpo.processes._training", False)
    for name, content in (DATA | CODE | {name: text for name, (text, _) in SETTINGS.items()}).items():
        (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (here / "unsolved.jsonl").write_text(f"{{{ASKED}}}\n" * 4)
    tokenizer = save_untrained_tiny(here / "no_eos") / "tokenizer_config.json"
    write_json(tokenizer, read_json(tokenizer) | {"eos_token": None})
    (here / "loop.csv").symlink_to("loop.csv")
    return here


def outcome(script: str, argv: list[str]) -> tuple[object, list[str]]:
    """Exit code, and the lines on stderr, of a script in this process."""
    errors = io.StringIO()
    main = importlib.import_module(script).main
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(sys, "argv", [f"{script}.py", *argv])
        patch.setenv("ACCELERATE_USE_FSDP", "false")  # --fsdp sets it
        with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as exit_:
            run_script(main)
    return exit_.value.code, errors.getvalue().strip().splitlines()


@pytest.mark.parametrize("kind", COMMANDS)
def test_bad_input_ends_in_one_sentence_and_leaves_nothing(kind: str, inputs: Path) -> None:
    before = sorted(inputs.rglob("*"))
    wrong = {}
    for script, argv, named in COMMANDS[kind]:
        code, lines = outcome(script, argv)
        last = lines[-1] if lines else ""
        names = [name_of(word.removeprefix("--").rstrip("=")) for word in named]
        is_named = not names or any(name in last for name in names)
        if code != 2 or not is_named or not last.startswith(f"{script}.py: ") or "Traceback" in "".join(lines):
            wrong[json.dumps([script, *argv])] = code, last
    assert wrong == {}, json.dumps(wrong, indent=1)
    if kind == "training":
        shutil.rmtree(inputs / "run")  # of those that are refused when the trainer is built; the next one takes it
    assert sorted(inputs.rglob("*")) == before


@pytest.mark.parametrize(("script", "given", "said"), TABLES["sentences"])
def test_the_sentence_is_ours_and_says_what_to_do(script: str, given: str, said: str, inputs: Path) -> None:
    begin = {"evaluate": [*EVALUATE, "arithmetic"], "train_gtpo": START}.get(script, OF_ANY_METHOD)
    code, lines = outcome(script, [*begin, *given.split()])
    assert code == 2 and re.search(said, lines[-1]), lines
    assert not (inputs / "run").exists()
