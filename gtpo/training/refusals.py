"""What TRL's trainer accepts and the loss here would ignore: refused by name, before weights are loaded."""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PromptLearningConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from transformers import GenerationConfig, ProcessorMixin

from gtpo.arguments import fields_of
from gtpo.errors import UsageError, nearest
from gtpo.files import read_yaml
from gtpo.models.backend import uses_unsloth
from gtpo_loss import LOSS_TYPES

_VALUES = read_yaml(Path(__file__).with_name("objective.yaml"))
_UNUSED = read_yaml(Path(__file__).with_name("unused.yaml"))
# Settings of a sampler that change no probability, or that TRL sets by its own config.
_NOT_OF_THE_SAMPLER = re.compile(
    r"_.*|transformers_version|.*_token_ids?|stop_strings|max_(length|new_tokens|tokens|time)|(use_)?cache.*|"
    r"temperature|top_[kp]|min_p|repetition_penalty"
)


def check_grpo_settings(args: Any) -> None:
    """Raise UsageError for the first setting of TRL's GRPOConfig that the objective does not implement."""
    for name, values in (_VALUES["supported"] | {"loss_type": LOSS_TYPES}).items():
        found = getattr(args, name)
        if found in values or (name == "use_bias_correction_kl" and args.beta == 0):
            continue
        expected = " or ".join(map(repr, values))
        instead = _VALUES["instead"].get(name, "TRL's GRPOTrainer has it")
        if name == "loss_type" and found not in _VALUES["losses_of_trl"]:
            instead = f"TRL has no such loss{nearest(str(found), [*LOSS_TYPES, *_VALUES['losses_of_trl']])}"
        raise UsageError(f"{name} = {found!r} (not {expected}) is not supported: {instead}.")
    if uses_unsloth() and args.use_vllm and args.vllm_importance_sampling_correction:
        name = "vllm_importance_sampling_correction"  # Unsloth takes it out of TRL's method
        raise UsageError(f"{name} is not supported with Unsloth: set it to False.")
    check_unused(args, "grpo")
    check_generation_kwargs(args)


def check_unused(args: Any, trainer: str) -> None:
    """Raise UsageError for the first setting of a config, not its default, that reaches nothing; grpo or sft."""
    fields = fields_of([type(args)])
    parameters = inspect.signature(type(args)).parameters  # Unsloth's config has other defaults than its fields
    for name, instead in _UNUSED[trainer].items():
        found = getattr(args, name)
        defaults: list[Any] = [[], None, fields[name].default, getattr(parameters.get(name), "default", None)]
        if found not in defaults:
            raise UsageError(f"{name} = {found!r} has no effect, or a wrong one: {instead}.")


def check_generation_kwargs(args: Any) -> None:
    """Raise UsageError for the first of ``generation_kwargs`` that the sampler does not take, or a setting decides."""
    known = GenerationConfig().to_dict()
    for name, value in (args.generation_kwargs or {}).items():
        setting = _VALUES["also_settings"].get(name)
        fault = ""
        if setting and getattr(args, setting) != value:
            fault = f"= {value} is not {setting} = {getattr(args, setting)}: set {setting}"
        elif re.fullmatch(_VALUES["not_one_completion"], name):
            fault = "is not supported, completions end with an EOS: remove it"
        elif not args.use_vllm and name not in known:  # vLLM refuses it
            fault = f"is not a setting of the sampler{nearest(name, known)}: remove it"
        if fault:
            raise UsageError(f"{name} in generation_kwargs {fault}.")


