"""What TRL's trainer accepts and the loss here would ignore: refused by name, before weights are loaded."""

import re
from collections.abc import Mapping
from typing import Any

from peft import PromptLearningConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper

from gtpo.errors import UsageError
from gtpo.models.backend import uses_unsloth
from gtpo_loss import LOSS_TYPES

# Settings of TRL that change its loss, and the values that ours implements, the paper's first.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "loss_type": LOSS_TYPES,
    "scale_rewards": ("group", "batch", "none"),  # A_i = (R_i - mean) / std: of the group, of the step, or undivided
    "importance_sampling_level": ("token",),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "delta": (None,),
    "off_policy_mask_threshold": (None,),
    "use_bias_correction_kl": (False,),
    "use_liger_kernel": (False,),
    "entropy_coef": (0.0,),
    "use_adaptive_entropy": (False,),
    "top_entropy_quantile": (1.0,),
    "mask_truncated_completions": (False,),
}
_INSTEAD = {  # what to do about some of them
    "use_bias_correction_kl": "TRL's default is True: set it to False for the KL term of Eq. 1",
    "use_liger_kernel": "leave it out, the loss here never holds the logits",
}
_OF_THE_PAPER = {
    "loss_type": "grpo",
    "scale_rewards": "group",
    "num_iterations": 1,
    "multi_objective_aggregation": "sum_then_normalize",
    "vllm_importance_sampling_correction": False,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
}
# Settings of a sampler that change no probability, or that TRL sets by its own config.
_NOT_OF_THE_SAMPLER = re.compile(
    r"_.*|transformers_version|.*_token_ids?|stop_strings|max_(length|new_tokens|tokens|time)|(use_)?cache.*|"
    r"temperature|top_[kp]|min_p|repetition_penalty"
)


def check_grpo_settings(args: Any) -> None:
    """Raise UsageError for the first setting of TRL's GRPOConfig that the objective does not implement."""
    for name, values in _SUPPORTED.items():
        found = getattr(args, name)
        if found in values or (name == "use_bias_correction_kl" and args.beta == 0):
            continue
        instead = _INSTEAD.get(name, "TRL's GRPOTrainer has it; gtpo.ConflictMetrics measures conflicts there")
        raise UsageError(f"{name} = {found!r} (not {' or '.join(map(repr, values))}) is not supported: {instead}.")
    if uses_unsloth() and args.use_vllm and args.vllm_importance_sampling_correction:
        name = "vllm_importance_sampling_correction"  # Unsloth takes it out of TRL's method
        raise UsageError(f"{name} is not supported with Unsloth: set it to False.")
    temperature = (args.generation_kwargs or {}).get("temperature", args.temperature)
    if temperature != args.temperature:
        raise UsageError(
            f"generation_kwargs samples at temperature {temperature}, the loss scores at {args.temperature}: set "
            "temperature, which is that of both."
        )


def check_gtpo_settings(args: Any) -> None:
    """As :func:`check_grpo_settings`, and what contradicts GTPO: KL term and clipping."""
    for name, value in {"beta": 0.0, "epsilon": type(args).epsilon, "epsilon_high": None}.items():
        if (found := getattr(args, name)) != value:
            raise UsageError(f"{name} = {found}: expected {value}, because GTPO has no KL term and no clipping.")
    check_grpo_settings(args)


def deviations(args: Any, generation_config: Any = None) -> str:
    """The settings of the objective and of the sampler that are not the paper's; empty without any.

    ``generation_config``: the model's own, which Transformers' sampler applies too; the loss knows neither.
    """
    papers = _OF_THE_PAPER | {"steps_per_generation": args.gradient_accumulation_steps}  # one update per generation
    other = {name: getattr(args, name) for name, paper in papers.items() if getattr(args, name) != paper}
    if not args.use_vllm:
        other.pop("vllm_importance_sampling_correction", None)
    found = [f"{name}={value!r} (the paper: {papers[name]!r})" for name, value in other.items()]
    sampler = {}
    if generation_config is not None and not args.use_vllm:
        sampler = {name: value for name, value in generation_config.to_diff_dict().items() if value}
    sampler |= {"do_sample": True} | (args.generation_kwargs or {})
    for name, value in sampler.items():
        if not _NOT_OF_THE_SAMPLER.fullmatch(name) and (name, value) != ("do_sample", True):
            found.append(f"{name}={value!r} (of the sampler alone: the loss scores without it)")
    return ", ".join(found)


def check_inputs(arguments: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments of TRL's GRPOTrainer, ``model`` among them, that the loss does not carry."""
    for name in ("tools", "environment_factory", "rollout_func"):
        if arguments.get(name):
            raise UsageError(f"{name} is not supported: TRL's GRPOTrainer has it.")
    for config in (arguments.get("peft_config"), *getattr(arguments.get("model"), "peft_config", {}).values()):
        if isinstance(config, PromptLearningConfig):
            raise UsageError(f"{type(config).__name__} puts virtual tokens before the prompt: use LoRA.")


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
