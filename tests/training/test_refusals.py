"""What a trainer refuses before a model is loaded: by its arguments, and by the config of the model."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from transformers import ProcessorMixin
from trl import GRPOConfig

from gtpo.errors import UsageError
from gtpo.training.trainer import GRPOTrainer, GTPOTrainer

ROWS = Dataset.from_dict({"prompt": ["a"]})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"train_dataset": ROWS.to_iterable_dataset()},
            "^train_dataset is a streaming dataset, which is not supported",
        ),
        ({"train_dataset": [{"prompt": "a"}]}, "^train_dataset is list: expected a datasets.Dataset with a column"),
        ({"train_dataset": None}, "^train_dataset is NoneType: expected a datasets.Dataset"),
        ({"eval_dataset": ROWS.to_iterable_dataset()}, "^eval_dataset is a streaming dataset"),
        ({"eval_dataset": {"easy": ROWS, "hard": ROWS.to_iterable_dataset()}}, "^eval_dataset 'hard' is a streaming"),
        ({"eval_dataset": ROWS.add_column("images", [["a.png"]])}, "^eval_dataset has a column 'images': images are"),
        (
            {"train_dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}])},
            "^the prompts of train_dataset contain more than text: images are not supported",
        ),
        ({"peft_config": PromptTuningConfig()}, "^PromptTuningConfig puts virtual tokens before the prompt"),
        ({"peft_config": LoraConfig(target_modules=["q_proj", "lm_head"])}, "^LoRA on lm_head is not supported"),
        ({"peft_config": LoraConfig(target_modules=["model.lm_head"])}, "^LoRA on lm_head is not supported"),
        ({"processing_class": object.__new__(ProcessorMixin)}, "^processing_class is ProcessorMixin, which also takes"),
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
        ({"model_type": "gemma3"}, "^gemma3 models have a vision_config and are trained on text only: pass processing"),
    ],
)
def test_a_model_is_refused_by_its_config_alone(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The directory has no weights: to load them is another error."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = GRPOConfig(output_dir=str(tmp_path), loss_type="grpo", bf16=False, use_cpu=True, report_to="none")
    with pytest.raises(UsageError, match=message):
        GRPOTrainer(model=str(tmp_path), reward_funcs=[], args=args, train_dataset=ROWS)
    with pytest.raises(UsageError, match=message):
        GRPOTrainer.check_model(str(tmp_path), args, has_tokenizer=False)
    if "router_aux_loss_coef" in config:
        args.router_aux_loss_coef = 0.0
        GRPOTrainer.check_model(str(tmp_path), args)
