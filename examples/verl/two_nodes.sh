#!/bin/bash
# examples/verl/one_node.sh on two machines of eight GPUs; 10.0.0.1 is the first one, the clone on a shared file system:
#   examples/verl/two_nodes.sh head                # on the first
#   examples/verl/two_nodes.sh worker 10.0.0.1     # on the second
#   examples/verl/two_nodes.sh train               # then on the first; options of verl may follow
# Sources: as in one_node.sh, whose other values stay.
set -euo pipefail
cd "$(dirname "$0")/../.."
# Ray's workers have the environment of `ray start`, on each machine.
export VERL_USE_EXTERNAL_MODULES=gtpo_verl PYTHONPATH=$PWD/examples/verl:$PWD

case "${1-}" in
head) exec ray start --head --port=6379 ;;
worker) exec ray start --address="$2:6379" ;;
train)
    shift
    exec examples/verl/one_node.sh \
        trainer.nnodes=2 \
        data.train_batch_size=16 `# [ours] a prompt for each GPU` \
        actor_rollout_ref.actor.ppo_mini_batch_size=16 \
        trainer.experiment_name=llama-gsm8k-16 \
        trainer.default_local_dir=outputs/verl/llama-gsm8k-16 \
        +ray_kwargs.ray_init.address=auto "$@"
    ;;
*) sed -n '2,6s/^# //p' "$0" && exit 2 ;;
esac
