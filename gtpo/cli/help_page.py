"""The page that ``--help`` prints: our settings by group, then the usual ones of TRL and Transformers."""

import argparse
import dataclasses
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from gtpo.arguments import fields_of

DESCRIPTIONS = {
    "gtpo": "Train a policy with GTPO: conflict-aware gradient correction and entropy control, no reference model.",
    "grpo": "Train a policy with GRPO, the baseline: group-relative advantages, optional KL term.",
    "sft": "Fine-tune on the reference solutions in the paper's tags, the supervised baseline.",
    "evaluate": "Evaluate models on GSM8K, MATH, AIME, AMC or arithmetic: pass@k and maj@k as in Table 1.",
}


# Of some 200 settings of TRL and Transformers those that a run usually sets; --help_all shows all.
SHOWN_TRAINER_FIELDS = {
    "sampling and objective (TRL)": {
        "num_generations": "G, completions per prompt; --G is short for it [Section 6: 8 or 12].",
        "beta": "Weight of the KL term, GRPO only [Section 6: 0, 1e-6 or 0.04].",
        "temperature": "Sampling temperature; log-probabilities and entropies use it too [Listing 1: 1.0].",
        "max_completion_length": "Maximum completion length in tokens.",
        "num_iterations": "Optimizer steps per batch of completions [Section 5: 1].",
        "loss_type": "Weight of a token: grpo 1/|o_i| [Eq. 2, 11], dr_grpo a constant [arXiv 2503.20783], dapo one "
        "count of all tokens [arXiv 2503.14476], bnpo the same per micro-batch [TRL].",
        "scale_rewards": "Advantages over the standard deviation of the group [Section 3], the batch, or none "
        "[arXiv 2503.20783].",
        "epsilon": "The ratio is clipped to 1 - epsilon and 1 + epsilon, GRPO only, where num_iterations is above 1.",
        "epsilon_high": "Clipped above at 1 + epsilon_high, GRPO only [arXiv 2503.14476: 0.28]. Default: epsilon.",
        "vllm_importance_sampling_correction": "Weight tokens by the ratio of the policy to vLLM [TRL].",
        "use_vllm": "Generate with vLLM, on a GPU.",
        "max_length": "Maximum length of prompt and solution in tokens.",
    },
    "optimization (Transformers)": {
        "max_steps": "Optimizer steps; -1: num_train_epochs decides.",
        "num_train_epochs": "Passes over the data, where max_steps is -1.",
        "learning_rate": "Peak learning rate [Listing 1: 1e-6].",
        "lr_scheduler_type": "cosine, linear, constant, constant_with_warmup, ... [Listing 1: cosine].",
        "warmup_steps": "Steps; below 1 the share of all steps [Listing 1: 0.005].",
        "optim": "adamw_torch, paged_adamw_8bit (needs bitsandbytes), ... [Listing 1].",
        "adam_beta1": "[Listing 1, Fig. 6]",
        "adam_beta2": "[Listing 1, Fig. 6]",
        "weight_decay": "[Listing 1: 0.1]",
        "max_grad_norm": "Gradient clipping norm; 0 disables it [Listing 1: 0.1].",
        "per_device_train_batch_size": "Completions per micro-batch; derived from prompts_per_step unless given.",
        "gradient_accumulation_steps": "Micro-batches per step; derived from prompts_per_step unless given.",
        "gradient_checkpointing": "Less memory, slower.",
        "bf16": "bfloat16 mixed precision, on a GPU that supports it.",
    },
    "files and logs (Transformers)": {
        "output_dir": "The run directory; by default outputs/METHOD-MODEL-DATASET-RUN_NAME.",
        "run_name": "Last part of the directory name, and the name in wandb; by default the time.",
        "report_to": "wandb, another integration of Transformers, or none.",
        "save_steps": "Steps between checkpoints.",
        "seed": "Seed of sampling, shuffling and the adapter [Listing 1: 3407].",
    },
}


