"""Train a policy with GTPO (arXiv 2508.03772): LoRA, verifiable rewards, no reference model.

    python train_gtpo.py --model tiny  --dataset arithmetic --G 12     # a CPU, minutes
    python train_gtpo.py --model llama --dataset gsm8k --G 12          # one GPU, Listing 1 of the paper
    python train_gtpo.py --help

Differs from train_grpo.py by GTPOArguments and GTPOTrainer, nothing else.
"""

from gtpo.arguments import DataArguments, GTPOArguments, ModelArguments, RewardArguments, RunArguments
from gtpo.backend import load_backend
from gtpo.callbacks import track, train
from gtpo.cli import parse, run_script
from gtpo.data import drop_long_prompts, load_train
from gtpo.export import save_adapter
from gtpo.models import load_policy
from gtpo.report import write_report
from gtpo.reward_functions import load_rewards
from gtpo.runs import check_run, start_run
from gtpo.trainer import GTPOTrainer


def main() -> None:
    backend = load_backend()  # before trl, transformers and peft, which Unsloth patches
    from trl import GRPOConfig

    data, reward, model, run, gtpo, args, resolved = parse(
        "gtpo", (DataArguments, RewardArguments, ModelArguments, RunArguments, GTPOArguments, GRPOConfig)
    )
    pass
    pass
    pass
    pass
    pass
    pass

    GTPOTrainer.check_settings(args)
    rows = load_train(data.dataset, data.data_dir, args.seed)
    rewards = load_rewards(reward.reward, rows.column_names)
    checkpoint = check_run(resolved, run, len(rows))
    policy, tokenizer = load_policy(model, backend, args.seed, args.use_vllm)
    rows = drop_long_prompts(rows, tokenizer, data.max_prompt_length)
    start_run(resolved, run)
    trainer = GTPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=rewards,
        args=args,
        gtpo=gtpo,
        train_dataset=rows,
    )
    track(trainer, resolved, title="GTPO")
    train(trainer, checkpoint)
    write_report(args.output_dir)
    save_adapter(trainer, resolved)


if __name__ == "__main__":
    run_script(main)
