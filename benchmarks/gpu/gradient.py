"""The gradient of a train script's first step on given completions: ``python gradient.py FILE train_gtpo.py ...``.

The completions, the reward and the adapter's weights do not depend on the model, so that backends and precisions can be
compared with each other and with the formulas of tests/helpers/reference.py in float64.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path[:1] = [str(ROOT), str(ROOT / "tests")]

GROUP = 4
COMPLETIONS = [  # a prefix shared by both signs, a suffix, and middles of several lengths
    [300, 301, 302, 305, 311, 308, 2],
    [300, 301, 304, 310, 2],
    [300, 301, 302, 303, 303, 309, 318, 311, 308, 2],
    [300, 312, 308, 2],
]
REWARDS = [1.0, 0.0, 0.0, 2.0]


def set_adapter(model: Any) -> dict[str, torch.Tensor]:
    """Set the weights of a LoRA adapter by name, and return them: an adapter that has just been made has B = 0."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: weight for name, weight in sorted(model.named_parameters()) if "lora_" in name}
    with torch.no_grad():
        for weight in weights.values():
            weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    return weights


def reference_gradient(model: str, prompt_ids: list[int], gamma: float) -> dict[str, torch.Tensor]:
    """d(-J of Eq. 11)/d(adapter) on the CPU in float64, with the textbook formulas."""
    from helpers.reference import naive_conflict_mask, naive_conflict_weights, pad, plain_gtpo_loss
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from gtpo.arguments import ModelArguments

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    lora = LoraConfig(r=8, lora_alpha=8, target_modules=ModelArguments().lora_target_modules)
    policy = get_peft_model(base, lora, autocast_adapter_dtype=False).double()
    weights = set_adapter(policy)
    logps = []
    entropies = []
    for completion in COMPLETIONS:
        ids = torch.tensor([prompt_ids + completion])
        logits = policy(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1]
        log_pi = logits.log_softmax(-1)
        targets = torch.tensor(completion)[:, None]
        logps.append(log_pi.gather(1, targets).squeeze(1))
        entropies.append(-(log_pi.exp() * log_pi).sum(-1))
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    spans = naive_conflict_mask(COMPLETIONS, advantages.tolist(), GROUP)
    width = max(map(len, COMPLETIONS))
    lambdas = pad(naive_conflict_weights(spans, advantages.tolist()), width, 1.0, torch.float64)
    mask = pad([[1] * len(completion) for completion in COMPLETIONS], width, 0, torch.int64)
    padded = [torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (logps, entropies)]
    loss = plain_gtpo_loss(*padded, mask, advantages, lambdas, torch.ones_like(rewards), gamma)
    loss.backward()
    return {name: weight.grad for name, weight in weights.items()}


def given(base: type, file: Path) -> type:
    """The trainer class with the completions above, which stores the gradient of its first step."""
    from safetensors.torch import save_file
    from transformers import TrainerCallback

    class Store(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.weights = set_adapter(kwargs["model"])

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gradients = {name: weight.grad.float().cpu() for name, weight in self.weights.items()}
            save_file(gradients, file)

    class Given(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(Store())

        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            file.with_suffix(".json").write_text(json.dumps(prompt_ids[0]))
            return COMPLETIONS, None

        def _calculate_rewards(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            rewards = torch.tensor(REWARDS, device=self.accelerator.device)
            self._rewards = rewards[:, None]  # as the method that this replaces
            return self._rewards

    return Given


if __name__ == "__main__":
    from gtpo.cli.parse import load_backend_of, read_command_line
    from gtpo.runs.script import log_to_stderr
    from train_gtpo import SETTINGS

    log_to_stderr()  # before Unsloth, which would set up the logs

    file, script, *argv = sys.argv[1:]
    load_backend_of(read_command_line("gtpo", SETTINGS, argv))  # before transformers is imported, as in the script
    from gtpo.training import trainer

    trainer.GTPOTrainer = given(trainer.GTPOTrainer, Path(file))  # type: ignore[misc, assignment]
    sys.argv = [str(ROOT / script), *argv]
    runpy.run_path(sys.argv[0], run_name="__main__")
