"""Train a policy with GTPO (arXiv 2508.03772): LoRA, verifiable rewards, no reference model.

    python train_gtpo.py --model tiny  --dataset arithmetic --G 12     # a CPU, minutes
    python train_gtpo.py --model llama --dataset gsm8k --G 12          # one GPU, Listing 1 of the paper
    python train_gtpo.py --help

Differs from train_grpo.py only by GTPOArguments and GTPOTrainer.
"""

from gtpo.arguments import DataArguments, FormatArguments, GTPOArguments, ModelArguments, RewardArguments, RunArguments
from gtpo.cli.parse import load_backend_of, parse, read_command_line
from gtpo.runs.script import run_script

SETTINGS = (DataArguments, FormatArguments, RewardArguments, ModelArguments, RunArguments, GTPOArguments)


def main() -> None:
    line = read_command_line("gtpo")
    backend = load_backend_of(line, SETTINGS)  # before trl, transformers and peft: Unsloth patches them
    from trl import GRPOConfig

    from gtpo import GTPOTrainer
    from gtpo.data.load import load_rows, prepare_prompts
    from gtpo.data.tokenizer import assistant_prefill
    from gtpo.grading.user_functions import load_rewards, with_prefill
    from gtpo.models.load import load_policy
    from gtpo.models.preflight import check_machine, describe_dry_run, describe_first_row
    from gtpo.runs.start import check_run, start_run
    from gtpo.training.loop import run
    from rewards import rewards_in

    settings = parse(line, (*SETTINGS, GRPOConfig))
    check_machine(settings, backend)
    GTPOTrainer.check_settings(settings.trainer)
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
    trainer = GTPOTrainer(policy, rewards, settings.trainer, gtpo=settings.gtpo, processing_class=tokenizer, **prompts)
    run(trainer, settings, checkpoint)


if __name__ == "__main__":
    run_script(main)
