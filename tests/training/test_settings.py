"""Every setting of TRL's GRPOConfig and SFTConfig changes something here, or is refused by name."""

import inspect
import json
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest
import torch
from helpers.canned import make_trainer, trained_weights
from helpers.files import tables_of
from helpers.refusals import refused
from trl import GRPOConfig, SFTConfig

from gtpo.arguments import fields_of
from gtpo.forward.vllm_lora import OF_VLLM
from gtpo.training import refusals
from gtpo.training.trainer import GTPOConfig

TABLES = tables_of(__file__)
OBJECTIVE = {*refusals._VALUES["supported"]}  # test_refusals.py refuses their other values
OF_TRL = {"auto_find_batch_size"}  # GRPOConfig refuses it
READERS = TABLES["readers"]
CONFIGS = {"grpo": GRPOConfig, "gtpo": GTPOConfig, "sft": SFTConfig}
QUIET = {"use_cpu": True, "bf16": False}


def names_in(readers: dict[str, list[str]]) -> set[str]:
    return {name for names in readers.values() for name in names}


def config(trainer: str, folder: Path, **settings: Any) -> Any:
    kind = {} if trainer == "sft" else {"loss_type": "grpo", "use_bias_correction_kl": False}
    return CONFIGS[trainer](str(folder), **QUIET | kind | settings)


def check(trainer: str, args: Any) -> None:
    refusals.check_unused(args, "sft") if trainer == "sft" else refusals.check_grpo_settings(args)


def test_every_field_reaches_something_or_is_refused() -> None:
    of_vllm = {*TABLES["of_vllm"]}
    assert of_vllm | {"vllm_mode"} == {f"vllm_{name}" for name in OF_VLLM}
    acts = {*TABLES["weights"], *TABLES["weights_of"], *names_in(READERS), *of_vllm, *TABLES["always"]}
    refused_ = {*refusals._UNUSED["grpo"], *OBJECTIVE, *OF_TRL}
    fields = {*fields_of([GRPOConfig])}
    assert fields - acts - refused_ == set() == (acts | refused_) - fields
    assert acts & refused_ <= {"scale_rewards", "loss_type", "multi_objective_aggregation"}  # some of their values


def test_every_field_of_sft_reaches_something_or_is_refused() -> None:
    fields = {*fields_of([SFTConfig])}
    acts = (names_in(READERS) | names_in(TABLES["sft"]) | {"do_train", "do_eval"}) & fields
    refused_ = {*refusals._UNUSED["sft"], "resume_from_checkpoint"}  # the latter by the command line
    assert fields - acts - refused_ == set() == acts & refused_


@pytest.mark.parametrize(("place", "names"), [*READERS.items(), *TABLES["sft"].items()])
def test_a_setting_is_read_where_it_acts(place: str, names: Collection[str]) -> None:
    found: Any = locate(place)
    function = getattr(found, "fget", None) or getattr(found, "func", found)  # of a property
    source = inspect.getsource(inspect.unwrap(function))
    assert [name for name in names if not re.search(rf"\.{name}\b|\b{name}=", source)] == []


OTHER = {  # than the default, of each setting that is refused
    "train_sampling_strategy": "sequential",
    "length_column_name": "tokens",
    "label_names": ["answer"],
    "include_num_input_tokens_seen": "all",
    "include_for_metrics": ["loss"],
    "resume_from_checkpoint": "checkpoint-4",
    "liger_kernel_config": {"rope": True},
    "dataset_text_field": "question",
    "chat_template_path": "Qwen/Qwen3-0.6B",
}


@pytest.mark.parametrize(
    ("trainer", "name"),
    [(trainer, name) for trainer, unused in refusals._UNUSED.items() for name in unused],
)
def test_a_setting_that_reaches_nothing_is_refused_by_name(trainer: str, name: str, tmp_path: Path) -> None:
    default = fields_of([CONFIGS[trainer]])[name].default
    value = OTHER.get(name, not default if isinstance(default, bool) else 7)
    for kind in ("grpo", "gtpo") if trainer == "grpo" else ("sft",):
        with refused(rf"^{name} = .* has no effect, or a wrong one: \w"):
            check(kind, config(kind, tmp_path, **{name: value}))


@pytest.mark.parametrize("trainer", CONFIGS)
def test_the_defaults_are_accepted(trainer: str, tmp_path: Path) -> None:
    check(trainer, config(trainer, tmp_path))


def test_the_defaults_of_unsloths_config_are_accepted(tmp_path: Path) -> None:
    class UnslothGRPOConfig(GRPOConfig):
        def __init__(self, *args: Any, data_seed: int | None = 3407, eval_accumulation_steps: int = 2, **more: Any):
            super().__init__(*args, data_seed=data_seed, eval_accumulation_steps=eval_accumulation_steps, **more)

    settings: Any = QUIET | {"loss_type": "grpo", "use_bias_correction_kl": False}
    check("grpo", UnslothGRPOConfig(str(tmp_path), **settings))
    with refused("data_seed = 7"):
        check("grpo", UnslothGRPOConfig(str(tmp_path), data_seed=7, **settings))


@pytest.fixture(scope="module")
def weights(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The trained weights of two steps with these settings, in one vector."""
    folder = tmp_path_factory.mktemp("settings")

    @cache
    def train(text: str) -> torch.Tensor:
        trainer = make_trainer("grpo", tiny, folder, **{"max_steps": 2} | json.loads(text))
        return torch.cat([weight.flatten() for weight in trained_weights(trainer).values()])

    return lambda settings: train(json.dumps(settings))


CASES = {name: [settings, {}] for name, settings in TABLES["weights"].items()} | TABLES["weights_of"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), CASES.items(), ids=CASES)
def test_a_setting_of_the_loss_changes_the_weights(name: str, case: Any, weights: Any) -> None:
    settings, without = case
    assert name in settings
    assert not torch.equal(weights(settings), weights(without))
