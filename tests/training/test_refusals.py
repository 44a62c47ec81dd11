"""What a trainer refuses before a model is loaded: by its arguments, and by the config of the model."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import PromptTuningConfig
from trl import GRPOConfig

from gtpo.errors import UsageError
from gtpo.training.trainer import GRPOTrainer, GTPOTrainer

ROWS = Dataset.from_dict({"prompt": ["a"]})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"train_dataset": ROWS.to_iterable_dataset()},
            "^IterableDataset is not supported: expected a datasets.Dataset, not streamed",
        ),
        ({"train_dataset": [{"prompt": "a"}]}, "^list is not supported: expected a datasets.Dataset"),
        ({"eval_dataset": ROWS.to_iterable_dataset()}, "^IterableDataset is not supported"),
        ({"eval_dataset": {"easy": ROWS, "hard": ROWS.to_iterable_dataset()}}, "^IterableDataset is not supported"),
        ({"eval_dataset": ROWS.add_column("images", [["a.png"]])}, "^a dataset has images, which are not supported"),
        (
            {"train_dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}])},
            "^a dataset has images, which are not supported",
        ),
        ({"tools": [print]}, "^tools not supported: TRL's GRPOTrainer has it"),
        ({"environment_factory": object}, "^environment_factory not supported"),
        ({"rollout_func": print}, "^rollout_func not supported"),
        ({"peft_config": PromptTuningConfig()}, "^PromptTuningConfig puts virtual tokens before the prompt"),
    ],
)
def test_what_the_loss_would_ignore_is_refused_before_a_model_is_loaded(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    args = GRPOConfig(output_dir=str(tmp_path), loss_type="grpo", bf16=False, use_cpu=True, report_to="none")
    arguments = {"train_dataset": ROWS, **given}
    with pytest.raises(UsageError, match=message):
        GTPOTrainer(model="no model is loaded", reward_funcs=[], args=args, **arguments)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3_moe", "router_aux_loss_coef": 0.001}, "^qwen3_moe models add a router loss"),
        ({"model_type": "falcon_h1", "lm_head_multiplier": 0.5}, "^falcon_h1 models have lm_head_multiplier = 0.5"),
    ],
)
def test_a_model_is_refused_by_its_config_alone(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The directory has no weights: to load them is another error."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = GRPOConfig(output_dir=str(tmp_path), loss_type="grpo", bf16=False, use_cpu=True, report_to="none")
    with pytest.raises(UsageError, match=message):
        GRPOTrainer(model=str(tmp_path), reward_funcs=[], args=args, train_dataset=ROWS)
    with pytest.raises(UsageError, match=message):
        GRPOTrainer.check_model(str(tmp_path), args)
    if "router_aux_loss_coef" in config:
        args.router_aux_loss_coef = 0.0
        GRPOTrainer.check_model(str(tmp_path), args)
