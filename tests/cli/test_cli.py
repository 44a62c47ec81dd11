"""Settings: precedence, errors for invalid values, and that the shipped presets are Listing 1 of the paper."""

import itertools
import math
import os
import re
import shlex
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.files import read_settings, tables_of, write_settings
from helpers.refusals import refused
from helpers.runs import fake_run
from helpers.settings import CLASSES, OURS, parsed
from hypothesis import given
from hypothesis import strategies as st
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch
from transformers import LlamaConfig, TrainerState
from trl import GRPOConfig

from gtpo.arguments import GTPOArguments, fields_of
from gtpo.cli import build
from gtpo.cli import presets as cli
from gtpo.cli.checks import check_batch
from gtpo.cli.derive import Earlier, batch_geometry, sizes_elsewhere
from gtpo.cli.parse import load_backend_of, parse, parse_evaluation, read_command_line
from gtpo.cli.presets import Preset
from gtpo.errors import UsageError
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.files import CONFIGS, read_yaml
from gtpo.models.plan import describe_plan
from gtpo.models.source import ModelSource, model_source
from gtpo.reports.summary import start_lines
from gtpo.runs.directory import MAY_CHANGE

TABLES = tables_of(__file__)
ON_CPU = ("--use_cpu", "true")  # without it Transformers refuses bf16 where there is no GPU


def settings(*argv: str, method: str = "gtpo") -> dict[str, Any]:
    """The resolved settings of a command line."""
    return parsed(*argv, method=method).to_dict()


def sizes(got: dict[str, Any]) -> list[int]:
    return [got["per_device_train_batch_size"], got["gradient_accumulation_steps"]]


def config_file(directory: Path, text: str) -> str:
    path = directory / "settings.yaml"
    path.write_text(text)
    return str(path)


def stored_run(path: Path, *argv: str) -> Path:
    """The config.yaml of a run with a checkpoint."""
    return fake_run(path, settings("--output_dir", str(path), *argv), steps=[1]).path


