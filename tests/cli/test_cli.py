"""Settings: precedence, errors for invalid values, and that the shipped presets are Listing 1 of the paper."""

import dataclasses
import itertools
import math
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.files import read_settings, tables_of, write_settings
from helpers.refusals import refused
from helpers.runs import fake_run
from helpers.settings import CLASSES, parsed
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from trl import GRPOConfig

from gtpo.arguments import GTPOArguments
from gtpo.cli import parse as cli
from gtpo.cli.parse import parse_evaluation
from gtpo.cli.presets import Preset
from gtpo.cli.validation import batch_geometry
from gtpo.errors import UsageError
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.files import CONFIGS, read_yaml
from gtpo.runs.directory import MAY_CHANGE

TABLES = tables_of(__file__)

PRESETS = sorted(path for method in CLASSES for path in (CONFIGS / method).glob("*.yaml"))
TINY_GTPO = read_yaml(CONFIGS / "gtpo" / "tiny.yaml")
START_ONLY = {"resume", "overwrite", "changed_reward", "dry_run", "hub_token"}  # of a single start: not stored


def settings(*argv: str, method: str = "gtpo") -> dict[str, Any]:
    """The resolved settings of a command line."""
    return parsed(*argv, method=method).to_dict()


def config_file(directory: Path, text: str) -> str:
    path = directory / "settings.yaml"
    path.write_text(text)
    return str(path)


@pytest.fixture(autouse=True)
def one_process_without_gpu(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


# ---- precedence ----


def test_precedence_is_command_line_file_preset_default(tmp_path: Path) -> None:
    file = config_file(tmp_path, "learning_rate: 0.25\nweight_decay: 0.25\n")
    got = settings("--config", file, "--learning_rate", "0.5")
    assert got["learning_rate"] == 0.5  # command line, over file and preset
    assert got["weight_decay"] == 0.25  # file
    assert got["max_grad_norm"] == TINY_GTPO["max_grad_norm"] == 0.1  # preset; TRL's default is 1.0
    assert got["top_p"] == GRPOConfig.top_p  # TRL's default


def test_model_in_the_config_file_selects_the_preset(tmp_path: Path, gpu: None) -> None:
    file = config_file(tmp_path, "model: llama\n")
    assert settings("--config", file, "--use_cpu", "true")["lora_rank"] == 128
    assert settings("--config", file, "--model", "qwen", "--use_cpu", "true")["lora_rank"] == 64
    assert settings("--model", "Qwen/Qwen2.5-3B-Instruct", "--use_cpu", "true")["lora_rank"] == 64
    assert settings("--model", "other/model-7B", "--use_cpu", "true")["load_in_4bit"] is True  # as Qwen, on a GPU


@pytest.mark.parametrize(
    ("model", "preset"),
    TABLES["the_preset_of_a_model_without_a_gpu"],
)
@pytest.mark.parametrize("method", CLASSES)
def test_the_preset_of_a_model_without_a_gpu(method: str, model: str, preset: str) -> None:
    expected = Preset(method, preset, "cpu")
    assert [cli.preset_for(method, model, dry_run=dry_run) for dry_run in (False, True)] == [expected] * 2
    assert expected.path.is_file()


@pytest.mark.parametrize(("model", "backend", "preset", "machine"), TABLES["the_preset_of_a_model_with_a_gpu"])
@pytest.mark.parametrize("method", CLASSES)
def test_the_preset_of_a_model_with_a_gpu(
    method: str, model: str, backend: str | None, preset: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Preset(method, preset, machine)
    if backend == "unsloth" or preset == "llama":
        assert cli.preset_for(method, model, backend, dry_run=True) == expected  # planned where there is no GPU
        with refused(r"trains on a GPU"):
            cli.preset_for(method, model, backend)
    monkeypatch.setattr(cli, "gpu_is_available", lambda: True)
    assert [cli.preset_for(method, model, backend, dry_run=dry_run) for dry_run in (False, True)] == [expected] * 2


# ---- your own model ----

OF_MACHINES = {*MAY_CHANGE["machine"], *MAY_CHANGE["batch"], "bf16", "load_in_4bit"}


@pytest.fixture
def on_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, dict[str, Any]]]:
    """Machine -> the resolved settings of a model of 0.6 billion parameters, in a folder with a misleading name."""
    folder = tmp_path / "SmolLM2-135M-Instruct"
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 36, "max_position_embeddings": 1200}
    LlamaConfig(**shape, num_attention_heads=8).save_pretrained(folder)

    def resolve(method: str, *argv: str) -> dict[str, dict[str, Any]]:
        found = {}
        for machine in ("cpu", "gpu"):
            for module in ("models.backend", "cli.parse", "models.memory"):
                monkeypatch.setattr(f"gtpo.{module}.gpu_is_available", lambda has_gpu=machine == "gpu": has_gpu)
            words = (
                "--model",
                str(folder),
                "--output_dir",
                "outputs/x",
                "--use_cpu",
                "true",
                *argv,
            )  # for Transformers
            found[machine] = settings(*words, method=method)
        return found

    return resolve


