"""What a trainer refuses by name: settings, arguments and models that the loss would ignore."""

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from helpers.refusals import refused
from peft import PromptTuningConfig
from pytest import MonkeyPatch
from transformers import GenerationConfig, LlamaConfig
from trl import GRPOConfig

from gtpo.training.refusals import check_arguments, check_overrides, deviations
from gtpo.training.trainer import GRPOTrainer, GTPOTrainer


def config(**values: Any) -> GRPOConfig:
    """A config whose values TRL itself has not checked."""
    args = GRPOConfig(loss_type="grpo", use_bias_correction_kl=False, bf16=False, use_cpu=True)
    vars(args).update(values)
    return args


def refused_if(said: str | None) -> Any:
    return refused(said) if said else nullcontext()


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
def test_a_setting_that_changes_the_loss_is_refused(name: str, value: object) -> None:
    GRPOTrainer.check_settings(config(beta=0.04))
    instead = {"use_bias_correction_kl": "set it to False for the KL term of Eq. 1", "use_liger_kernel": "leave it out"}
    with refused(f"^{name} = .*: {instead.get(name, 'TRL.s GRPOTrainer has it')}"):
        GRPOTrainer.check_settings(config(beta=0.04, **{name: value}))


def test_without_a_kl_term_its_correction_changes_nothing() -> None:
    GRPOTrainer.check_settings(config(use_bias_correction_kl=True))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": 2.0}, "temperature in generation_kwargs = 2.0 is not temperature = 0.7: set temperature"),
        ({"temperature": 0.7, "top_k": 3, "max_new_tokens": 9}, None),
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
        ({"stop_token_ids": [5]}, "stop_token_ids in generation_kwargs is not supported"),
        ({"output_scores": True}, "output_scores in generation_kwargs is not supported"),
        ({"_name": 5}, "_name in generation_kwargs is not supported"),
        ({"top_p": 0.5}, "top_p in generation_kwargs = 0.5 is not top_p = 1.0: set top_p"),
        ({"min_p": 0.5}, "min_p in generation_kwargs = 0.5 is not min_p = None: set min_p"),
        (
            {"repetition_penalty": 2.0},
            "repetition_penalty in .* = 2.0 is not repetition_penalty = 1.0: set repetition_",
        ),
        ({"cache_implementation": "static"}, "cache_implementation in .* = static is not cache_implementation = None"),
        ({"no_repeat_ngram_size": 2, "typical_p": 0.9, "do_sample": True, "max_time": 9.0}, None),
    ],
)
def test_generation_kwargs_are_those_of_the_sampler(given: Any, said: str | None) -> None:
    with refused_if(said):
        GRPOTrainer.check_settings(config(temperature=0.7, top_k=3, max_completion_length=9, generation_kwargs=given))


def test_other_generation_kwargs_are_checked_by_vllm() -> None:
    GRPOTrainer.check_settings(config(use_vllm=True, generation_kwargs={"presence_penalty": 0.1}))
    for name in ("n", "max_tokens", "top_k"):
        with refused(f"{name} "):
            GRPOTrainer.check_settings(config(use_vllm=True, generation_kwargs={name: 1}))


def own(self: Any, *args: Any, **kwargs: Any) -> None:
    """A method in the place of TRL's."""


Silent = type("Silent", (GRPOTrainer,), {"_compute_loss": own})
OfTRL = type("OfTRL", (trl.GRPOTrainer,), {"compute_loss": own})


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (Silent, "Silent._compute_loss would never be called: override `objective`"),
        (type("Below", (Silent,), {}), "Silent._compute_loss"),
        (type("Scores", (GTPOTrainer,), {"_get_per_token_logps_and_entropies": own}), "Scores._get_per_token_logps"),
        (type("Ignored", (GRPOTrainer, OfTRL), {}), "OfTRL.compute_loss"),
    ],
)
def test_an_overridden_loss_without_effect_is_refused(trainer: Any, said: str) -> None:
    with refused(said):
        trainer("no model is loaded", [], config())


def test_an_overridden_loss_that_is_called_is_accepted() -> None:
    check_overrides(type("Doubled", (GRPOTrainer,), {"compute_loss": own}), GRPOTrainer)
    check_overrides(type("First", (OfTRL, GRPOTrainer), {}), GRPOTrainer)


@pytest.mark.parametrize(
    ("metric", "sets", "said"),
    [
        ("reward", {"one": [], "two": []}, "expected that of one set, such as 'one_reward'"),
        ("eval_reward", {"one": []}, "such as 'one_reward'"),
        ("eval_one_reward", {"one": [], "two": []}, None),
        ("two_reward", {"one": [], "two": []}, None),
        ("reward", [], None),
        (None, {"one": []}, None),
    ],
)
def test_the_best_metric_is_one_of_a_set(metric: str | None, sets: Any, said: str | None) -> None:
    with refused_if(said):
        check_arguments({"args": config(metric_for_best_model=metric), "eval_dataset": sets})