def deviations(args: Any, generation_config: Any) -> str:
    """The settings of the objective and of the sampler that are not the paper's; empty without any.

    ``generation_config``: the model's own, which Transformers' sampler applies too; the loss knows neither.
    """
    papers = _VALUES["paper"] | {"steps_per_generation": args.gradient_accumulation_steps}  # one update per generation
    if not args.use_vllm:
        del papers["vllm_importance_sampling_correction"]
    found = []
    for name, paper in papers.items():
        value = getattr(args, name)
        if value != paper:
            found.append(f"{name}={value!r} (the paper: {paper!r})")
    sampler = dict(args.generation_kwargs or {})
    if not args.use_vllm and generation_config is not None:
        sampler = {name: value for name, value in generation_config.to_diff_dict().items() if value} | sampler
    for name, value in sampler.items():
        if not _NOT_OF_THE_SAMPLER.fullmatch(name) and (name, value) != ("do_sample", True):
            found.append(f"{name}={value!r} (of the sampler alone: the loss scores without it)")
    return ", ".join(found)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments of TRL's GRPOTrainer, ``model`` among them, that the loss does not carry.

    Also for a best metric that no evaluation of several sets has: TRL's sets overwrite each other's ``eval_reward``.
    """
    sets = arguments.get("eval_dataset")
    metric = str(arguments["args"].metric_for_best_model or "").removeprefix("eval_")
    if isinstance(sets, Mapping) and metric and not metric.startswith(tuple(sets)):
        expected = f"{next(iter(sets))}_{metric}"
        raise UsageError(f"metric_for_best_model is {metric!r}: expected that of one set, such as {expected!r}.")
    for name in ("tools", "environment_factory", "rollout_func"):
        if arguments.get(name):
            raise UsageError(f"{name} is not supported: TRL's GRPOTrainer has it.")
    for config in (arguments.get("peft_config"), *getattr(arguments.get("model"), "peft_config", {}).values()):
        if isinstance(config, PromptLearningConfig):
            raise UsageError(f"{type(config).__name__} puts virtual tokens before the prompt: use LoRA.")


def check_overrides(trainer: type, ours: type) -> None:
    """Raise UsageError for a method of TRL's loss in a subclass of ``ours`` that the loss here never calls."""
    order = trainer.__mro__
    for place, cls in enumerate(order):
        for name in vars(cls).keys() & {"_compute_loss", "_get_per_token_logps_and_entropies", "compute_loss"}:
            is_called = name == "compute_loss" and place < order.index(ours)
            if cls not in ours.__mro__ and not is_called:
                raise UsageError(
                    f"{cls.__name__}.{name} would never be called: override `objective`, or train it with TRL's "
                    "GRPOTrainer."
                )


def check_policy(causal_lm: Any, processing_class: Any) -> None:
    """As :func:`check_embeddings`, and UsageError for LoRA on the head, and for a model of images or audio."""
    if isinstance(processing_class, ProcessorMixin):
        raise UsageError("images and audio are not supported: pass a tokenizer as processing_class.")
    if isinstance(causal_lm.get_output_embeddings(), BaseTunerLayer):
        raise UsageError("LoRA on lm_head is not supported: remove 'lm_head' from target_modules.")
    check_embeddings(causal_lm)


def check_embeddings(causal_lm: Any) -> None:
    """Raise UsageError for LoRA on embeddings where the trained model is not base and adapter.

    The merge of an adapter on one of two tied embeddings changes both. Unsloth trains all of them, and vLLM gets the
    adapter alone.
    """
    tied = getattr(causal_lm.config.get_text_config(), "tie_word_embeddings", False)
    for module in (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()):
        if tied and isinstance(module, BaseTunerLayer):
            raise UsageError(
                "LoRA on embed_tokens or lm_head is not supported where the model ties them, merged it would change "
                "both: remove them from target_modules."
            )
        if isinstance(module, ModulesToSaveWrapper) and uses_unsloth():
            raise UsageError("LoRA on embed_tokens or lm_head is not supported with Unsloth: remove them.")


def logit_options(config: Any, router_aux_loss_coef: float | None = 0.0) -> dict[str, Any]:
    """How a model scales its logits, for ``linear_logps_and_entropy``: Gemma caps, Cohere multiplies, Granite divides.

    UsageError for the load-balancing loss of a mixture of experts (a coefficient of None is the model's).
    :func:`gtpo.training.checks.check_head` finds any other scaling.
    """
    text = config.get_text_config()
    coefficient = getattr(text, "router_aux_loss_coef", 0.0) if router_aux_loss_coef is None else router_aux_loss_coef
    if hasattr(text, "output_router_logits") and coefficient:
        raise UsageError(
            f"{text.model_type} models add a router loss: set router_aux_loss_coef to 0 to train without it."
        )
    scale = getattr(text, "logit_scale", None) or 1.0
    return {
        "logit_scale": scale / (getattr(text, "logits_scaling", None) or 1.0),
        "softcap": getattr(text, "final_logit_softcapping", None),
    }