@pytest.fixture(autouse=True)
def one_process_without_gpu(no_gpu: None, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


# ---- precedence ----


def test_precedence_is_command_line_file_preset_default(tmp_path: Path) -> None:
    file = config_file(tmp_path, "learning_rate: 0.25\nweight_decay: 0.25\n")
    got = settings("--config", file, "--learning_rate", "0.5")
    assert got["learning_rate"] == 0.5  # command line, over file and preset
    assert got["weight_decay"] == 0.25  # file
    assert got["max_grad_norm"] == 0.1  # preset; TRL's default is 1.0
    assert got["top_p"] == GRPOConfig.top_p  # TRL's default


def test_model_in_the_config_file_selects_the_preset(tmp_path: Path, gpu: None) -> None:
    file = ("--config", config_file(tmp_path, "model: llama\n"))
    assert settings(*file, *ON_CPU)["lora_rank"] == 128
    assert settings(*file, "--model", "qwen", *ON_CPU)["lora_rank"] == 64


@pytest.mark.parametrize(("model", "backend", "preset", "without", "with_gpu"), TABLES["the_preset_of_a_model"])
@pytest.mark.parametrize("method", CLASSES)
def test_the_preset_of_a_model(
    method: str,
    model: str,
    backend: str | None,
    preset: str,
    without: str | None,
    with_gpu: str,
    monkeypatch: MonkeyPatch,
) -> None:
    source = ModelSource(model, model, model) if model.startswith("/models/") else model_source(model)
    planned = cli.preset_for(method, source, backend, dry_run=True)
    assert planned == Preset(method, preset, without or "gpu")
    if without:
        assert cli.preset_for(method, source, backend) == planned
    else:
        with refused("trains on a GPU"):
            cli.preset_for(method, source, backend)
    monkeypatch.setattr(cli, "gpu_is_available", lambda: True)
    for dry_run in (False, True):
        assert cli.preset_for(method, source, backend, None, dry_run) == Preset(method, preset, with_gpu)
        on_its_cpu = cli.preset_for(method, source, backend, True, dry_run)  # --use_cpu
        assert on_its_cpu == Preset(method, preset, without or "gpu")


# ---- your own model ----

OF_MACHINES = {*MAY_CHANGE["machine"], *MAY_CHANGE["batch"], "bf16", "load_in_4bit"}


def differing(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    return {name for name in first.keys() | second.keys() if first.get(name, "-") != second.get(name, "-")}


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
def test_your_model_has_equal_settings_for_all_methods(machine: str) -> None:
    """On a GPU the paper's presets would compare two optimizers and two KL terms."""
    gtpo, grpo, sft = (Preset(method, "own", machine).values() for method in CLASSES)
    assert differing(gtpo, grpo) <= {"use_bias_correction_kl", *fields_of([GTPOArguments])}
    assert grpo | {"adam_beta1": 0.9, "adam_beta2": 0.95, "beta": 0.0, "num_generations": 8} == grpo
    common = read_yaml(CONFIGS / "own.yaml")["all"].keys() | {"learning_rate"}
    assert len(common & sft.keys()) > 15 and not common & differing(sft, gtpo)


@pytest.mark.parametrize("model", ["own", "smol"])  # the prompts of smol have worked examples
@pytest.mark.parametrize("method", CLASSES)
def test_a_model_has_equal_settings_on_both_machines(method: str, model: str) -> None:
    on_cpu, on_gpu = (Preset(method, model, machine).values() for machine in ("cpu", "gpu"))
    found = differing(on_cpu, on_gpu)
    if model == "own" and method != "sft":
        found.remove("prompts_per_step")
        assert (on_cpu["prompts_per_step"], on_gpu["prompts_per_step"]) == (1, 4)
    assert {"bf16", "load_in_4bit", "gradient_checkpointing"} <= found <= OF_MACHINES
    assert ("use_vllm" in found) is (method != "sft")
    assert (on_cpu["use_cpu"], on_gpu["use_cpu"]) == (True, False)


@pytest.mark.parametrize("method", CLASSES)
def test_your_model_has_rate_and_lengths_of_its_config(method: str, tmp_path: Path) -> None:
    """The folder of a model of 0.6 billion parameters has a misleading name."""
    folder = tmp_path / "SmolLM2-135M-Instruct"
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 8}
    LlamaConfig(**shape, max_position_embeddings=1200).save_pretrained(folder)
    got = settings("--model", str(folder), method=method)
    expected = {"learning_rate": 2e-5, "max_seq_length": 1200, "max_prompt_length": 800}
    expected |= {"max_length": 1200} if method == "sft" else {"max_completion_length": 400}
    assert got | expected == got and math.prod(sizes(got)) == 8


@pytest.mark.parametrize(("parameters", "context", "expected"), TABLES["rate_by_size_and_lengths_within_the_context"])
def test_rate_by_size_and_lengths_within_the_context(parameters: float, context: float, expected: list[float]) -> None:
    got = Preset("grpo", "own", "cpu").values_for(parameters, context)
    names = ("learning_rate", "max_seq_length", "max_prompt_length", "max_completion_length")
    assert [got[name] for name in names] == expected
    assert Preset("sft", "own", "cpu").values_for(parameters, context)["max_length"] == expected[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seed: 010", "settings.yaml, line 2: YAML reads 010 as 8: write that, or a text in quotes"),
        ("limit: 1_000", "line 2: YAML reads 1_000 as 1000"),
        ("limit: 0x10", "line 2: YAML reads 0x10 as 16"),
        ("learning_rate: 1:30.5", "line 2: YAML reads 1:30.5 as 90.5"),
        ("run_name: 007", "line 2: YAML reads 007 as 7"),
        ("system_prompt: no", "settings.yaml: system_prompt is False, as YAML reads what has no quotes: put the text"),
        ("run_name: 1.50", "settings.yaml: run_name is 1.5, as YAML"),
        ("stop_on_collapse: off\nrun_name: 12:30", "line 3: YAML reads 12:30 as 750"),
        ("lora_target_modules:\n- q_proj\n- yes", "settings.yaml: lora_target_modules is True, as YAML"),
    ],
)
def test_what_yaml_reads_otherwise_is_refused(line: str, message: str, tmp_path: Path) -> None:
    """The second setting of a file, and the second element of a list."""
    with refused(message):
        settings("--config", config_file(tmp_path, f"gamma: 0.5\n{line}\n"))


def test_one_text_is_no_list(tmp_path: Path) -> None:
    """The second setting of a file; a list of modules is one."""
    for name, kind in (("model: [a, b]", "model is a list"), ("run_name: {a: b}", "run_name is a dict")):
        with refused(f"settings.yaml: {kind}: expected one text"):
            settings("--config", config_file(tmp_path, f"lora_target_modules: [q_proj]\n{name}\n"))


