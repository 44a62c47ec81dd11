"""What TRL's trainer accepts and the loss here would ignore: refused by name, before weights are loaded."""

from collections.abc import Mapping
from typing import Any

import trl

from gtpo.errors import UsageError
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
_OF_THE_PAPER = {
    "loss_type": "grpo",
    "scale_rewards": "group",
    "num_iterations": 1,
    "multi_objective_aggregation": "sum_then_normalize",
    "vllm_importance_sampling_correction": False,
}


def check_grpo_settings(args: Any) -> None:
    """Raise UsageError for the first setting of TRL's GRPOConfig that the objective does not implement."""
    for name, values in _SUPPORTED.items():
        if getattr(args, name) not in values and not (name == "use_bias_correction_kl" and args.beta == 0):
            raise _not_carried(f"{name} = {getattr(args, name)!r} (not {' or '.join(map(repr, values))})")
    if trl.GRPOTrainer.__name__.startswith("Unsloth") and args.use_vllm and args.vllm_importance_sampling_correction:
        raise _not_carried("vllm_importance_sampling_correction")  # Unsloth takes it out of TRL's method


def _not_carried(what: str) -> UsageError:
    return UsageError(f"{what} is not supported: TRL's GRPOTrainer has it; gtpo.ConflictMetrics measures it there.")


def check_gtpo_settings(args: Any) -> None:
    """As :func:`check_grpo_settings`, and what contradicts GTPO: KL term and clipping."""
    for name, value in {"beta": 0.0, "epsilon": type(args).epsilon, "epsilon_high": None}.items():
        if (found := getattr(args, name)) != value:
            raise UsageError(f"{name} = {found}: expected {value}, because GTPO has no KL term and no clipping.")
    check_grpo_settings(args)


def deviations(args: Any) -> str:
    """The settings of the objective that are not the paper's, with the paper's values; empty without any."""
    papers = _OF_THE_PAPER | {"steps_per_generation": args.gradient_accumulation_steps}  # one update per generation
    other = {name: getattr(args, name) for name, paper in papers.items() if getattr(args, name) != paper}
    if not args.use_vllm:
        other.pop("vllm_importance_sampling_correction", None)
    return ", ".join(f"{name}={value!r} (the paper: {papers[name]!r})" for name, value in other.items())


def check_inputs(arguments: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments of TRL's GRPOTrainer, ``model`` among them, that the loss does not carry."""
    from peft import PromptLearningConfig

    if found := [name for name in ("tools", "environment_factory", "rollout_func") if arguments.get(name)]:
        raise _not_carried(found[0])
    for config in (arguments.get("peft_config"), *getattr(arguments.get("model"), "peft_config", {}).values()):
        if isinstance(config, PromptLearningConfig):
            raise UsageError(f"{type(config).__name__} puts virtual tokens before the prompt: use LoRA.")


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
