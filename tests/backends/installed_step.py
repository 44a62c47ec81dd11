"""One training step with the installed package, and one with the copied file: neither needs the repository.

    PYTHONPATH=. python REPOSITORY/tests/backends/installed_step.py

in a directory with a copy of examples/gtpo_trl.py; gtpo and gtpo_loss are installed.
"""

from pathlib import Path
from typing import Any

import gtpo_trl
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import gtpo
import gtpo_loss
from gtpo.models.hub import TINY_BASE

REPOSITORY = Path(__file__).parents[2]


def count_vowels(completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in completion)) for completion in completions]


def train(library: Any, directory: str) -> list[str]:
    """The tensors that one step changes, of ``library.GTPOTrainer``."""
    args = library.GTPOConfig(
        directory,
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=32,  # the first dozen tokens are the same in all completions
        learning_rate=1e-3,
        initial_entropy=0.5,
        entropy_filter="off",  # a step whose completions are all filtered trains nothing
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    model = AutoModelForCausalLM.from_pretrained(TINY_BASE)
    tokenizer = AutoTokenizer.from_pretrained(TINY_BASE)
    prompts = Dataset.from_dict({"prompt": ["Tom has 3 apples.", "Ann has 5 pears."]})
    trainer = library.GTPOTrainer(model, count_vowels, args=args, train_dataset=prompts, processing_class=tokenizer)
    before = {name: weights.clone() for name, weights in model.state_dict().items()}
    trainer.train()
    changed = [name for name, weights in model.state_dict().items() if not torch.equal(weights, before[name])]
    assert changed, f"{library.__name__} trained nothing"
    return changed


for library in (gtpo, gtpo_trl):
    print(library.__name__, len(train(library, f"outputs/{library.__name__}")), "tensors trained")
for module in (gtpo, gtpo_loss):
    assert REPOSITORY not in Path(module.__file__ or "").parents[:2], f"{module.__file__} is not the installed one"