def test_texts_and_numbers_of_a_file_are_taken_as_written(tmp_path: Path) -> None:
    """Quoted texts, plain numbers, and what a choice calls off."""
    text = "run_name: '010'\nsystem_prompt: 'no'\nseed: 10\nlearning_rate: 1.0e-3\nentropy_filter: off\nbf16: no\n"
    got = settings("--config", config_file(tmp_path, text))
    expected = ["010", "no", 10, 1e-3, "off", False]
    assert [got[line.partition(":")[0]] for line in text.splitlines()] == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", []),
        ("--entropy_threshold 0.3 --initial_entropy 0.5", []),
        (
            "--entropy_threshold 0.3 --initial_entropy 0.5 --entropy_filter off",
            [
                "--entropy_threshold 0.3 has no effect with --entropy_filter off",
                "--initial_entropy 0.5 has no effect with --entropy_filter off",
            ],
        ),
        ("--zero_advantage skip --gamma 0", ["--zero_advantage skip has no effect with --gamma 0.0"]),
        ("--zero_advantage skip --gamma 0.1", []),
        (
            "--conflict_positive_weight 5 --conflict_correction false",
            ["--conflict_positive_weight 5.0 has no effect with --conflict_correction False"],
        ),
        (
            "--lora_target_modules q_proj --lora_rank 0 --backend transformers",
            ["--lora_target_modules ['q_proj'] has no effect with --lora_rank 0"],
        ),
        ("--use_vllm false --vllm_mode server", ["--vllm_mode server has no effect with --use_vllm False"]),
        ("--dataset arithmetic --answer_list all", ["--answer_list all has no effect with --dataset arithmetic"]),
        ("--changed_reward true", ["--changed_reward True has no effect with --resume None"]),
        *(
            (
                f"--initial_entropy 0.5 --entropy_filter {mode}",
                [f"--initial_entropy 0.5 has no effect with --entropy_filter {mode}"],
            )
            for mode in ("on", "negative_only")
        ),
        (
            "--conflict_span common --conflict_tokens tags --conflict_correction false",
            [
                "--conflict_span common has no effect with --conflict_correction False",
                "--conflict_tokens tags has no effect with --conflict_correction False",
            ],
        ),
        (
            "--vllm_server_host a --vllm_server_port 9 --vllm_server_base_url http://a --vllm_tensor_parallel_size 2 "
            "--gpu_memory_utilization 0.2 --use_vllm false",
            [
                "--vllm_server_host a has no effect with --use_vllm False",
                "--vllm_server_port 9 has no effect with --use_vllm False",
                "--vllm_server_base_url http://a has no effect with --use_vllm False",
                "--vllm_tensor_parallel_size 2 has no effect with --use_vllm False",
                "--gpu_memory_utilization 0.2 has no effect with --use_vllm False",
            ],
        ),
        (
            "--num_completions_to_print 3 --log_completions false",
            ["--num_completions_to_print 3 has no effect with --log_completions False"],
        ),
        ("--dataset gsm8k --answer_list all", ["--answer_list all has no effect with --dataset gsm8k"]),
        ("--dataset math --answer_list all", ["--answer_list all has no effect with --dataset math"]),
    ],
)
def test_settings_without_effect_are_named(words: str, expected: list[str]) -> None:
    """At the start of a run, and in a plan."""
    got = parsed(*ON_CPU, *words.split())
    assert got.without_effect() == expected
    lines = start_lines(got, 10, TrainerState(max_steps=10), 1)
    assert [line for line in lines if "no effect" in line] == expected
    assert [line[2:] for line in describe_plan(got, 10).splitlines() if "no effect" in line] == expected


def test_sft_names_none_of_them_and_a_preset_none() -> None:
    assert parsed(*ON_CPU, "--gpu_memory_utilization", "0.5", method="sft").without_effect() == []
    assert parsed("--model", "smol", *ON_CPU).without_effect() == []


STEPS, EPOCHS = ["max_steps", "num_train_epochs"], [-1, 2.0]
SIZES = ["generation_batch_size", "steps_per_generation"]


@pytest.mark.parametrize(
    ("file", "words", "names", "expected"),
    [
        ("", "", STEPS, [150, 3.0]),  # those of the preset
        ("", "--max_steps 9", STEPS, [9, 3.0]),
        ("", "--num_train_epochs 2", STEPS, EPOCHS),
        ("num_train_epochs: 2", "", STEPS, EPOCHS),
        ("num_train_epochs: 2\nmax_steps: -1", "", STEPS, EPOCHS),
        ("max_steps: 7", "--num_train_epochs 2", STEPS, EPOCHS),
        ("max_steps: 7", "--num_train_epochs 2 --max_steps -1", STEPS, EPOCHS),
        ("num_train_epochs: 2", "--max_steps 9", STEPS, [9, 3.0]),
        (
            "max_steps: 7\nnum_train_epochs: 4",
            "",
            STEPS,
            "settings.yaml has max_steps and num_train_epochs, which",
        ),
        ("", "--num_train_epochs 2 --max_steps 9", STEPS, "the command line has max_steps and num_train_epochs, which"),
        ("generation_batch_size: 96", "--steps_per_generation 4", SIZES, [None, 4]),
        ("steps_per_generation: 4", "--generation_batch_size 96", SIZES, [96, None]),
        (
            "",
            "--steps_per_generation 4 --generation_batch_size 96",
            SIZES,
            "the command line has generation",
        ),
    ],
)
def test_settings_that_exclude_each_other(
    file: str, words: str, names: list[str], expected: Any, tmp_path: Path
) -> None:
    """The command line unsets what excludes it in the file, and the file what excludes it in the preset."""
    argv = words.split()
    if file:
        argv += ["--config", config_file(tmp_path, file)]
    if isinstance(expected, str):
        with refused(expected):
            settings(*argv)
    else:
        got = settings(*argv)
        assert [got[name] for name in names] == expected


@pytest.mark.parametrize(
    ("stored", "words", "expected"),
    [
        (["--max_steps", "7"], (), [7, 3.0]),
        (["--max_steps", "7"], ("--num_train_epochs", "2"), EPOCHS),
        (["--num_train_epochs", "2"], (), EPOCHS),
        (["--num_train_epochs", "2"], ("--max_steps", "9"), [9, 3.0]),
    ],
)
def test_a_run_has_stored_both_of_them(
    stored: list[str], words: tuple[str, ...], expected: list[float], tmp_path: Path
) -> None:
    """Those of the command line count, without an error, with --resume and with the file as --config."""
    run = stored_run(tmp_path / "run", *stored)
    copied = tmp_path / "copy.yaml"
    copied.write_bytes((run / "config.yaml").read_bytes())
    for start in (("--resume", str(run)), ("--config", str(run / "config.yaml")), ("--config", str(copied))):
        got = settings(*start, *words)
        assert [got[name] for name in STEPS] == expected