EVALUATION_GROUPS = {
    "what is evaluated": ("benchmarks", "runs", "model", "checkpoint", "limit"),
    "sampling": (
        *("k", "temperature", "top_p", "seed", "max_new_tokens", "backend", "load_in_4bit", "batch_size"),
        "gpu_memory_utilization",
    ),
    "prompt (default: that of the run)": ("system_prompt", "tags", "chat_template", "chat_template_kwargs"),
    "your benchmark": ("prompt_column", "answer_column", "grader", "split", "dataset_config", "data_dir"),
    "scores and files": ("output_dir", "overwrite", "regrade", "compare"),
}
EVALUATION_EXAMPLES = """examples:
  python evaluate.py --benchmarks gsm8k --k 8                         # the newest finished run under outputs/
  python evaluate.py --benchmarks gsm8k --k 8 --runs base outputs/RUN # a run, and the model it was trained from
  python evaluate.py --benchmarks math500 --k 8 --model qwen          # a base model
  python evaluate.py --benchmarks my_test.csv --k 8                   # your problems: columns prompt and answer
  python evaluate.py --compare outputs/RUN outputs/OTHER              # paired difference of stored scores

docs/evaluation.md explains the scores. --debug shows the traceback of an error."""


SFT_TEXTS = {  # where those of GTPO and GRPO speak of groups and vLLM
    "prompts_per_step": "Solutions per optimizer step; the batch size is derived from it unless given.",
    "per_device_train_batch_size": "Solutions per micro-batch; derived from prompts_per_step if that is given.",
    "gpu_memory_utilization": "Not used by supervised fine-tuning.",
}


def print_help(
    script: str, classes: Sequence[type], preset: Mapping[str, Any], derived: Collection[str], show_all: bool = False
) -> None:
    """Print the help page of a script.

    Args:
        script: gtpo, grpo, sft or evaluate.
        classes: The dataclasses of its settings; of a train script the last one is TRL's trainer config.
        preset: Values shown as defaults, where a preset has them.
        derived: Settings whose default follows from others; it is not shown.
        show_all: Also show every setting of TRL and Transformers.
    """
    training = script != "evaluate"
    sections = {cls._argument_group_name: fields_of([cls]) for cls in classes if hasattr(cls, "_argument_group_name")}
    if not training:
        known = fields_of(classes)
        sections = {title: {name: known[name] for name in names} for title, names in EVALUATION_GROUPS.items()}
    texts = {name: str(item.metadata.get("help", "")) for group in sections.values() for name, item in group.items()}
    if training:
        rest = {name: item for name, item in fields_of(classes[-1:]).items() if name not in texts}
        for title, shown in SHOWN_TRAINER_FIELDS.items():
            sections[title] = {name: rest.pop(name) for name in shown if name in rest}
            texts |= shown
        if show_all:
            sections["all other settings of TRL and Transformers"] = rest
            texts |= {name: str(item.metadata.get("help", "")) for name, item in rest.items()}
        if script == "sft":
            texts |= SFT_TEXTS
    page = argparse.ArgumentParser(
        prog=f"train_{script}.py" if training else "evaluate.py",
        usage="%(prog)s [--config FILE] [--key value ...]",
        description=DESCRIPTIONS[script],
        epilog=f"[...] names the source of a value in the paper. Defaults are those of --model tiny; configs/{script}/ "
        "has the other presets. --debug shows the traceback of an error."
        if training
        else EVALUATION_EXAMPLES,
        add_help=False,
        formatter_class=argparse.HelpFormatter if training else argparse.RawDescriptionHelpFormatter,
    )
    for title, fields in sections.items():
        group = page.add_argument_group(title)
        for name, item in fields.items():
            default = None if name in derived else _default(item, preset)
            text = texts[name] if default in (None, "") else f"{texts[name]} (default: {default})"
            group.add_argument(f"--{name}", metavar=_placeholder(item.type), help=text.replace("%", "%%"))
    group = page.add_argument_group("help and files of settings")
    group.add_argument("--config", metavar="FILE", help="YAML file of settings; the command line overrides it.")
    group.add_argument("--help", action="store_true", help="Show this page.")
    if training:
        group.add_argument("--help_all", action="store_true", help="Also show all settings of TRL and Transformers.")
    page.print_help()


def _default(item: dataclasses.Field[Any], preset: Mapping[str, Any]) -> Any:
    if item.name in preset:
        return preset[item.name]
    if callable(item.default_factory):
        return " ".join(map(str, item.default_factory()))
    return None if item.default is dataclasses.MISSING else item.default


def _placeholder(type_: Any) -> str:
    """int | None -> N, bool -> true|false, Literal -> its values."""
    options = [option for option in typing.get_args(type_) if option is not type(None)]
    if typing.get_origin(type_) is Literal:
        return "|".join(map(str, options))
    for option in [*options, type_]:
        if option in (bool, int, float):
            return {bool: "true|false", int: "N", float: "X"}[option]
    return "VALUE"