def differing(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    return {name for name in first.keys() | second.keys() if first.get(name, "-") != second.get(name, "-")}


def test_your_model_has_equal_settings_for_both_methods(on_both: Any) -> None:
    """On a GPU the paper's presets would compare two optimizers and two KL terms."""
    of_gtpo = {field.name for field in dataclasses.fields(GTPOArguments)}
    gtpo, grpo = (on_both(method) for method in ("gtpo", "grpo"))
    for machine in ("cpu", "gpu"):
        assert differing(gtpo[machine], grpo[machine]) == of_gtpo | {"use_bias_correction_kl"}
        got = grpo[machine]
        assert (got["learning_rate"], got["adam_beta1"], got["adam_beta2"]) == (2e-5, 0.9, 0.95)
        assert (got["beta"], got["num_generations"]) == (0.0, 8)
        assert (got["max_seq_length"], got["max_prompt_length"], got["max_completion_length"]) == (1200, 800, 400)


@pytest.mark.parametrize("method", CLASSES)
def test_your_model_has_equal_settings_on_both_machines(method: str, on_both: Any) -> None:
    got = on_both(method)
    found = differing(got["cpu"], got["gpu"])
    assert {"bf16", "load_in_4bit", "gradient_checkpointing"} <= found <= OF_MACHINES
    assert ("use_vllm" in found) is (method != "sft")
    presets = [Preset(method, "own", machine).values()["use_cpu"] for machine in ("cpu", "gpu")]
    assert presets == [True, False]  # given above


def test_sft_of_your_model_has_gtpo_optimizer_and_lengths(on_both: Any) -> None:
    sft, gtpo = on_both("sft")["cpu"], on_both("gtpo")["cpu"]
    common = sft.keys() & read_yaml(CONFIGS / "own.yaml")["all"].keys() | {"learning_rate"}
    assert len(common) > 15 and {name: sft[name] for name in common} == {name: gtpo[name] for name in common}
    assert sft["max_length"] == sft["max_seq_length"] == 1200
    steps = [got["per_device_train_batch_size"] * got["gradient_accumulation_steps"] for got in (sft, gtpo)]
    assert steps == [8, 8]


@pytest.mark.parametrize(
    ("parameters", "context", "rate", "most", "prompt", "completion"),
    TABLES["rate_by_size_and_lengths_within_the_context"],
)
def test_rate_by_size_and_lengths_within_the_context(
    parameters: float, context: float, rate: float, most: int, prompt: int, completion: int
) -> None:
    got = Preset("grpo", "own", "cpu").values_for(parameters, context)
    assert got["learning_rate"] == rate
    assert (got["max_seq_length"], got["max_prompt_length"], got["max_completion_length"]) == (most, prompt, completion)
    assert Preset("sft", "own", "cpu").values_for(parameters, context)["max_length"] == most


def test_smol_keeps_its_values_on_a_gpu(gpu: None) -> None:
    """Its prompts have worked examples, and its completions 48 tokens: precision, backend and memory are of the GPU."""
    on_cpu, on_gpu = (Preset("gtpo", "smol", machine).values() for machine in ("cpu", "gpu"))
    assert differing(on_cpu, on_gpu) <= OF_MACHINES and (on_gpu["use_cpu"], on_gpu["bf16"]) == (False, True)
    assert settings("--model", "smol", "--use_cpu", "true")["max_completion_length"] == 48


@pytest.mark.parametrize(("flags", "steps"), [([], 150), (["--max_steps", "9"], 9), ([], -1)])
def test_epochs_alone_are_whole_epochs(flags: list[str], steps: int, tmp_path: Path) -> None:
    """The preset's steps would end the run before."""
    epochs = [] if steps == 150 else ["--num_train_epochs", "2"]
    assert settings("--model", "tiny", *epochs, *flags)["max_steps"] == steps
    file = config_file(tmp_path, "num_train_epochs: 2\n")
    assert settings("--model", "tiny", "--config", file, *flags)["max_steps"] == (9 if flags else -1)


@pytest.mark.parametrize("method", CLASSES)
def test_unsloth_plans_the_tiny_model_for_a_gpu(method: str) -> None:
    """Its preset is for a CPU; what is given stays."""
    got = settings("--model", "tiny", "--backend", "unsloth", "--dry_run", method=method)
    assert (got["use_cpu"], got["bf16"], got["lora_rank"]) == (False, True, 32)
    got = settings("--model", "tiny", "--backend", "unsloth", "--dry_run", "--bf16", "false", method=method)
    assert (got["use_cpu"], got["bf16"]) == (False, False)
    assert settings("--model", "tiny", "--dry_run", method=method)["use_cpu"] is True


@pytest.mark.parametrize(
    ("gib", "flags", "rows", "parts"),
    TABLES["micro_batches_fit_a_third_of_host_memory"],
)
def test_micro_batches_fit_a_third_of_host_memory(
    gib: int, flags: list[str], rows: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gtpo.models.memory._host_memory", lambda: gib)
    got = settings("--model", "smol", *flags)
    assert (got["per_device_train_batch_size"], got["gradient_accumulation_steps"]) == (rows, parts)


def test_a_run_directory_is_named_after_its_run() -> None:
    assert settings("--run_name", "a", method="sft")["output_dir"] == str(Path("outputs/sft-tiny-arithmetic-a"))
    got = settings("--output_dir", "somewhere/else")
    assert (got["output_dir"], got["run_name"]) == ("somewhere/else", "else")


@pytest.mark.parametrize(
    ("line", "key", "value"),
    TABLES["yaml_key_is_a_flag"],
)
def test_yaml_key_is_a_flag(line: str, key: str, value: object, tmp_path: Path) -> None:
    assert settings("--config", config_file(tmp_path, line + "\n"))[key] == value
    if value is not None:
        argv = list(map(str, value)) if isinstance(value, list) else [str(value)]
        assert settings(f"--{key}", *argv)[key] == value


@pytest.mark.parametrize("method", CLASSES)
def test_every_field_is_a_flag_and_a_yaml_key(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    fields = {field.name for cls in CLASSES[method] for field in dataclasses.fields(cls) if field.init}
    with pytest.raises(SystemExit):
        settings("--help_all", method=method)
    flags = set(re.findall(r"--(\w+)", capsys.readouterr().out))
    assert fields - flags == set()

    resolved = settings(method=method)
    assert {"hub_token"} <= fields - resolved.keys() <= {"hub_token"} | START_ONLY  # a secret is never stored
    for key in sorted(fields & resolved.keys()):  # one key at a time: each is accepted on its own
        if resolved[key] is not None and key not in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            got = settings("--config", config_file(tmp_path, yaml.safe_dump({key: resolved[key]})), method=method)
            assert got[key] == resolved[key], key


# ---- stored settings reproduce the run ----


def test_names_of_trl_are_taken() -> None:
    got = settings("--model_name_or_path", "tiny", "--dataset_name", "arithmetic", "--lora_r", "4")
    assert (got["model"], got["dataset"], got["lora_rank"]) == ("tiny", "arithmetic", 4)
    assert settings("--vllm_gpu_memory_utilization=0.7")["gpu_memory_utilization"] == 0.7


@pytest.mark.parametrize(
    ("method", "argv"),
    TABLES["stored_settings_are_those_given_and_read_back"],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_stored_settings_are_those_given_and_read_back(method: str, argv: list[str], tmp_path: Path) -> None:
    """TRL and Transformers resolve these to values that the parser does not accept."""
    stored = settings(*argv, "--run_name", "x", method=method)
    for flag, value in zip(argv[::2], argv[1::2], strict=True):
        assert stored[flag.removeprefix("--")] in (value, [value], yaml.safe_load(value))
    again = settings("--config", config_file(tmp_path, yaml.safe_dump(stored)), method=method)
    assert again == stored


# ---- invalid settings: a one-line error that says how to fix it ----


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("gama", "gamma"), ("learning_rat", "learning_rate"), ("lr", "learning_rate"), ("lora_alpha", "lora_rank")],
)
def test_an_unknown_name_is_refused_with_the_nearest(key: str, nearest: str, tmp_path: Path) -> None:
    for argv in (["--config", config_file(tmp_path, f"{key}: 1\n")], [f"--{key}", "1"], [f"--{key}=1"]):
        with refused(rf"{key}.*'(--)?{nearest}'"):
            settings(*argv)
    for method in ("grpo", "sft"):
        with refused("--gamma"):
            settings("--gamma", "0.1", method=method)


@pytest.mark.parametrize("method", CLASSES)
@pytest.mark.parametrize("model", ["llama", "qwen", "meta-llama/Llama-3.1-8B-Instruct"])
def test_large_model_without_gpu_error_suggests_a_cpu_command(method: str, model: str) -> None:
    with refused("GPU") as caught:
        settings("--model", model, method=method)
    command = re.search(r"`python (\S+) (.*?)`", str(caught.value))
    assert command and command[1] == f"train_{method}.py"
    assert settings(*shlex.split(command[2]), method=method)["model"] == "tiny"  # the suggested command works


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
    except UsageError as error:
        assert "--per_device_train_batch_size" in str(error)
        # Refused only if no choice of the sizes that were left open fits.
        if prompts:
            sizes = range(1, group * prompts + 1)
            choices = itertools.product([batch] if batch else sizes, [accumulation] if accumulation else sizes)
            assert not any(fits(b, a) for b, a in choices) or (batch is None and accumulation is None)
        elif batch and accumulation:
            assert not fits(batch, accumulation)
        return
    assert fits(*got)
    assert got[0] == (batch or got[0]) and got[1] == (accumulation or got[1])


# ---- the shipped presets ----


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_preset_parses_to_its_values(path: Path, gpu: None) -> None:
    # use_cpu: without it, bf16 of the large presets is refused on a machine without a GPU.
    got = settings("--config", str(path), "--use_cpu", "true", method=path.parent.name)
    for key, value in read_yaml(path).items():
        if key != "use_cpu":
            assert got[key] == (float(value) if isinstance(got[key], float) else value), key


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_preset_values_name_their_source(path: Path) -> None:
    missing = [
        line
        for line in path.read_text().splitlines()
        if line.strip() and not line.startswith("#") and not re.search(r"#.*\[[^\]]+\]", line)
    ]
    assert not missing, f"values without a source in [brackets]: {missing}"


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
LISTING_1_BY_MODEL: dict[str, dict[str, Any]] = {
    "llama": {"model": "llama", "lora_rank": 128},
    "qwen": {"model": "qwen", "lora_rank": 64},
}
# Listing 1 has twelve micro-batches of one: one of twelve has the same gradient
GROUPS = {"num_iterations": 1, "num_generations": 12, "prompts_per_step": 1, "temperature": 1.0}
OBJECTIVE = {"loss_type": "grpo", "scale_rewards": "group", "vllm_importance_sampling_correction": False}
LISTING_1_BY_METHOD: dict[str, dict[str, Any]] = {
    "gtpo": {"adam_beta1": 0.999999, "adam_beta2": 0.999999, "beta": 0.0}
    | {"gamma": 0.1, "entropy_threshold": math.log(2), "conflict_correction": True}
    | GROUPS
    | OBJECTIVE,
    "grpo": {"adam_beta1": 0.9, "adam_beta2": 0.95, "beta": 1e-6} | GROUPS | OBJECTIVE,  # beta: Section 6, 0 or 1e-6
    "sft": {"adam_beta1": 0.9, "adam_beta2": 0.95, "max_length": 5500}
    | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
}


@pytest.mark.parametrize("method", CLASSES)
@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_large_presets_are_listing_1(method: str, model: str, gpu: None) -> None:
    got = settings("--model", model, "--use_cpu", "true", method=method)
    expected = LISTING_1 | LISTING_1_BY_MODEL[model] | LISTING_1_BY_METHOD[method]
    assert {key: got[key] for key in expected} == expected
    if method != "sft":
        assert got["max_completion_length"] == 5500 - 4000


@pytest.mark.parametrize("method", CLASSES)
def test_warmup_below_one_is_a_fraction_of_all_steps(method: str) -> None:
    args = parsed("--warmup_steps", "0.005", method=method).trainer
    assert args.get_warmup_steps(7473) == 38  # rounded up, as warmup_ratio was


def test_grpo_and_gtpo_presets_differ_only_in_the_method() -> None:
    allowed = {"adam_beta1", "adam_beta2", "beta", "gamma", "entropy_threshold", "entropy_filter"}
    allowed |= {"conflict_correction", "use_bias_correction_kl"}
    for model in ("tiny", "smol", "llama", "qwen"):
        gtpo, grpo = (read_yaml(CONFIGS / method / f"{model}.yaml") for method in ("gtpo", "grpo"))
        differing = {key for key in gtpo.keys() | grpo.keys() if gtpo.get(key) != grpo.get(key)}
        assert differing <= allowed, model


# ---- hardware, packages and resumed runs ----


@pytest.mark.parametrize(("bf16", "expected"), [(True, (True, False)), (False, (False, True))])
def test_a_gpu_without_bfloat16_trains_in_float16(
    bf16: bool, expected: tuple[bool, bool], gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
    start = cli.find_start("gtpo", {"model": "qwen"})
    preset = cli.preset_for("gtpo", "qwen").values()
    got = preset | cli._of_this_machine(start, preset)
    assert (got["bf16"], got.get("fp16", False)) == expected
    assert settings("--model", "tiny")["fp16"] is False
    explicit = settings("--model", "qwen", "--use_cpu", "true", "--bf16", "false", "--fp16", "false")
    assert (explicit["bf16"], explicit["fp16"]) == (False, False)


@pytest.mark.parametrize("words", [["--use_cpu", "true"], []])
def test_fp16_on_a_cpu_is_refused(words: list[str]) -> None:
    """A CPU ignores it, and the run would store it as on."""
    with refused("--fp16 needs a GPU"):
        settings("--model", "tiny", "--fp16", "true", *words)


def test_a_run_is_resumed_where_it_is(here: Path) -> None:
    for name in ("a", "b", "c", "d"):
        stored_run(here / "outputs" / name)
    with refused("outputs/nope is not a run with config.yaml; the newest runs: outputs/b, outputs/c, outputs/d"):
        settings("--resume", "outputs/nope")
    with refused("--output_dir outputs/z"):
        settings("--resume", "outputs/a", "--output_dir", "outputs/z")
    assert settings("--resume", "outputs/a", "--output_dir", "outputs/a/")["output_dir"] == "outputs/a"


def test_a_file_of_settings_runs_no_code_unasked(tmp_path: Path) -> None:
    """A stranger's config.yaml under another name, or next to nothing."""
    (tmp_path / "other.yaml").write_text("model: tiny\nreward: [format, 'evil.py:f']\n")
    argv = ("--config", str(tmp_path / "other.yaml"))
    with refused(r"other.yaml names the reward evil\.py:f: .* --reward format evil.py:f"):
        parsed(*argv)
    assert parsed(*argv, "--reward", "format", "evil.py:f").reward.reward == ["format", "evil.py:f"]


def test_a_stored_server_is_not_contacted_unasked(tmp_path: Path) -> None:
    flags = ("--model", "tiny", "--use_vllm", "true", "--vllm_mode", "server")
    run = stored_run(tmp_path / "run", *flags, "--vllm_server_base_url", "http://10.0.0.9:1")
    again = ("--vllm_server_base_url", "http://10.0.0.9:1")
    with refused(f"names a vLLM server: .* {' '.join(again)}"):
        settings("--resume", str(run))
    assert settings("--resume", str(run), *again)["vllm_server_base_url"] == again[1]


@pytest.mark.parametrize("backend", ["unsloth", "auto"])
def test_unsloth_and_the_server_of_vllm_are_refused(backend: str) -> None:
    """Unsloth's trainer sets vllm_mode to colocate without a word."""
    argv = ("--model", "llama", "--backend", backend, "--dry_run", "--vllm_mode", "server")
    with refused("--vllm_mode"):
        settings(*argv)
    assert settings(*argv[:4], "--dry_run")["vllm_mode"] == "colocate"
    plain = settings("--model", "llama", "--backend", "transformers", *argv[4:])
    assert plain["vllm_mode"] == "server"


@pytest.mark.parametrize(
    ("settings_of_run", "script"), [("gamma: 0.1", "gtpo"), ("num_generations: 4", "grpo"), ("packing: false", "sft")]
)
def test_resuming_a_run_of_another_method_is_refused(settings_of_run: str, script: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"model: tiny\n{settings_of_run}\n")
    for method in CLASSES:
        if method != script:
            with refused(rf"train_{script}\.py"):
                settings("--resume", str(tmp_path), method=method)


def test_dry_run_of_a_large_model_needs_no_gpu() -> None:
    """`--dry_run > run.yaml` on a laptop is the configuration of a GPU run."""
    got = parsed("--model", "llama", "--dry_run")
    assert got.trainer.use_cpu is True and got.to_dict()["use_cpu"] is False
    for model in ("llama", "qwen"):
        got = parsed("--model", model, "--G", "8", "--dry_run")
        assert (got.trainer.bf16, got.model.load_in_4bit, got.completions_per_step) == (True, True, 8)
        assert settings("--model", model, "--G", "8", "--dry-run")["bf16"]
        with refused("trains on a GPU"):
            settings("--model", model, "--G", "8", "--dry_run", "false")


def test_colocated_vllm_gets_the_memory_share_and_length(gpu: None) -> None:
    got = settings("--model", "llama", "--use_cpu", "true")
    assert (got["vllm_gpu_memory_utilization"], got["vllm_max_model_length"]) == (0.4, 5500)
    got = settings("--model", "llama", "--use_cpu", "true", "--vllm_gpu_memory_utilization", "0.2")
    assert (got["vllm_gpu_memory_utilization"], got["vllm_max_model_length"]) == (0.2, 5500)


def test_the_config_file_overrides_what_the_machine_sets(tmp_path: Path) -> None:
    """Of your model the filter is that of Eq. 10, unless a file says otherwise."""
    other = ["--model", "owner/other-1B", "--dataset", "gsm8k", "--backend", "transformers", "--dry_run"]
    file = config_file(tmp_path, "entropy_filter: 'off'\n")
    assert parsed(*other).gtpo.entropy_filter == "auto"
    assert parsed(*other, "--config", file).gtpo.entropy_filter == "off"


def test_an_empty_list_keeps_an_empty_default(tmp_path: Path) -> None:
    file = config_file(tmp_path, "adapter: []\nk: 3\nseed: 5\n")
    arguments, _ = parse_evaluation(EvaluationArguments, ["--config", file, "--seed", "6"])
    assert (arguments.runs, arguments.k, arguments.seed) == ([], 3, 6)
    with refused("is not a regular file"):
        parse_evaluation(EvaluationArguments, ["--config", ""])


# ---- commands that are typed again ----


def stored_run(path: Path, *argv: str, method: str = "gtpo") -> Path:
    """The config.yaml of a run with a checkpoint."""
    return fake_run(path, settings("--output_dir", str(path), *argv, method=method), steps=[1]).path


def test_resume_alone_needs_an_output_dir(here: Path) -> None:
    stored_run(Path("outputs") / "a", "--learning_rate", "0.2")
    with refused("--resume names no run"):
        parsed("--resume")
    resumed = parsed("--resume", "--output_dir", "outputs/a")
    assert resumed.run.resume == "outputs/a" and resumed.trainer.learning_rate == 0.2


def test_a_run_name_beside_a_config_names_another_directory(tmp_path: Path) -> None:
    file = config_file(tmp_path, "output_dir: outputs/old\nrun_name: old\n")
    assert settings("--config", file, "--run_name", "new")["output_dir"] == str(
        Path("outputs/gtpo-tiny-arithmetic-new")
    )
    assert settings("--config", file)["output_dir"] == "outputs/old"
    got = settings("--config", file, "--run_name", "new", "--output_dir", "here")
    assert (got["output_dir"], got["run_name"]) == ("here", "new")


def test_groups_given_go_before_stored_batch_sizes(
    tmp_path: Path,
) -> None:
    got = settings("--prompts_per_step", "1", method="sft")  # the preset has a batch of 48
    assert (got["per_device_train_batch_size"], got["gradient_accumulation_steps"]) == (1, 1)
    run = stored_run(tmp_path / "run", "--G", "12", "--prompts_per_step", "1")
    assert settings("--resume", str(run), "--G", "5")["per_device_train_batch_size"] == 5
    small = stored_run(tmp_path / "small", "--G", "12", "--per_device_train_batch_size", "3", "--prompts_per_step", "1")
    got = settings("--resume", str(small), "--G", "8")
    assert (got["per_device_train_batch_size"], got["gradient_accumulation_steps"]) == (2, 4)  # no more memory
    got = settings("--prompts_per_step", "96", method="sft")
    assert (got["per_device_train_batch_size"], got["gradient_accumulation_steps"]) == (48, 2)
    with refused("--per_device_train_batch_size"):
        settings("--resume", str(run), "--G", "5", "--per_device_train_batch_size", "3")
    with refused("--per_device_train_batch_size"):
        settings("--config", config_file(tmp_path, "G: 5\nper_device_train_batch_size: 3\n"))


@pytest.fixture
def of_a_stranger(tmp_path: Path) -> Path:
    """A run whose config.yaml names code, a file of the user, and places elsewhere."""
    run = stored_run(tmp_path / "run")
    secret = tmp_path / "secret.txt"
    secret.write_text("of the user")
    (run / "run.lock").write_text("")
    sends = {"push_to_hub": True, "hub_model_id": "stranger/m", "report_to": ["wandb"]}
    sends |= {"log_completions_hub_repo": "stranger/d", "trackio_space_id": "stranger/s"}
    planted = {"reward": ["format", "evil.py:f"], "system_prompt": str(secret), "chat_template": str(secret)}
    config = read_settings(run / "config.yaml") | sends | planted
    write_settings(run / "config.yaml", config)
    return run


@pytest.mark.parametrize("flag", ["--resume", "--config"])
def test_a_stored_run_reads_and_sends_nothing_unasked(
    flag: str, of_a_stranger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    argv = [flag, str(of_a_stranger if flag == "--resume" else of_a_stranger / "config.yaml")]
    for extra in ([], ["--dry_run"]):
        with refused(r"--reward format evil\.py:f"):
            parsed(*argv, *extra)
    argv += ["--reward", "format", "evil.py:f"]
    plain = parsed(*argv)
    secret = str(of_a_stranger.parent / "secret.txt")
    assert (plain.prompt.system_prompt, plain.prompt.chat_template) == (secret, secret)  # text, not the file
    got = plain.to_dict()
    assert (got["push_to_hub"], got["report_to"], got["hub_model_id"]) == (False, "none", None)
    assert (got["log_completions_hub_repo"], got["trackio_space_id"]) == (None, None)
    again = "--hub_model_id stranger/m --push_to_hub true --report_to wandb"
    assert all(words in caplog.text for words in again.split(" --"))
    named = parsed(*argv, *again.split()).to_dict()
    assert (named["push_to_hub"], named["report_to"], named["hub_model_id"]) == (True, "wandb", "stranger/m")


def test_a_stored_run_that_sent_nothing_stays_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the preset would."""
    large = ("--model", "llama", "--dry_run")
    assert settings(*large)["report_to"] == "wandb"
    run = stored_run(tmp_path / "run", *large, "--report_to", "none")
    assert settings("--resume", str(run), "--dry_run")["report_to"] == "none" and "not taken" not in caplog.text


def test_a_token_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")  # restored after the test
    got = parsed("--push_to_hub", "true", "--hub_token", "hf_secret")
    assert got.to_dict()["push_to_hub"] is True and "hf_secret" not in yaml.safe_dump(got.to_dict())
    assert got.trainer.push_to_hub is False and got.trainer.hub_token is None  # the Trainer would upload at each save
    assert os.environ["HF_TOKEN"] == "hf_secret"


def test_weights_that_leave_no_reward_are_refused() -> None:
    with refused("reward_weights is .*would add up to 0"):
        settings("--reward_weights", "0", "0")
    assert settings("--reward_weights", "0", "1")["reward_weights"] == [0.0, 1.0]
    assert settings(method="sft")["remove_unused_columns"] is True