def test_a_null_that_a_run_has_stored_is_none(tmp_path: Path) -> None:
    """In a file of a user it leaves the setting to the preset, which has four prompts a step."""
    run = stored_run(tmp_path / "run", "--prompts_per_step", "none")
    copied = tmp_path / "copy.yaml"
    copied.write_bytes((run / "config.yaml").read_bytes())
    for start in (("--resume", str(run)), ("--config", str(copied))):
        assert settings(*start)["prompts_per_step"] is None
        assert settings(*start, "--prompts_per_step", "2")["prompts_per_step"] == 2
    assert settings("--config", config_file(tmp_path, "prompts_per_step: null\n"))["prompts_per_step"] == 4
    config = run / "config.yaml"
    config.write_text(re.sub("(?m)^(report_to|learning_rate): .*$", r"\1: null", config.read_text()))
    got, preset = settings("--resume", str(run)), settings()
    assert (got["report_to"], got["learning_rate"]) == (preset["report_to"], preset["learning_rate"])


def test_unsloth_plans_the_tiny_model_for_a_gpu() -> None:
    """Its preset is for a CPU; what is given stays."""
    words = ("--backend", "unsloth", "--dry_run")
    got = settings(*words)
    assert (got["use_cpu"], got["bf16"], got["lora_rank"]) == (False, True, 32)
    assert settings(*words, "--bf16", "false")["bf16"] is False
    assert settings("--dry_run")["use_cpu"] is True


@pytest.mark.parametrize(("gib", "flags", "expected"), TABLES["micro_batches_fit_a_third_of_host_memory"])
def test_micro_batches_fit_a_third_of_host_memory(
    gib: int, flags: list[str], expected: list[int], monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("gtpo.models.memory._host_memory", lambda: gib)
    assert sizes(settings("--model", "smol", *flags)) == expected


def test_what_unsloth_changes_is_set_back(caplog: LogCaptureFixture) -> None:
    """Two settings, of which the user has given one; what TRL resolves itself stays."""
    asked = {"output_dir": "run", "use_cpu": True, "bf16": False, "loss_type": "dr_grpo", "epsilon": 0.4}
    asked |= {"scale_rewards": "batch", "learning_rate": 0.5, "epsilon_high": None}
    plain = GRPOConfig(**asked)
    config = GRPOConfig(**asked)
    build._undo_changes_of_unsloth(config, asked)
    assert config.to_dict() == plain.to_dict() and not caplog.messages
    config.scale_rewards, config.epsilon_high = "none", 0.28
    build._undo_changes_of_unsloth(config, asked)
    assert config.to_dict() == plain.to_dict()
    assert caplog.messages == [
        "Unsloth changed scale_rewards from batch to none: set back to batch",
        "Unsloth changed epsilon_high from None to 0.28: set back to None",
    ]


def test_a_run_directory_is_named_after_its_run(tmp_path: Path) -> None:
    assert settings("--run_name", "a", method="sft")["output_dir"] == "outputs/sft-tiny-arithmetic-a"
    assert settings("--output_dir", "somewhere/else")["run_name"] == "else"
    file = ("--config", config_file(tmp_path, "output_dir: outputs/old\nrun_name: old\n"))
    assert settings(*file)["output_dir"] == "outputs/old"
    assert settings(*file, "--run_name", "new")["output_dir"] == "outputs/gtpo-tiny-arithmetic-new"
    got = settings(*file, "--run_name", "new", "--output_dir", "here")
    assert (got["output_dir"], got["run_name"]) == ("here", "new")


@pytest.mark.parametrize(
    ("processes", "given", "steps", "expected"),
    [
        (1, {}, 6, {"per_device_train_batch_size": 4, "steps_per_generation": 24}),
        (8, {}, 6, {"per_device_train_batch_size": 4, "steps_per_generation": 3}),
        (1, {"per_device_train_batch_size": 8}, 6, {"steps_per_generation": 12}),
        (2, {"gradient_accumulation_steps": 8}, 6, {"per_device_train_batch_size": 2, "steps_per_generation": 24}),
        (1, {}, None, {"per_device_train_batch_size": 4}),
    ],
)
def test_a_generation_keeps_its_completions_with_other_processes(
    processes: int, given: dict[str, int], steps: int | None, expected: dict[str, int]
) -> None:
    """32 completions a step, and 6 micro-batches of 4 of 4 processes, 96, a generation."""
    earlier = Earlier(Path("run"), {"per_device_train_batch_size": 4, "steps_per_generation": steps}, 32, 4)
    sizes = sizes_elsewhere(earlier, {"num_generations": 8} | given, processes, given.keys())
    assert {name: value for name, value in sizes.items() if value} == {"prompts_per_step": 4} | expected
    assert sizes_elsewhere(earlier, {"num_generations": 8} | given, 4, given.keys()) == {}


def test_all_processes_name_the_run_as_the_first_one(monkeypatch: MonkeyPatch) -> None:
    """Their clocks may differ."""
    of_first = ["outputs/at-noon", "at-noon"]
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda names: names.__setitem__(slice(2), of_first))
    got = parsed()
    for names in (got.to_dict(), vars(got.trainer)):
        assert [names["output_dir"], names["run_name"]] == of_first


