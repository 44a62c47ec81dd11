"""train_grpo.py or train_gtpo.py with ``kl`` to the untrained policy every 20 steps, and ln pi of the tags.

    python -m study.train train_gtpo.py --model tiny --dataset arithmetic --G 8
    python -m study.train train_grpo.py --model tiny --dataset arithmetic --G 8 --sampler_bits 4

Otherwise the run is that of the script: there is no KL term, and no random number is drawn. A sampler that is not the
policy, as vLLM is not, has weights of fewer bits or another temperature; ``sampler_gap`` is how far it is.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from gtpo.arguments import DataArguments, FormatArguments, GTPOArguments, ModelArguments, RewardArguments, RunArguments
from gtpo.cli.parse import load_backend_from_flags, parse
from gtpo.runs.script import run_script
from study.tags import TAG_METRICS, tag_logps, tag_spans

STEPS = 20  # from one measurement to the next
SETTINGS = (DataArguments, FormatArguments, RewardArguments, ModelArguments, RunArguments)


@contextmanager
def as_sampler(trainer: Any, bits: int = 0, temperature: float = 0.0) -> Iterator[None]:
    """Inside, the weights are rounded to a mantissa of ``bits``, and the temperature is another one."""
    weights = [*trainer.model.parameters()] if bits else []
    config, before = trainer.generation_config, trainer.temperature
    exact = [weight.detach().clone() for weight in weights]
    trainer.temperature = config.temperature = temperature or before
    try:
        with torch.no_grad():
            for weight in weights:
                mantissa, exponent = weight.frexp()
                weight.copy_((mantissa * 2**bits).round().ldexp(exponent - bits))
        yield
    finally:
        trainer.temperature = config.temperature = before
        for weight, value in zip(weights, exact, strict=True):
            weight.data.copy_(value)


def measures(trainer: Any, batch: dict[str, Any], **sampler: Any) -> dict[str, float]:
    """Means over the tokens of a batch, in nats: ``kl`` to the model without its adapter, estimated as in TRL, and
    ``sampler_gap``, the absolute difference of ln pi of sampler and policy."""
    policy, tokens = trainer.accelerator.unwrap_model(trainer.model), batch["completion_mask"].sum()
    found = []
    for context in (nullcontext(), policy.disable_adapter(), as_sampler(trainer, **sampler)):
        with context, torch.no_grad():
            found.append(trainer.scores(trainer.model_wrapped, batch, trainer.args.per_device_train_batch_size)[0])
    logps, of_base, of_sampler = found  # 0 on padding
    kl = ((of_base - logps).exp() - (of_base - logps) - 1).sum() / tokens
    return {"kl": float(kl), "sampler_gap": float((of_sampler - logps).abs().sum() / tokens)}


def with_measures(trainer: Any, tags: Sequence[str], **sampler: Any) -> Any:
    """A trainer with this sampler, which logs :func:`measures`, and ln pi of each tag."""

    class Measured(trainer):
        def _sample(self, prompt_ids: list[list[int]]) -> list[list[int]]:
            with as_sampler(self, **sampler):
                return super()._sample(prompt_ids)

        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            batch = super()._generate_and_score_completions(inputs)
            if self.state.global_step % STEPS == 0:
                for name, value in measures(self, batch, **sampler).items():
                    self._metrics["train"][name].append(value)
            batch["tag_spans"] = tag_spans(self._tokenizer, batch["completion_ids"], batch["completion_mask"], tags)
            return batch

        @wraps(trainer.objective)  # the same tokens have a gradient
        def objective(self, logps: Tensor, token_entropy: Tensor, inputs: dict[str, Any]) -> Any:
            loss, measured = super().objective(logps, token_entropy, inputs)
            found = tag_logps(inputs["tag_spans"], inputs["completion_mask"], logps.detach())
            of_tags = dict(zip(TAG_METRICS, found, strict=True))
            return loss, measured._replace(metrics={**(measured.metrics or {}), **of_tags})

    return Measured


def main() -> None:
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument("script", choices=("train_grpo.py", "train_gtpo.py"))
    flags.add_argument("--sampler_bits", type=int, default=0)
    flags.add_argument("--sampler_temperature", type=float, default=0.0)
    own, sys.argv[1:] = flags.parse_known_args()
    method = own.script[6:10]
    classes = (*SETTINGS, GTPOArguments) if method == "gtpo" else SETTINGS
    backend = load_backend_from_flags(method, classes)
    from trl import GRPOConfig

    from gtpo import GRPOTrainer, GTPOTrainer
    from gtpo.data.load import load_rows
    from gtpo.grading.user_functions import load_rewards
    from gtpo.models.load import load_policy
    from gtpo.runs.start import check_run, start_run
    from gtpo.training.loop import run
    from gtpo.training.objective import load_objective
    from rewards import rewards_in

    trainer = GTPOTrainer if method == "gtpo" else GRPOTrainer
    kind, own_settings = load_objective(trainer, (*classes, GRPOConfig))
    settings = parse(method, (*classes, *own_settings, GRPOConfig))
    rows, _ = load_rows(settings)
    rewards = load_rewards(settings.reward.reward, rewards_in(settings.prompt.format), rows.column_names)
    checkpoint = check_run(settings, rows)
    policy, tokenizer = load_policy(settings, backend)
    start_run(settings)
    options: dict[str, Any] = {"settings": settings.settings}
    if method == "gtpo":
        options["gtpo"] = settings.gtpo
    kind = with_measures(kind, settings.prompt.format_tags, bits=own.sampler_bits, temperature=own.sampler_temperature)
    options |= {"processing_class": tokenizer, "train_dataset": rows}
    run(kind(policy, rewards, settings.trainer, **options), settings, checkpoint)


if __name__ == "__main__":
    run_script(main)
