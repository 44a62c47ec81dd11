"""Fine-tune a policy on the reference solutions (SFT), the supervised baseline of the paper.

    python train_sft.py --model tiny  --dataset arithmetic             # a CPU, minutes
    python train_sft.py --model llama --dataset gsm8k                  # one GPU, Listing 1 of the paper
    python train_sft.py --help

The prompts are those of GTPO and GRPO. The loss covers the completion only: solution and answer in the paper's tags.
"""

from gtpo.arguments import DataArguments, ModelArguments, PromptArguments, RunArguments
from gtpo.cli.parse import load_backend_of, parse, read_command_line
from gtpo.runs.script import run_script

SETTINGS = (DataArguments, PromptArguments, ModelArguments, RunArguments)


def main() -> None:
    line = read_command_line("sft", SETTINGS)
    backend = load_backend_of(line)  # before trl, transformers and peft: Unsloth patches them
    from trl import SFTConfig

    from gtpo.training.loop import train_policy
    from gtpo.training.sft import SFTTrainer

    settings = parse(line, [SFTConfig])
    train_policy(SFTTrainer, settings, backend)


if __name__ == "__main__":
    run_script(main)
