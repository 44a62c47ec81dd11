"""Fine-tune a policy on the reference solutions (SFT), the supervised baseline of the paper.

    python train_sft.py --model tiny  --dataset arithmetic             # a CPU, minutes
    python train_sft.py --model llama --dataset gsm8k                  # one GPU, Listing 1 of the paper
    python train_sft.py --help

The prompts are those of GTPO and GRPO; the loss is on the completion alone: solution and answer in the paper's tags.
"""

from gtpo.arguments import DataArguments, ModelArguments, RunArguments
from gtpo.backend import load_backend
from gtpo.callbacks import track, train
from gtpo.cli import parse, run_script
from gtpo.data import drop_long_prompts, load_train, to_demonstrations
from gtpo.export import save_adapter
from gtpo.models import load_policy
from gtpo.report import write_report
from gtpo.runs import check_run, start_run


def main() -> None:
    backend = load_backend()  # before trl, transformers and peft, which Unsloth patches
    from trl import SFTConfig, SFTTrainer

    data, model, run, args, resolved = parse("sft", (DataArguments, ModelArguments, RunArguments, SFTConfig))
    pass
    pass
    pass
    pass

    rows = load_train(data.dataset, data.data_dir, args.seed)
    checkpoint = check_run(resolved, run, len(rows))
    policy, tokenizer = load_policy(model, backend, args.seed)
    rows = drop_long_prompts(rows, tokenizer, data.max_prompt_length)
    start_run(resolved, run)
    trainer = SFTTrainer(
        model=policy,
        processing_class=tokenizer,
        args=args,
        train_dataset=to_demonstrations(rows),
    )
    track(trainer, resolved, title="SFT")
    train(trainer, checkpoint)
    write_report(args.output_dir)
    save_adapter(trainer, resolved)


if __name__ == "__main__":
    run_script(main)
