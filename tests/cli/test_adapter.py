"""``--model RUN`` starts a new run from its adapter."""

from pathlib import Path

import pytest
import torch
from helpers.files import read_json, read_settings, write_json
from helpers.refusals import refused
from helpers.scripts import RunScript
from helpers.settings import parsed
from helpers.weights import adapter_of, same_weights
from pytest import LogCaptureFixture

from gtpo.arguments import Settings
from gtpo.models.load import load_policy
from gtpo.runs.start import start_run

TAGS = "<think> </think> <final> </final>"


@pytest.fixture
def run(tiny: Path, tmp_path: Path) -> Path:
    """A run of SFT with an adapter of rank 4 whose B is not 0, without its steps."""
    path = tmp_path / "sft"
    settings = parsed(
        *("--model", str(tiny), "--output_dir", str(path), "--lora_rank", "4", "--tags", TAGS),
        *("--lora_target_modules", "q_proj", "v_proj"),
        method="sft",
    )
    policy, tokenizer = load_policy(settings, "transformers")
    torch.manual_seed(0)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1)
    start_run(settings)
    policy.save_pretrained(path / "adapter")
    tokenizer.save_pretrained(path / "adapter")
    return path


def further(model: Path, *argv: str) -> Settings:
    return parsed("--model", str(model), "--dataset", "arithmetic", *argv)


@pytest.mark.parametrize("named", ["", "adapter"])
def test_a_run_from_an_adapter_keeps_base_shape_prompt(
    named: str, run: Path, tiny: Path, tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    settings = further(run / named, "--run_name", "further")
    model = settings.model
    assert (model.model, model.initial_adapter) == (str(tiny), str(run / "adapter"))
    assert (model.lora_rank, model.lora_target_modules) == (4, ["q_proj", "v_proj"])
    assert settings.prompt.tags == TAGS and "<think>" in str(settings.prompt.system_prompt)
    assert settings.output_dir.name == f"gtpo-{tiny.name}-arithmetic-further"
    assert f"starts from the adapter {run / 'adapter'} of {tiny}" in caplog.text
    policy, _ = load_policy(settings, "transformers")
    policy.save_pretrained(tmp_path / "saved")
    assert same_weights(adapter_of(tmp_path / "saved"), adapter_of(run / "adapter"))
    assert all(weight.requires_grad == ("lora_" in name) for name, weight in policy.named_parameters())


def test_the_prompt_can_be_another_and_the_shape_cannot(run: Path) -> None:
    other = "<a> </a> <b> </b>"
    assert further(run, "--tags", other).prompt.tags == other
    for flag, value in (("--lora_rank", "8"), ("--lora_target_modules", "q_proj")):
        with refused(f"{flag} .*{run}/adapter"):
            further(run, flag, value)


def test_a_base_replaced_in_place_is_refused(run: Path, tiny: Path) -> None:
    path = run / "adapter" / "adapter_config.json"
    config = read_json(path)
    config["auto_mapping"]["base_fingerprint"] = "of other weights"
    write_json(path, config)
    with refused(f"{tiny} has changed since {run}/adapter"):
        further(run)


@pytest.mark.slow
def test_sft_then_gtpo_resumed_evaluated_and_drawn(run: Path, run_script: RunScript) -> None:
    small = ("--G", "4", "--prompts_per_step", "1", "--max_completion_length", "8", "--save_steps", "1")
    argv = ["--model", str(run), "--dataset", "arithmetic", "--max_steps", "2", "--output_dir", "further", *small]
    done = run_script(run.parent, "train_gtpo.py", *argv)
    assert "Initial entropy" in done.stderr and "100 prompts" in done.stderr
    stored = read_settings(run.parent / "further" / "config.yaml")
    assert stored["initial_adapter"] == str(run / "adapter")
    (run / "adapter").rename(run / "gone")  # the checkpoint has all that a resumed run needs
    sampled = ("--benchmarks", "arithmetic", "--limit", "2", "--k", "1", "--max_new_tokens", "4")
    for script, *words in (
        ("train_gtpo.py", "--resume", "further", "--max_steps", "3"),
        ("evaluate.py", "--runs", "further", *sampled),
        ("figures.py", "--runs", "further", "--output", "curves.png"),
    ):
        run_script(run.parent, script, *words)