@pytest.mark.parametrize(("line", "key", "value"), TABLES["yaml_key_is_a_flag"])
def test_yaml_key_is_a_flag(line: str, key: str, value: object, tmp_path: Path) -> None:
    assert settings("--config", config_file(tmp_path, line + "\n"))[key] == value
    if value is not None:
        words = value if isinstance(value, list) else [value]
        assert settings(f"--{key}", *map(str, words))[key] == value


@pytest.mark.parametrize("method", CLASSES)
def test_every_field_is_a_flag_that_is_stored(
    method: str, capsys: CaptureFixture[str], monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    fields = fields_of(CLASSES[method]).keys()
    with pytest.raises(SystemExit):
        settings("--help_all", method=method)
    assert fields <= {*re.findall(r"--(\w+)", capsys.readouterr().out)}
    of_a_start = {"resume", "overwrite", "changed_reward", "dry_run", "hub_token"}  # a secret is never stored
    assert fields - settings(method=method).keys() == fields & of_a_start


def test_help_all_lists_the_settings_of_an_objective(capsys: CaptureFixture[str], monkeypatch: MonkeyPatch) -> None:
    """Once, with TRL's; they are known when its class is, so the page waits for it, and nothing else is checked."""
    monkeypatch.setenv("COLUMNS", "200")
    own = make_dataclass("Own", [("share", float, 0.125)])
    words = ["--objective", "mine.py:Mine", "--help_all", "--dataset", "not/there"]
    line = read_command_line("grpo", OURS["grpo"], words)
    assert load_backend_of(line) == "transformers" and capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        parse(line, [own, GRPOConfig])
    page = capsys.readouterr().out
    assert re.search(r"--share SHARE +\(default: 0\.125\)", page)
    assert [page.count(f" --{name} ") for name in ("share", "lora_rank", "epsilon_high")] == [1, 1, 1]


# ---- stored settings reproduce the run ----


def test_names_of_trl_are_taken(tmp_path: Path) -> None:
    """Before the preset of the model is chosen, too."""
    got = settings("--model_name_or_path", "smol", "--dataset_name", "arithmetic", "--lora_r", "4")
    assert (got["model"], got["dataset"], got["lora_rank"]) == ("smol", "arithmetic", 4)
    file = config_file(tmp_path, "model_name_or_path: smol\ndataset_name: arithmetic\nlora_r: 4\n")
    for name in ("output_dir", "run_name"):
        del got[name]
    assert settings("--config", file).items() >= got.items()
    assert settings("--vllm_gpu_memory_utilization=0.7")["gpu_memory_utilization"] == 0.7


@pytest.mark.parametrize(("method", "argv"), TABLES["stored_settings_are_those_given_and_read_back"])
def test_stored_settings_are_those_given_and_read_back(method: str, argv: list[str], tmp_path: Path) -> None:
    """TRL and Transformers resolve these to values that the parser does not accept."""
    stored = settings(*argv, "--run_name", "x", method=method)
    for flag, value in zip(argv[::2], argv[1::2], strict=True):
        assert stored[flag.removeprefix("--")] in (value, [value], yaml.safe_load(value))
    file = config_file(tmp_path, yaml.safe_dump(stored))
    assert settings("--config", file, method=method) == stored


# ---- invalid settings: a one-line error that says how to fix it ----


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("gama", "gamma"), ("learning_rat", "learning_rate"), ("lr", "learning_rate"), ("lora_alpha", "lora_rank")],
)
def test_an_unknown_name_is_refused_with_the_nearest(key: str, nearest: str, tmp_path: Path) -> None:
    for argv in (["--config", config_file(tmp_path, f"{key}: 1\n")], [f"--{key}", "1"], [f"--{key}=1"]):
        with refused(rf"{key}.*'(--)?{nearest}'"):
            settings(*argv)


