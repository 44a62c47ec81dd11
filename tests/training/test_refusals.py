"""What a trainer refuses by name: settings, arguments and models that the loss would ignore."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from datasets import Dataset
from helpers.canned import reward_parity
from helpers.refusals import refused
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from pytest import MonkeyPatch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig

from gtpo.training.refusals import check_inputs, deviations
from gtpo.training.trainer import GRPOTrainer, GTPOTrainer


def config(folder: Path, **values: Any) -> GRPOConfig:
    """A config whose values TRL itself has not checked."""
    args = GRPOConfig(output_dir=str(folder), loss_type="grpo", use_bias_correction_kl=False, bf16=False, use_cpu=True)
    for name, value in values.items():
        setattr(args, name, value)
    return args


def build(folder: Path, model: Any, tokenizer: Any = None, **arguments: Any) -> Any:
    given = {"train_dataset": Dataset.from_dict({"prompt": ["a"] * 8}), "args": config(folder), **arguments}
    return GRPOTrainer(model, [lambda completions, **_: [0.0] * len(completions)], processing_class=tokenizer, **given)


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "loss_type": "cispo",
        "importance_sampling_level": "sequence",
        "scale_rewards": "std",
        "multi_objective_aggregation": "sum",
        "delta": 2.0,
        "off_policy_mask_threshold": 0.5,
        "use_bias_correction_kl": True,
        "use_liger_kernel": True,
        "entropy_coef": 0.1,
        "use_adaptive_entropy": True,
        "top_entropy_quantile": 0.5,
        "mask_truncated_completions": True,
    }.items(),
)
def test_a_setting_that_changes_the_loss_is_refused(name: str, value: object, tmp_path: Path) -> None:
    args = config(tmp_path, beta=0.04)
    GRPOTrainer.check_settings(args)
    setattr(args, name, value)
    with refused(name):
        GRPOTrainer.check_settings(args)
    GRPOTrainer.check_settings(config(tmp_path, use_bias_correction_kl=True))  # without a KL term


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": 2.0}, "temperature in generation_kwargs = 2.0 is not temperature = 0.7: set temperature"),
        ({"temperature": 0.7, "top_k": 3, "max_new_tokens": 9}, None),
        ({"top_k": 4}, "top_k in generation_kwargs = 4 is not top_k = 3: set top_k"),
        (
            {"max_new_tokens": 8},
            "max_new_tokens in generation_kwargs = 8 is not max_completion_length = 9: set max_completion_length",
        ),
        ({"max_length": 64}, "max_length in generation_kwargs = 64 is not max_completion_length = 9"),
        ({"tempreature": 0.7}, r"tempreature in .* is not a setting of the sampler \(did you mean 'temperature'\?\)"),
        ({"stop_strings": ["</answer>"]}, "stop_strings in generation_kwargs is not supported"),
        ({"num_return_sequences": 2}, "num_return_sequences in generation_kwargs is not supported"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate in generation_kwargs is not supported"),
        ({"eos_token_id": 5}, "eos_token_id in generation_kwargs is not supported"),
        ({"no_repeat_ngram_size": 2, "typical_p": 0.9, "do_sample": True, "max_time": 9.0}, None),
    ],
)
def test_generation_kwargs_are_those_of_the_sampler(given: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    args = config(tmp_path, temperature=0.7, top_k=3, max_completion_length=9, generation_kwargs=given)
    if said is None:
        return GRPOTrainer.check_settings(args)
    with refused(said):
        GRPOTrainer.check_settings(args)


def test_other_generation_kwargs_are_checked_by_vllm(tmp_path: Path) -> None:
    GRPOTrainer.check_settings(config(tmp_path, use_vllm=True, generation_kwargs={"presence_penalty": 0.1}))
    for name in ("n", "max_tokens", "top_k"):
        with refused(f"{name} "):
            GRPOTrainer.check_settings(config(tmp_path, use_vllm=True, generation_kwargs={name: 1}))


class Silent(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs) * 0


class Scores(GTPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


class OfTRL(trl.GRPOTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * 0


class Ignored(GRPOTrainer, OfTRL):
    """Its loss comes after ours."""


class Doubled(GRPOTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


class First(OfTRL, GRPOTrainer):
    """Its loss comes before ours, and calls it."""


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (Silent, "Silent._compute_loss would never be called: override `objective`"),
        (type("Below", (Silent,), {}), "Silent._compute_loss"),
        (Scores, "Scores._get_per_token_logps_and_entropies"),
        (Ignored, "OfTRL.compute_loss"),
        (Doubled, None),
        (First, None),
        (GRPOTrainer, None),
        (GTPOTrainer, None),
    ],
)
def test_an_overridden_loss_without_effect_is_refused(
    trainer: Any, said: str | None, tiny: Path, tmp_path: Path
) -> None:
    rows = Dataset.from_dict({"prompt": ["a"] * 8})
    model = AutoModelForCausalLM.from_pretrained(tiny) if said is None else "no model is loaded"
    build = partial(trainer, model, [reward_parity], config(tmp_path), rows)
    if said is None:
        assert build(processing_class=AutoTokenizer.from_pretrained(tiny))
        return
    with refused(said):
        build()


@pytest.mark.parametrize(
    ("metric", "sets", "said"),
    [
        ("reward", {"one": [], "two": []}, "expected that of one set, such as 'one_reward'"),
        ("eval_reward", {"one": []}, "such as 'one_reward'"),
        ("loss", {"one": []}, "such as 'one_loss'"),
        ("eval_one_reward", {"one": [], "two": []}, None),
        ("two_reward", {"one": [], "two": []}, None),
        ("reward", [], None),
        (None, {"one": []}, None),
    ],
)
def test_the_best_metric_is_one_of_a_set(metric: str | None, sets: Any, said: str | None, tmp_path: Path) -> None:
    arguments = {"args": config(tmp_path, metric_for_best_model=metric), "eval_dataset": sets}
    if said is None:
        return check_inputs(arguments)
    with refused(said):
        check_inputs(arguments)


@pytest.mark.parametrize("arguments", [{"inputs": {"prompt_ids": []}}, {"inputs": {}, "return_outputs": True}])
def test_compute_loss_names_what_it_takes(arguments: dict[str, Any], build: Any) -> None:
    trainer = build("grpo")
    with refused("takes a micro-batch of _prepare_inputs"):
        trainer.compute_loss(trainer.model, **arguments)


OF_TRL = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "max_length": 99}  # TRL sets them


@pytest.mark.parametrize(
    ("settings", "of_model", "named"),
    [
        ({}, {}, []),
        ({"top_p": 0.1, "top_k": 1}, {}, ["top_p=0.1", "top_k=1"]),
        ({"min_p": 0.2, "repetition_penalty": 3.0}, {}, ["min_p=0.2", "repetition_penalty=3.0"]),
        ({"generation_kwargs": {"no_repeat_ngram_size": 2, "do_sample": True}}, {}, ["no_repeat_ngram_size=2"]),
        ({"generation_kwargs": {"do_sample": False, "max_new_tokens": 3}}, {}, ["do_sample=False"]),
        ({}, {"no_repeat_ngram_size": 3, "suppress_tokens": [7]}, ["no_repeat_ngram_size=3", "suppress_tokens=[7]"]),
        ({}, {"typical_p": 0.5, "min_new_tokens": 4, "eos_token_id": 2}, ["typical_p=0.5", "min_new_tokens=4"]),
        ({}, OF_TRL | {"do_sample": True}, []),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, {"no_repeat_ngram_size": 3}, []),
    ],
)
def test_what_the_sampler_alone_applies_is_named(
    settings: dict[str, Any], of_model: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    found = deviations(config(tmp_path, **settings), GenerationConfig(**of_model))
    assert sorted(part.partition(" (")[0] for part in found.split("), ") if part) == sorted(named)


@pytest.mark.parametrize(("name", "value"), {"beta": 0.04, "epsilon": 0.3, "epsilon_high": 0.28}.items())
def test_gtpo_refuses_kl_and_clipping(name: str, value: float, build: Any, tmp_path: Path) -> None:
    GRPOTrainer.check_settings(config(tmp_path, **{name: value}))
    with refused(name):
        build("gtpo", **{name: value})


def test_unsloth_takes_the_correction_of_the_sampler_out(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    args = config(tmp_path, use_vllm=True)
    GRPOTrainer.check_settings(args)
    monkeypatch.setattr(trl, "GRPOTrainer", type("UnslothGRPOTrainer", (), {}))
    with refused("vllm_importance_sampling_correction"):
        GRPOTrainer.check_settings(args)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [print]),
        ("environment_factory", object),
        ("rollout_func", print),
        ("peft_config", PromptTuningConfig()),
        ("model", SimpleNamespace(peft_config={"default": PromptTuningConfig()})),
    ],
)
def test_what_the_loss_would_ignore_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    expected = "PromptTuningConfig" if name in ("peft_config", "model") else name
    with refused(expected):
        GTPOTrainer(reward_funcs=[], args=config(tmp_path), **{"model": "no model is loaded", name: value})


def test_models_whose_loss_or_logits_are_others_are_refused(tiny: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    with pytest.raises(ValueError, match="lm_head"):  # from TRL 1.15 on TRL's
        model = AutoModelForCausalLM.from_pretrained(tiny)
        build(tmp_path, get_peft_model(model, LoraConfig(target_modules=["lm_head"])), tokenizer)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1, "vocab_size": 519}
    experts = Qwen3MoeForCausalLM(Qwen3MoeConfig(router_aux_loss_coef=0.001, **sizes))
    for coefficient in (None, 0.001):  # the model's, and the trainer's
        with refused("router_aux_loss_coef"):
            build(tmp_path, experts, tokenizer, args=config(tmp_path, router_aux_loss_coef=coefficient))
    assert not build(tmp_path, experts, tokenizer, args=config(tmp_path, router_aux_loss_coef=0.0)).aux_loss_enabled


def test_several_gpus_in_one_process_are_refused(build: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(GRPOConfig, "n_gpu", 2)
    with refused("2 GPUs"):
        build("grpo")
