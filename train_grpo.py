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
    line = read_command_line("grpo", SETTINGS)
    backend = load_backend_of(line)  # before trl, transformers and peft: Unsloth patches them
    from trl import GRPOConfig

    from gtpo import GRPOTrainer
    from gtpo.training.hooks import load_objective
    from gtpo.training.loop import train_policy
    from rewards import rewards_in

    kind, classes = load_objective(line.objective, GRPOTrainer, (*SETTINGS, GRPOConfig))
    settings = parse(line, (*classes, GRPOConfig))
    train_policy(kind, settings, backend, rewards_in, {"settings": settings.settings})


if __name__ == "__main__":
    run_script(main)
