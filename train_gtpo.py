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
    line = read_command_line("gtpo", SETTINGS)
    backend = load_backend_of(line)  # before trl, transformers and peft: Unsloth patches them
    from trl import GRPOConfig

    from gtpo import GTPOTrainer
    from gtpo.training.loop import train_policy
    from rewards import rewards_in

    settings = parse(line, [GRPOConfig])
    own = {"gtpo": settings.gtpo, "tags": settings.prompt.format_tags}
    train_policy(GTPOTrainer, settings, backend, rewards_in, own)


if __name__ == "__main__":
    run_script(main)
