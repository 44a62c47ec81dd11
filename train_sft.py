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
    line = read_command_line("sft")
    backend = load_backend_of(line, SETTINGS)  # before trl, transformers and peft: Unsloth patches them
    from trl import SFTConfig, SFTTrainer

    from gtpo.data.load import load_rows, prepare_prompts, to_demonstrations
    from gtpo.data.tokenizer import check_answer_is_kept
    from gtpo.models.load import keep_adapter_in_float32, load_policy
    from gtpo.models.preflight import check_machine, describe_dry_run, describe_first_row
    from gtpo.runs.start import check_run, start_run
    from gtpo.training.loop import run
    from gtpo.training.refusals import check_unused

    settings = parse(line, (*SETTINGS, SFTConfig))
    check_machine(settings, backend)
    check_unused(settings.trainer, "sft")
    rows, held_out = load_rows(settings)
    rows = to_demonstrations(rows, settings.prompt.template_kwargs)
    held_out = held_out and to_demonstrations(held_out, settings.prompt.template_kwargs)
    if settings.run.dry_run:
        return print(describe_dry_run(settings, backend, len(rows)) + describe_first_row(settings, rows), end="")
    checkpoint = check_run(settings, rows, held_out)
    policy, tokenizer = load_policy(settings, backend)
    check_answer_is_kept(tokenizer, rows[0]["prompt"] + rows[0]["completion"], settings.prompt)
    rows, held_out = prepare_prompts(rows, held_out, tokenizer, settings)
    start_run(settings)
    prompts = {"train_dataset": rows, "eval_dataset": held_out}
    trainer = SFTTrainer(policy, args=settings.trainer, processing_class=tokenizer, **prompts)
    keep_adapter_in_float32(trainer.model)
    run(trainer, settings, checkpoint)


if __name__ == "__main__":
    run_script(main)