@pytest.mark.parametrize("arguments", [{"inputs": {"prompt_ids": []}}, {"inputs": {}, "return_outputs": True}])
def test_compute_loss_names_what_it_takes(arguments: Any, build: Any) -> None:
    trainer = build("grpo")
    with refused("takes a micro-batch of _prepare_inputs"):
        trainer.compute_loss(trainer.model, **arguments)


OF_TRL = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "max_length": 99}  # TRL sets them


@pytest.mark.parametrize(
    ("settings", "of_model", "named"),
    [
        ({"top_p": 0.1, "top_k": 1}, {}, ["top_p=0.1", "top_k=1"]),
        ({"min_p": 0.2, "repetition_penalty": 3.0}, {}, ["min_p=0.2", "repetition_penalty=3.0"]),
        ({"generation_kwargs": {"no_repeat_ngram_size": 2, "do_sample": True}}, {}, ["no_repeat_ngram_size=2"]),
        ({"generation_kwargs": {"do_sample": False, "max_new_tokens": 3}}, {}, ["do_sample=False"]),
        ({}, {"no_repeat_ngram_size": 3, "suppress_tokens": [7]}, ["no_repeat_ngram_size=3", "suppress_tokens=[7]"]),
        ({}, {"typical_p": 0.5, "min_new_tokens": 4, "eos_token_id": 2}, ["typical_p=0.5", "min_new_tokens=4"]),
        ({}, OF_TRL | {"do_sample": True}, []),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, {"no_repeat_ngram_size": 3}, []),
        ({"use_vllm": True}, {}, ["vllm_importance_sampling_correction=True"]),
        ({"loss_type": "dapo", "scale_rewards": "batch"}, {}, ["loss_type='dapo'", "scale_rewards='batch'"]),
        (
            {"num_iterations": 2, "multi_objective_aggregation": "normalize_then_sum"},
            {},
            ["num_iterations=2", "multi_objective_aggregation='normalize_then_sum'"],
        ),
        ({"steps_per_generation": 3}, {}, ["steps_per_generation=3"]),
    ],
)
def test_what_is_not_the_papers_is_named(settings: Any, of_model: Any, named: Any) -> None:
    found = deviations(config(**settings), GenerationConfig(**of_model))
    assert sorted(re.findall(r"(\S+=\S+) \(", found)) == sorted(named)


@pytest.mark.parametrize(("name", "value"), {"beta": 0.04, "epsilon": 0.3, "epsilon_high": 0.28}.items())
def test_gtpo_refuses_kl_and_clipping(name: str, value: float) -> None:
    GRPOTrainer.check_settings(config(**{name: value}))
    with refused(f"{name} = {value}: GTPOTrainer does not use it"):
        GTPOTrainer("no model is loaded", [], config(**{name: value}))


def test_unsloth_takes_the_correction_of_the_sampler_out(monkeypatch: MonkeyPatch) -> None:
    GRPOTrainer.check_settings(config(use_vllm=True))
    monkeypatch.setattr(trl, "GRPOTrainer", type("UnslothGRPOTrainer", (), {}))
    with refused("vllm_importance_sampling_correction"):
        GRPOTrainer.check_settings(config(use_vllm=True))


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
def test_what_the_loss_would_ignore_is_refused(name: str, value: Any) -> None:
    expected = "PromptTuningConfig" if name in ("peft_config", "model") else name
    with refused(expected):
        GTPOTrainer(reward_funcs=[], args=config(), **{"model": "no model is loaded", name: value})


def test_lora_on_the_head_is_refused(build: Any) -> None:
    with pytest.raises(ValueError, match="lm_head"):  # from TRL 1.15 on TRL's
        build("grpo", target_modules=["lm_head"])


def test_a_router_loss_is_refused(build: Any, monkeypatch: MonkeyPatch) -> None:
    for name, value in {"output_router_logits": False, "router_aux_loss_coef": 0.001}.items():  # of experts
        monkeypatch.setattr(LlamaConfig, name, value, raising=False)
    for coefficient in (None, 0.001):  # the model's, and the trainer's
        with refused("router_aux_loss_coef"):
            build("grpo", router_aux_loss_coef=coefficient)
    assert not build("grpo", router_aux_loss_coef=0.0).aux_loss_enabled


def test_several_gpus_in_one_process_are_refused(build: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(GRPOConfig, "n_gpu", 2)
    with refused("2 GPUs"):
        build("grpo")