@pytest.mark.parametrize(
    ("method", "words", "message"),
    [
        ("grpo", "--gamma 0.1", "--gamma"),
        ("sft", "--gamma 0.1", "--gamma"),
        ("gtpo", "--fp16 true", "--fp16 needs a GPU"),  # a CPU ignores it, and the run would store it as on
        ("gtpo", "--reward_weights 0 0", "reward_weights is .*would add up to 0"),
        ("gtpo", "--stop_on_collapse", "--stop_on_collapse.*examples/collapse_alarm.py"),
        # Unsloth's trainer sets vllm_mode to colocate without a word
        ("gtpo", "--model llama --backend unsloth --dry_run --vllm_mode server", "--vllm_mode"),
        ("gtpo", "--model llama --backend auto --dry_run --vllm_mode server", "--vllm_mode"),
        # of one setting under two names the last one would count
        ("gtpo", "--G 4 --num_generations 8", "--G and --num_generations are one setting"),
        ("gtpo", "--num_generations=8 --G=4", "--num_generations and --G are"),
        ("gtpo", "--max-steps 1 --max_steps 2", "--max-steps and --max_steps are"),
        ("gtpo", "--bf16 true --no_bf16", "--bf16 and --no_bf16 are"),
        ("gtpo", "--reward format --G 4 --reward accuracy", "--reward is given twice"),
    ],
)
def test_what_acts_otherwise_than_written_is_refused(method: str, words: str, message: str) -> None:
    with refused(message):
        settings(*words.split(), method=method)


@pytest.mark.parametrize(
    "words",
    [
        "--reward_weights 0 1",
        "--model llama --backend transformers --dry_run --vllm_mode server",
        "--model llama --backend unsloth --dry_run",
    ],
)
def test_what_acts_as_written_is_taken(words: str) -> None:
    settings(*words.split())


def test_a_removed_setting_passes_with_the_value_that_changed_nothing(tmp_path: Path) -> None:
    """Runs of earlier revisions have stored it."""
    stored = "stop_on_collapse: false\nearly_stopping_patience: null\n"
    assert "stop_on_collapse" not in settings("--config", config_file(tmp_path, stored))
    with refused("'stop_on_collapse' is not a setting of a file.*examples/collapse_alarm.py"):
        settings("--config", config_file(tmp_path, "stop_on_collapse: true\n"))


@pytest.mark.parametrize("name", ["resume", "overwrite", "dry_run", "changed_reward"])
def test_what_a_start_alone_is_asked_is_no_setting_of_a_file(name: str, tmp_path: Path) -> None:
    """The file would say it at each start."""
    with refused(f"'{name}' is not a setting of a file"):
        settings("--config", config_file(tmp_path, f"seed: 1\n{name}: true\n"))


@pytest.mark.parametrize("method", CLASSES)
def test_large_model_without_gpu_error_suggests_a_cpu_command(method: str) -> None:
    with refused(rf"GPU.*`python train_{method}\.py") as caught:
        settings("--model", "llama", method=method)
    command = str(caught.value).split("`")[1]
    assert settings(*shlex.split(command)[2:], method=method)["model"] == "tiny"  # the suggested command works


# ---- batches of complete groups ----

optional = st.none() | st.integers(1, 40)


@given(st.integers(2, 16), st.none() | st.integers(1, 6), optional, optional, st.integers(1, 8))
def test_a_step_takes_complete_groups_or_is_refused(
    group: int, prompts: int | None, batch: int | None, accumulation: int | None, processes: int
) -> None:
    def fits(b: int, a: int) -> bool:
        completions = b * a * processes
        return completions == group * prompts if prompts else completions % group == 0

    try:
        got = batch_geometry(group, prompts, batch, accumulation, processes)
        check_batch(got, group, processes)
    except UsageError as error:
        assert "--per_device_train_batch_size" in str(error)
        # Refused only if no choice of the sizes that were left open fits.
        if (batch and accumulation) or (prompts and (batch or accumulation)):
            every = range(1, group * (prompts or 1) + 1)
            choices = itertools.product([batch] if batch else every, [accumulation] if accumulation else every)
            assert not any(itertools.starmap(fits, choices))
        return
    assert fits(got.batch, got.steps)
    assert got[:2] == (batch or got.batch, accumulation or got.steps)


# ---- the shipped presets ----


@pytest.mark.parametrize("method", CLASSES)
def test_preset_values_name_their_source(method: str) -> None:
    """In [brackets], in the comment beside each value."""
    for path in (CONFIGS / method).glob("*.yaml"):
        assert re.findall(r"(?m)^(?!#|.*#.*\[[^\]]+\]).+", path.read_text()) == [], path


LISTING_1 = {  # Appendix 8.2 of the paper; values that depend on the method or model are below
    "max_seq_length": 5500,
    "max_prompt_length": 4000,
    "load_in_4bit": True,
    "gpu_memory_utilization": 0.4,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "seed": 3407,
    "warmup_steps": 0.005,  # warmup_ratio; below 1 Transformers 5 reads it as a fraction of all steps
    "learning_rate": 1e-6,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "optim": "paged_adamw_8bit",
    "logging_steps": 1,
    "num_train_epochs": 1,
    "save_steps": 500,
    "max_grad_norm": 0.1,
    "report_to": "wandb",
    "max_steps": -1,  # num_train_epochs decides
}
RANKS = {"llama": 128, "qwen": 64}
# Listing 1 has twelve micro-batches of one: one of twelve has the same gradient
ROLLOUTS = {"num_iterations": 1, "num_generations": 12, "prompts_per_step": 1, "temperature": 1.0}
ROLLOUTS |= {"loss_type": "grpo", "scale_rewards": "group", "vllm_importance_sampling_correction": False}
ROLLOUTS |= {"max_completion_length": 5500 - 4000}
LISTING_1_BY_METHOD: dict[str, dict[str, Any]] = {
    "gtpo": {"adam_beta1": 0.999999, "adam_beta2": 0.999999, "beta": 0.0}
    | {"gamma": 0.1, "entropy_threshold": math.log(2), "conflict_correction": True}
    | ROLLOUTS,
    "grpo": {"adam_beta1": 0.9, "adam_beta2": 0.95, "beta": 1e-6} | ROLLOUTS,  # beta: Section 6, 0 or 1e-6
    "sft": {"adam_beta1": 0.9, "adam_beta2": 0.95, "max_length": 5500}
    | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
}


