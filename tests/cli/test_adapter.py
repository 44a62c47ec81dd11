"""``--model RUN`` starts a new run from its adapter."""

from pathlib import Path

import pytest
import torch
from helpers.files import read_settings
from helpers.refusals import refused
from helpers.scripts import RunScript
from helpers.settings import parsed
from helpers.weights import adapter_of, same_weights
from safetensors.torch import load_file, save_file

from gtpo.files import fingerprint
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
    generator = torch.Generator().manual_seed(0)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1, generator=generator)
    start_run(settings)
    policy.save_pretrained(path / "adapter")
    tokenizer.save_pretrained(path / "adapter")
    return path


@pytest.mark.parametrize("named", ["", "adapter"])
def test_a_run_from_an_adapter_keeps_base_shape_prompt(
    named: str, run: Path, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = parsed("--model", str(run / named), "--dataset", "arithmetic", "--run_name", "further")
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
    assert parsed("--model", str(run), "--dataset", "arithmetic", "--tags", other).prompt.tags == other
    for flag, value in (("--lora_rank", "8"), ("--lora_target_modules", "q_proj")):
        with refused(f"{flag} .*{run}/adapter"):
            parsed("--model", str(run), "--dataset", "arithmetic", flag, value)


def test_a_base_replaced_in_place_is_refused(run: Path, tiny: Path) -> None:
    weights = tiny / "model.safetensors"
    before = weights.read_bytes()
    noted = fingerprint(tiny)
    tensors = load_file(weights)
    try:
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, weights, metadata={"format": "pt"})
        assert fingerprint(tiny) != noted
        with refused(f"{tiny} has changed since {run}/adapter"):
            parsed("--model", str(run), "--dataset", "arithmetic")
    finally:
        weights.write_bytes(before)


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
