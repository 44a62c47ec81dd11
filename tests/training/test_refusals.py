"""What a trainer refuses before a model is loaded: by its arguments, and by the config of the model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import DistributedType
from datasets import Dataset
from peft import PromptTuningConfig
from trl import GRPOConfig

from gtpo.errors import UsageError
from gtpo.training.refusals import check_turns
from gtpo.training.tools import refuse_sharded_turns
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
        (
            {"tools": [print]},
            r"^tools needs conversations as prompts: expected \[{\"role\": \"user\", \"content\": \.\.\.}\]",
        ),
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


def test_streamed_data_is_refused_with_tools_too(tmp_path: Path) -> None:
    args = GRPOConfig(output_dir=str(tmp_path), loss_type="grpo", bf16=False, use_cpu=True, report_to="none")
    with pytest.raises(UsageError, match="IterableDataset is not supported: expected"):
        GTPOTrainer("no model", [], args, train_dataset=ROWS.to_iterable_dataset(), tools=[print])


@pytest.mark.parametrize("name", ["tools", "environment_factory", "rollout_func"])
def test_turns_that_cannot_be_run_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=1, world_size=2)
    check_turns({name: [print], "args": args})
    for shared in ({"vllm_mode": "server"}, {"vllm_tensor_parallel_size": 2}):
        given = {name: [print], "args": SimpleNamespace(**vars(args) | shared)}
        if name == "rollout_func":  # it runs its turns itself
            check_turns(given)
        else:
            with pytest.raises(UsageError, match=f"^{name} with vLLM is not supported where processes share an engine"):
                check_turns(given)
        given["args"].world_size = 1
        check_turns(given)
    monkeypatch.setattr("trl.GRPOTrainer", type("UnslothGRPOTrainer", (), {}))
    with pytest.raises(UsageError, match=f"^{name} with Unsloth is not supported"):
        check_turns({name: [print], "args": args})
    check_turns({"args": args})


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_turns_with_sharded_weights_are_refused(kind: str) -> None:
    trainer = SimpleNamespace(
        tools=[print],
        environment_factories=None,
        rollout_func=None,
        accelerator=SimpleNamespace(distributed_type=DistributedType(kind)),
    )
    with pytest.raises(UsageError, match=f"^tools, environments and rollout functions with {kind} are not supported"):
        refuse_sharded_turns(trainer)
    trainer.tools = []
    refuse_sharded_turns(trainer)
    trainer.tools, trainer.accelerator.distributed_type = [print], DistributedType("MULTI_GPU")
    refuse_sharded_turns(trainer)