@pytest.mark.parametrize("method", CLASSES)
@pytest.mark.parametrize("model", RANKS)
def test_large_presets_are_listing_1(method: str, model: str, gpu: None) -> None:
    got = settings("--model", model, *ON_CPU, method=method)
    expected = LISTING_1 | LISTING_1_BY_METHOD[method] | {"model": model, "lora_rank": RANKS[model]}
    assert {key: got[key] for key in expected} == expected


def test_grpo_and_gtpo_presets_differ_only_in_the_method() -> None:
    allowed = {"adam_beta1", "adam_beta2", "beta", "gamma", "entropy_threshold", "entropy_filter"}
    allowed |= {"conflict_correction", "use_bias_correction_kl"}
    for model in ("tiny", "smol", "llama", "qwen"):
        gtpo, grpo = (read_yaml(CONFIGS / method / f"{model}.yaml") for method in ("gtpo", "grpo"))
        assert differing(gtpo, grpo) <= allowed, model


# ---- hardware, packages and resumed runs ----


@pytest.mark.parametrize("bf16", [True, False])
def test_a_gpu_without_bfloat16_trains_in_float16(bf16: bool, gpu: None, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
    preset = cli.preset_for("gtpo", model_source("qwen")).values()
    got = preset | cli.of_this_machine(preset, model_source("qwen"), "auto")
    assert (got["bf16"], got.get("fp16", False)) == (bf16, not bf16)
    assert settings("--model", "tiny")["fp16"] is False
    given = settings("--model", "qwen", *ON_CPU, "--bf16", "false", "--fp16", "false")
    assert not given["bf16"] and not given["fp16"]


def test_a_run_is_resumed_where_it_is(here: Path) -> None:
    for name in ("a", "b", "c", "d"):
        stored_run(Path("outputs") / name, "--learning_rate", "0.2")
    with refused("outputs/nope is not a run with config.yaml; the newest runs: outputs/b, outputs/c, outputs/d"):
        settings("--resume", "outputs/nope")
    with refused("--output_dir outputs/z"):
        settings("--resume", "outputs/a", "--output_dir", "outputs/z")
    with refused("--resume names no run"):
        settings("--resume")
    for named in (["outputs/a"], []):
        resumed = parsed("--resume", *named, "--output_dir", "outputs/a/")
        assert resumed.run.resume == resumed.trainer.output_dir == "outputs/a"
        assert resumed.trainer.learning_rate == 0.2


def test_a_stored_server_is_not_contacted_unasked(tmp_path: Path) -> None:
    server = ("--vllm_server_base_url", "http://10.0.0.9:1")
    run = stored_run(tmp_path / "run", "--use_vllm", "true", "--vllm_mode", "server", *server)
    with refused(f"names a vLLM server: .* {' '.join(server)}"):
        settings("--resume", str(run))
    assert settings("--resume", str(run), *server)["vllm_server_base_url"] == server[1]


@pytest.mark.parametrize(
    ("stored", "script"), [("gamma: 0.1", "gtpo"), ("num_generations: 4", "grpo"), ("packing: false", "sft")]
)
def test_resuming_a_run_of_another_method_is_refused(stored: str, script: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"model: tiny\n{stored}\n")
    for method in CLASSES.keys() - {script}:
        with refused(rf"train_{script}\.py"):
            settings("--resume", str(tmp_path), method=method)


@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_dry_run_of_a_large_model_needs_no_gpu(model: str) -> None:
    """`--dry_run > run.yaml` on a laptop is the configuration of a GPU run."""
    words = ("--model", model, "--G", "8")
    got = parsed(*words, "--dry-run")
    assert (got.trainer.use_cpu, got.to_dict()["use_cpu"]) == (True, False)
    assert (got.trainer.bf16, got.model.load_in_4bit, got.completions_per_step) == (True, True, 8)
    with refused("trains on a GPU"):
        settings(*words, "--dry_run", "false")


def test_colocated_vllm_gets_the_memory_share_and_length(gpu: None) -> None:
    llama = ("--model", "llama", *ON_CPU)
    got = settings(*llama)
    assert (got["vllm_gpu_memory_utilization"], got["vllm_max_model_length"]) == (0.4, 5500)
    assert settings(*llama, "--vllm_gpu_memory_utilization", "0.2")["vllm_gpu_memory_utilization"] == 0.2


def test_an_empty_list_keeps_an_empty_default(tmp_path: Path) -> None:
    file = config_file(tmp_path, "adapter: []\nk: 3\nseed: 5\n")
    arguments, _ = parse_evaluation(EvaluationArguments, ["--config", file, "--seed", "6"])
    assert (arguments.runs, arguments.k, arguments.seed) == ([], 3, 6)
    with refused("is not a regular file"):
        parse_evaluation(EvaluationArguments, ["--config", ""])


# ---- commands that are typed again ----


def test_both_sizes_given_go_before_the_prompts_of_a_preset_or_file(tmp_path: Path) -> None:
    """G is 12 and a step of the preset has four prompts."""
    of_step = ("--per_device_train_batch_size", "6", "--gradient_accumulation_steps")
    for steps, prompts in ((2, 1), (4, 2), (8, 4)):
        got = settings(*of_step, str(steps), "--G", "12")
        assert (sizes(got), got["prompts_per_step"]) == ([6, steps], prompts)
    file = config_file(tmp_path, "prompts_per_step: 3\n")
    assert settings("--config", file, *of_step, "2", "--G", "12")["prompts_per_step"] == 1
    for words in ([*of_step, "1", "--G", "12"], [*of_step, "4", "--G", "12", "--prompts_per_step", "1"]):
        with refused("does not divide into groups"):
            settings(*words)


def test_groups_given_go_before_stored_batch_sizes(tmp_path: Path) -> None:
    assert sizes(settings("--prompts_per_step", "1", method="sft")) == [1, 1]  # the preset has a batch of 48
    assert sizes(settings("--prompts_per_step", "96", method="sft")) == [48, 2]
    of_twelve = ("--G", "12", "--prompts_per_step", "1")
    run = str(stored_run(tmp_path / "run", *of_twelve))
    assert sizes(settings("--resume", run, "--G", "5")) == [5, 1]
    small = str(stored_run(tmp_path / "small", *of_twelve, "--per_device_train_batch_size", "3"))
    assert sizes(settings("--resume", small, "--G", "8")) == [8, 1]  # derived again
    file = config_file(tmp_path, "G: 5\nper_device_train_batch_size: 3\n")
    for argv in (["--resume", run, "--G", "5", "--per_device_train_batch_size", "3"], ["--config", file]):
        with refused("--per_device_train_batch_size"):
            settings(*argv)


@pytest.mark.parametrize("flag", ["--resume", "--config"])
def test_a_stored_run_reads_and_sends_nothing_unasked(flag: str, tmp_path: Path, caplog: LogCaptureFixture) -> None:
    """A stranger's config.yaml names code, a file of the user, and places elsewhere."""
    run = stored_run(tmp_path / "run")
    secret = tmp_path / "secret.txt"
    secret.write_text("of the user")
    (run / "run.lock").touch()
    planted = {"reward": ["format", "evil.py:f"], "system_prompt": str(secret), "chat_template": str(secret)}
    planted |= {"push_to_hub": True, "hub_model_id": "stranger/m", "report_to": ["wandb"]}
    planted |= {"log_completions_hub_repo": "stranger/d", "trackio_space_id": "stranger/s"}
    write_settings(run / "config.yaml", read_settings(run / "config.yaml") | planted)

    argv = [flag, str(run if flag == "--resume" else run / "config.yaml")]
    for extra in ([], ["--dry_run"]):
        with refused(r"--reward format evil\.py:f"):
            parsed(*argv, *extra)
    argv += ["--reward", "format", "evil.py:f"]
    got = settings(*argv)
    sent = ("push_to_hub", "report_to", "hub_model_id", "log_completions_hub_repo", "trackio_space_id")
    assert [got[name] for name in sent] == [False, "none", None, None, None]
    assert got["system_prompt"] == got["chat_template"] == str(secret)  # text, not the file
    again = "--hub_model_id stranger/m --push_to_hub true --report_to wandb"
    assert all(words in caplog.text for words in again.split(" --"))
    named = settings(*argv, *again.split())
    assert [named[name] for name in sent[:3]] == [True, "wandb", "stranger/m"]


def test_a_stored_run_that_sent_nothing_stays_so(tmp_path: Path, caplog: LogCaptureFixture) -> None:
    """Also where the preset would."""
    run = stored_run(tmp_path / "run", "--model", "llama", "--dry_run", "--report_to", "none")
    assert settings("--resume", str(run), "--dry_run")["report_to"] == "none" and "not taken" not in caplog.text


def test_a_token_is_not_stored(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")  # restored after the test
    got = parsed("--push_to_hub", "true", "--hub_token", "hf_secret")
    stored = got.to_dict()
    assert stored["push_to_hub"] is True and "hf_secret" not in str(stored)
    assert got.trainer.push_to_hub is False and got.trainer.hub_token is None  # the Trainer would upload at each save
    assert os.environ["HF_TOKEN"] == "hf_secret"


def test_beta_is_a_setting_of_grpo() -> None:
    assert settings("--beta", "0.04", *ON_CPU, method="grpo")["beta"] == 0.04
    with pytest.raises(UsageError, match=r"--beta is .*: expected 0"):
        settings("--beta", "0.04", *ON_CPU)
