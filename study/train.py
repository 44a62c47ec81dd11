"""train_grpo.py or train_gtpo.py with the KL to the untrained policy as metric ``kl``, every 20 steps.

    python -m study.train gtpo --model tiny --dataset arithmetic --G 8

Otherwise the run is that of the script, step by step: there is no KL term, and no random number is drawn.
"""

import sys
from collections.abc import Sequence
from typing import Any

from gtpo.arguments import DataArguments, FormatArguments, GTPOArguments, ModelArguments, RewardArguments, RunArguments
from gtpo.cli.parse import load_backend_from_flags, parse
from gtpo.runs.script import run_script

KL_STEPS = 20
SETTINGS = (DataArguments, FormatArguments, RewardArguments, ModelArguments, RunArguments)


def measured(argv: Sequence[str]) -> tuple[str, ...]:
    """The command of a train script, ``("train_gtpo.py", ...)``, as one of this module."""
    return ("-m", "study.train", argv[0].removeprefix("train_").removesuffix(".py"), *argv[1:])


def kl_to_base(trainer: Any, batch: dict[str, Any]) -> float:
    """KL to the model without its adapter, mean over the tokens of a batch, estimated as in TRL (nats)."""
    import torch

    rows, policy = trainer.args.per_device_train_batch_size, trainer.accelerator.unwrap_model(trainer.model)
    with torch.no_grad():
        logps, _ = trainer.scores(trainer.model_wrapped, batch, rows)
        with policy.disable_adapter():
            of_base, _ = trainer.scores(trainer.model_wrapped, batch, rows)
    log_ratio = of_base - logps  # 0 on padding
    return float((log_ratio.exp() - log_ratio - 1).sum() / batch["completion_mask"].sum())


def with_kl(trainer: Any) -> Any:
    """A trainer that logs :func:`kl_to_base`."""

    class WithKL(trainer):
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            batch = super()._generate_and_score_completions(inputs)
            if self.state.global_step % KL_STEPS == 0:
                self._metrics["train"]["kl"].append(kl_to_base(self, batch))
            return batch

    return WithKL


def main() -> None:
    method = sys.argv.pop(1)
    classes = (*SETTINGS, GTPOArguments) if method == "gtpo" else SETTINGS
    backend = load_backend_from_flags(method, classes)
    from trl import GRPOConfig

    from gtpo import GRPOTrainer, GTPOTrainer
    from gtpo.data.load import load_rows
    from gtpo.grading.user_functions import load_rewards
    from gtpo.models.load import load_policy
    from gtpo.runs.start import check_run, start_run
    from gtpo.training.loop import run
    from rewards import rewards_in

    settings = parse(method, (*classes, GRPOConfig))
    rows, _ = load_rows(settings)
    rewards = load_rewards(settings.reward.reward, rewards_in(settings.prompt.format), rows.column_names)
    checkpoint = check_run(settings, len(rows))
    policy, tokenizer = load_policy(settings, backend)
    start_run(settings)
    of_gtpo = {"gtpo": settings.gtpo} if method == "gtpo" else {}
    trainer = with_kl(GTPOTrainer if method == "gtpo" else GRPOTrainer)(
        policy, rewards, settings.trainer, processing_class=tokenizer, train_dataset=rows, **of_gtpo
    )
    run(trainer, settings, checkpoint)


if __name__ == "__main__":
    run_script(main)
