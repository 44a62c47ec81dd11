"""Train a policy with GRPO (arXiv 2402.03300), the baseline: the same data, rewards, logs and flags as train_gtpo.py.

    python train_grpo.py --model tiny --dataset arithmetic --G 12     # a CPU, minutes
    python train_grpo.py --model qwen --dataset math --G 8 --beta 1e-6   # one GPU, Listing 1 of the paper
    python train_grpo.py --help

Differs from train_gtpo.py by the lack of GTPOArguments and by the trainer, nothing else.
"""

from gtpo.arguments import DataArguments, ModelArguments, RewardArguments, RunArguments
from gtpo.backend import load_backend
from gtpo.callbacks import track, train
from gtpo.cli import parse, run_script
from gtpo.data import drop_long_prompts, load_train
from gtpo.export import save_adapter
from gtpo.models import load_policy
from gtpo.report import write_report
from gtpo.reward_functions import load_rewards
from gtpo.runs import check_run, start_run
from gtpo.trainer import GRPOTrainer


def main() -> None:
    backend = load_backend()  # before trl, transformers and peft, which Unsloth patches
    from trl import GRPOConfig

    data, reward, model, run, args, resolved = parse(
        "grpo", (DataArguments, RewardArguments, ModelArguments, RunArguments, GRPOConfig)
    )
    pass
    pass
    pass
    pass
    pass
    pass

    GRPOTrainer.check_settings(args)
    rows = load_train(data.dataset, data.data_dir, args.seed)
    rewards = load_rewards(reward.reward, rows.column_names)
    checkpoint = check_run(resolved, run, len(rows))
    policy, tokenizer = load_policy(model, backend, args.seed, args.use_vllm)
    rows = drop_long_prompts(rows, tokenizer, data.max_prompt_length)
    start_run(resolved, run)
    trainer = GRPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=rewards,
        args=args,
        train_dataset=rows,
    )
    track(trainer, resolved, title="GRPO")
    train(trainer, checkpoint)
    write_report(args.output_dir)
    save_adapter(trainer, resolved)


if __name__ == "__main__":
    run_script(main)
