"""Train a policy with GRPO (arXiv 2402.03300), the baseline, or with your own objective; all else as train_gtpo.py.

python train_grpo.py --model tiny --dataset arithmetic --G 12        # a CPU, minutes
python train_grpo.py --model qwen --dataset math --G 8 --beta 1e-6   # one GPU, Listing 1 of the paper
python train_grpo.py --objective my_objective.py:Mine --model tiny --dataset arithmetic
"""

from gtpo.arguments import DataArguments, FormatArguments, ModelArguments, RewardArguments, RunArguments
from gtpo.cli.parse import load_backend_of, parse, read_command_line
from gtpo.runs.script import run_script

SETTINGS = (DataArguments, FormatArguments, RewardArguments, ModelArguments, RunArguments)


def main() -> None:
    line = read_command_line("grpo")
    backend = load_backend_of(line, SETTINGS)  # before trl, transformers and peft: Unsloth patches them
    from trl import GRPOConfig

    from gtpo import GRPOTrainer
    from gtpo.data.load import load_rows, prepare_prompts
    from gtpo.data.tokenizer import assistant_prefill
    from gtpo.grading.user_functions import load_rewards, with_prefill
    from gtpo.models.load import load_policy
    from gtpo.models.preflight import check_machine, describe_dry_run, describe_first_row
    from gtpo.runs.start import check_run, start_run
    from gtpo.training.loop import run
    from gtpo.training.objective import load_objective
    from rewards import rewards_in

    kind, classes = load_objective(line.flags.get("objective"), GRPOTrainer, (*SETTINGS, GRPOConfig))
    settings = parse(line, (*SETTINGS, *classes, GRPOConfig))
    check_machine(settings, backend)
    kind.check_settings(settings.trainer)
    rows, held_out = load_rows(settings)
    rewards = load_rewards(settings.reward.reward, rewards_in(settings.prompt.format), (held_out or rows).column_names)
    if settings.run.dry_run:
        return print(describe_dry_run(settings, backend, len(rows)) + describe_first_row(settings, rows), end="")
    checkpoint = check_run(settings, rows, held_out)
    policy, tokenizer = load_policy(settings, backend)
    rewards = with_prefill(rewards, assistant_prefill(tokenizer, settings.prompt))
    rows, held_out = prepare_prompts(rows, held_out, tokenizer, settings)
    start_run(settings)
    prompts = {"train_dataset": rows, "eval_dataset": held_out}
    trainer = kind(policy, rewards, settings.trainer, settings=settings.settings, processing_class=tokenizer, **prompts)
    run(trainer, settings, checkpoint)


if __name__ == "__main__":
    run_script(main)
