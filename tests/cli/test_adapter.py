"""``--model RUN`` starts a new run from its adapter, and ``--model DIR`` from one of TRL or PEFT alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.files import read_json, read_settings, write_json, write_settings
from helpers.refusals import refused
from helpers.scripts import RunScript
from helpers.settings import parsed
from helpers.unsloth import FakeUnsloth
from helpers.weights import adapter_of, same_weights
from peft import LoraConfig, PeftModel, get_peft_model
from pytest import LogCaptureFixture
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo.arguments import ModelArguments, Settings
from gtpo.files import fingerprint
from gtpo.models.load import build_policy, load_policy
from gtpo.models.source import model_source
from gtpo.runs.start import start_run

TAGS = "<think> </think> <final> </final>"
SMALL = ("--limit", "100", "--G", "4", "--prompts_per_step", "1", "--max_completion_length", "8", "--save_steps", "1")


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
    with refused(f"{run}/adapter was trained from other files than {tiny} has now"):
        further(run)


TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


@pytest.fixture
def of_peft(tiny: Path, tmp_path: Path) -> Path:
    """An adapter that PEFT alone has stored, whose shape no flag gives, with a tokenizer that has another template."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    torch.manual_seed(3)
    shape = {"r": 4, "lora_alpha": 32, "rank_pattern": {"o_proj": 2}, "use_rslora": True}
    lora = LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False, **shape)
    path = tmp_path / "of_peft"
    get_peft_model(model, lora).save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


IDS = torch.arange(10, 40)[None]


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_an_adapter_of_peft_keeps_its_shape_and_tokenizer(
    of_peft: Path, tiny: Path, tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    """Its factor too, in the new run, in what that saves, and where it is resumed after the adapter is gone."""
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    plain = logits_of(base)
    expected = logits_of(PeftModel.from_pretrained(base, of_peft))
    assert not torch.equal(plain, expected)
    settings = further(of_peft, "--run_name", "x")
    model = settings.model
    assert (model.model, model.initial_adapter, model.lora_rank) == (str(tiny), str(of_peft), 4)
    assert sorted(model.lora_target_modules) == ["o_proj", "q_proj"]
    assert f"{of_peft} does not name its prompt" in caplog.text
    policy, tokenizer = load_policy(settings, "transformers")
    assert torch.equal(logits_of(policy), expected)
    assert all(weight.requires_grad == ("lora_" in name) for name, weight in policy.named_parameters())
    assert tokenizer.chat_template == TEMPLATE
    checkpoint = tmp_path / "checkpoint-1"
    policy.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    noted = read_json(checkpoint / "adapter_config.json")
    assert (noted["lora_alpha"], noted["auto_mapping"]["base_fingerprint"]) == (32, fingerprint(tiny))
    again = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    assert torch.equal(logits_of(PeftModel.from_pretrained(again, checkpoint)), expected)
    of_peft.rename(tmp_path / "gone")
    settings.source = model_source(tiny)  # of a run that is resumed
    policy, tokenizer = load_policy(settings, "transformers", str(checkpoint))
    assert torch.equal(logits_of(policy), expected) and tokenizer.chat_template == TEMPLATE


def test_a_file_names_the_adapter_and_its_base(of_peft: Path, tiny: Path, tmp_path: Path) -> None:
    """As a dry run prints them; the base may be a copy, not another one."""
    printed = further(of_peft, "--output_dir", str(tmp_path / "new")).changed_settings()
    assert (printed["model"], printed["initial_adapter"]) == (str(tiny), str(of_peft))
    write_settings(tmp_path / "new.yaml", printed)
    settings = parsed("--config", str(tmp_path / "new.yaml"))
    assert (settings.source.adapter, settings.source.base, settings.model.lora_rank) == (of_peft, str(tiny), 4)
    with refused("--model tiny is not what the adapter .* was trained from"):
        parsed("--config", str(tmp_path / "new.yaml"), "--model", "tiny")


def test_unsloth_gets_the_factor_and_refuses_what_it_does_not_load(
    of_peft: Path, tiny: Path, unsloth: FakeUnsloth, caplog: LogCaptureFixture
) -> None:
    source = model_source(of_peft)
    arguments = ModelArguments(lora_rank=4, lora_target_modules=["o_proj", "q_proj"])
    with refused("of_peft has rank_pattern use_rslora, which Unsloth does not load: add --backend transformers"):
        build_policy(source, arguments, "unsloth", 0)
    path = of_peft / "adapter_config.json"
    config = read_json(path) | {"rank_pattern": {}, "use_rslora": False}
    weights = load_file(of_peft / "adapter_model.safetensors")
    save_file(
        {name: weight for name, weight in weights.items() if "q_proj" in name}, of_peft / "adapter_model.safetensors"
    )
    write_json(path, config | {"target_modules": ["q_proj"]})
    arguments = ModelArguments(lora_rank=4, lora_target_modules=["q_proj"])
    policy, tokenizer = build_policy(model_source(of_peft), arguments, "unsloth", 0)
    assert (unsloth.options["r"], unsloth.options["lora_alpha"]) == (4, 32)
    assert tokenizer.chat_template == TEMPLATE
    expected = adapter_of(of_peft)
    policy.save_pretrained(of_peft.with_name("saved"))
    assert same_weights(adapter_of(of_peft.with_name("saved")), expected)


@pytest.mark.slow
def test_an_adapter_of_peft_is_trained_resumed_and_evaluated(of_peft: Path, run_script: RunScript) -> None:
    """As ``--model`` of both scripts, and as ``--runs``; its logits are those before a step with rate 0."""
    here = of_peft.parent
    argv = ["--model", "of_peft", "--dataset", "arithmetic", "--max_steps", "2", "--output_dir", "new", *SMALL]
    assert "starts from the adapter of_peft" in run_script(here, "train_grpo.py", *argv).stderr
    sampled = ("--benchmarks", "arithmetic", "--limit", "2", "--k", "2", "--max_new_tokens", "4")
    table = run_script(here, "evaluate.py", "--model", "of_peft", *sampled).stdout
    assert "of_peft" in table and "base-" not in table
    of_peft.rename(here / "gone")
    run_script(here, "train_grpo.py", "--resume", "new", "--max_steps", "3")
    config = read_json(here / "new/adapter/adapter_config.json")
    assert (config["lora_alpha"], config["rank_pattern"], config["use_rslora"]) == (32, {"o_proj": 2}, True)
    run_script(here, "evaluate.py", "--runs", "base", "gone", "new", *sampled)


@pytest.mark.slow
def test_sft_then_gtpo_resumed_evaluated_and_drawn(run: Path, run_script: RunScript) -> None:
    argv = ["--model", str(run), "--dataset", "arithmetic", "--max_steps", "2", "--output_dir", "further", *SMALL]
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
