#!/bin/bash
# GTPO on verl: Llama-3.1-8B-Instruct, GSM8K, one machine of eight GPUs. More options of verl follow, and win:
#   examples/verl/one_node.sh trainer.total_training_steps=100
# In the root of the clone, after `python examples/verl/gsm8k_parquet.py outputs/verl/data`.
# Sources: [L1] Listing 1 of the paper; [S n] its Section n; [verl] needed by verl 0.9; [ours] our choice, with its reason.
set -euo pipefail
cd "$(dirname "$0")/../.."
export VERL_USE_EXTERNAL_MODULES=gtpo_verl PYTHONPATH=$PWD/examples/verl:$PWD

options=(
    trainer.v1.trainer_mode=gtpo                                    # examples/verl/gtpo_verl.py
    trainer.use_v1=true                                             # [verl] the trainer that it extends
    +trainer.gtpo.gamma=0.1                                         # [S6]
    +trainer.gtpo.entropy_filter=auto                               # [Eq. 10]
    +trainer.gtpo.conflict_correction=true                          # [Eq. 9]
    algorithm.adv_estimator=grpo                                    # [S3] A = (R - mean) / std within the group
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean       # [Eq. 2] mean over tokens, then over completions

    data.train_files=outputs/verl/data/train.parquet                # [S6]
    data.val_files=outputs/verl/data/test.parquet
    data.train_batch_size=8                                         # [ours] a prompt for each GPU; [L1] 1 on one GPU
    data.max_prompt_length=4000                                     # [L1] tokens
    data.filter_overlong_prompts=true                               # [L1] longer prompts are dropped
    data.max_response_length=1500                                   # [L1] 5500 - 4000
    data.seed=3407                                                  # [L1]
    reward.custom_reward_function.path=examples/verl/paper_reward.py # [S8.2]

    actor_rollout_ref.model.path=meta-llama/Llama-3.1-8B-Instruct   # [L1]
    actor_rollout_ref.model.lora_rank=128                           # [L1]
    actor_rollout_ref.model.lora_alpha=128                          # [L1] the rank
    "actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]" # [L1]
    actor_rollout_ref.model.enable_gradient_checkpointing=true      # [ours] less memory, slower

    actor_rollout_ref.actor.strategy=fsdp2                          # [ours] as configs/accelerate/fsdp2.yaml
    actor_rollout_ref.actor.ppo_mini_batch_size=8                   # one update for a generation: train_batch_size
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4          # [ours] 12 completions a GPU in three parts
    actor_rollout_ref.actor.fsdp_config.entropy_from_logits_with_chunking=true # [ours] entropies in float32
    actor_rollout_ref.actor.optim.lr=1e-6                           # [L1]
    "actor_rollout_ref.actor.optim.betas=[0.9,0.95]"                # [ours] docs/reproduction.md; [L1] 0.999999 twice
    actor_rollout_ref.actor.optim.weight_decay=0.1                  # [L1]
    actor_rollout_ref.actor.optim.clip_grad=0.1                     # [L1]
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine          # [L1]
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.005       # [L1]

    actor_rollout_ref.rollout.name=vllm                             # [L1]
    actor_rollout_ref.rollout.n=12                                  # [L1] G, 8 or 12
    actor_rollout_ref.rollout.temperature=1.0                       # [S6]
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4            # [L1]
    actor_rollout_ref.rollout.tensor_model_parallel_size=1          # [ours] 16 GB of weights fit one GPU
    actor_rollout_ref.rollout.load_format=safetensors               # [ours] vLLM reads the frozen base, gets the adapter
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4   # [ours] as in the update

    trainer.nnodes=1
    trainer.n_gpus_per_node=8
    trainer.total_epochs=1                                          # [L1]
    trainer.save_freq=100                                           # [ours]
    trainer.test_freq=100                                           # [ours]
    trainer.project_name=gtpo
    trainer.experiment_name=llama-gsm8k
    trainer.default_local_dir=outputs/verl/llama-gsm8k              # checkpoints; the same command resumes
    "trainer.logger=[console]"                                      # [ours] no account is needed
)
exec python -m verl.trainer.main_ppo "${options[@]}" "$@"
