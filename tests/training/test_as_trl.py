"""What users of TRL's GRPOTrainer rely on in a library script: its arguments, evaluation, metrics, model card."""

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from helpers.refusals import refused
from peft import LoraConfig, get_peft_model
from pytest import MonkeyPatch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from examples import gtpo_trl
from gtpo import GRPOTrainer, GTPOArguments, GTPOConfig, GTPOTrainer
from gtpo.errors import RunError
from gtpo.prompts import TAGS

QUIET = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "optim": "sgd"}
SMALL = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 4, "max_steps": 1}
CLASSES = {"grpo": (GRPOTrainer, trl.GRPOConfig), "gtpo": (GTPOTrainer, GTPOConfig)}


def worth(prompts: list[str], **columns: Any) -> list[float]:
    return [float(prompt.split()[-1]) for prompt in prompts]


def rows(*values: float) -> Dataset:
    return Dataset.from_dict({"prompt": [f"A row worth {value}" for value in values], "extra": [*map(str, values)]})


FOUR = rows(1.0, 2.0, 3.0, 4.0)


@pytest.fixture
def sampling(tiny: Path, tmp_path: Path) -> Any:
    def sampling(method: str, evaluated: Any = None, rewards: Any = worth, train: Any = FOUR, **settings: Any) -> Any:
        trainer, config = CLASSES[method]
        args = config(str(tmp_path), **QUIET | SMALL | settings)
        tokenizer = AutoTokenizer.from_pretrained(tiny)
        return trainer(AutoModelForCausalLM.from_pretrained(tiny), rewards, args, train, evaluated, tokenizer)

    return sampling


# Arguments


def test_arguments_may_be_given_by_position(sampling: Any) -> None:
    found = sampling("gtpo", rows(2.0), initial_entropy=0.1)
    assert found.train_dataset is FOUR and found.eval_dataset["extra"] == ["2.0"]
    assert isinstance(found.processing_class, PreTrainedTokenizerBase)
    assert [function.__name__ for function in found.reward_funcs] == ["worth"]
    with refused("tools is not supported"):
        GTPOTrainer(found.model, worth, found.args, *[None] * 5, (None, None), None, None, [print])


@pytest.mark.parametrize(
    ("trainer", "config", "name", "loss_type"),
    [
        (*CLASSES["grpo"], "GRPO", trl.GRPOConfig.loss_type),
        (*CLASSES["gtpo"], "GTPO", "grpo"),
        (gtpo_trl.GTPOTrainer, gtpo_trl.GTPOConfig, "GTPO", "grpo"),
    ],
)
def test_a_trainer_without_args_has_the_defaults(
    trainer: Any, config: Any, name: str, loss_type: str, tiny: Path, here: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)  # TRL's default
    args = trainer(str(tiny), worth, train_dataset=FOUR).args
    assert type(args) is config
    assert (args.output_dir, args.loss_type) == (f"{tiny.name}-{name}", loss_type)
    with pytest.raises(ValueError, match="reward_funcs"):  # TRL's sentence
        trainer(str(tiny), train_dataset=FOUR)


def test_the_config_has_the_fields_of_the_file(tmp_path: Path) -> None:
    given = {"gamma": 0.3, "conflict_span": "common", "initial_entropy": 0.2, "temperature": 0.7, "tags": "<a> </a>"}
    for settings in (QUIET, QUIET | given):
        ours, theirs = GTPOConfig(str(tmp_path), **settings), gtpo_trl.GTPOConfig(str(tmp_path), **settings)
        assert ours.to_dict() == theirs.to_dict() | {"disable_dropout": True}  # TRL's reaches modules alone


def test_the_tags_of_the_config_are_the_trainers(tiny: Path, tmp_path: Path) -> None:
    for given, expected in (({}, TAGS), ({"tags": "<a> </a>"}, ("<a>", "</a>"))):
        trainer = GTPOTrainer(str(tiny), worth, GTPOConfig(str(tmp_path), **QUIET, **given), rows(1.0))
        assert tuple(trainer.tags) == expected


def test_the_config_refuses_values_of_the_method(tmp_path: Path) -> None:
    with refused("gamma is -1"):
        GTPOConfig(str(tmp_path), gamma=-1)


def test_the_settings_of_the_method_are_given_once(tiny: Path, tmp_path: Path) -> None:
    args = GTPOConfig(str(tmp_path), gamma=0.3, **QUIET)
    with refused("pass one of them"):
        GTPOTrainer(str(tiny), worth, args, gtpo=GTPOArguments(gamma=0.2))
    assert GTPOTrainer(str(tiny), worth, args, rows(1.0)).gtpo.gamma == 0.3


# Evaluation


def test_several_evaluation_sets_have_names_in_the_metrics(sampling: Any) -> None:
    sets = {"one": rows(1.0, 2.0), "two": rows(4.0)}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_two_reward", "save_steps": 1}
    trainer = sampling("grpo", sets, eval_strategy="steps", eval_steps=1, max_steps=2, **best)
    trainer.train()
    for name, rewards in (("one_", [1.5, 1.5]), ("two_", [4.0, 4.0]), ("", [])):
        found = f"eval_{name}reward"
        assert [row[found] for row in trainer.state.log_history if found in row] == rewards
    assert trainer.state.best_metric == 4.0
    metrics = trainer.evaluate({"three": rows(8.0)})
    assert metrics["eval_three_reward"] == 8.0 and "eval_three_loss" in metrics and "eval_loss" not in metrics


def test_a_stream_is_evaluated_as_its_rows(sampling: Any) -> None:
    assert sampling("grpo", rows(1.0, 2.0, 6.0).to_iterable_dataset()).evaluate()["eval_reward"] == 3.0


def test_a_stream_is_trained_on(sampling: Any) -> None:
    trainer = sampling("gtpo", train=FOUR.to_iterable_dataset())
    trainer.train()
    assert trainer.state.global_step == 1 and trainer.initial_entropy.value > 1


def test_an_evaluation_needs_rows(sampling: Any) -> None:
    with pytest.raises(ValueError, match="evaluation requires an eval_dataset"):
        sampling("grpo").evaluate()


def test_predictions_are_metrics_and_leave_training_as_it_is(sampling: Any, tmp_path: Path) -> None:
    trainer = sampling("grpo", rows(5.0), log_completions=True)
    state = torch.get_rng_state()
    found = trainer.predict(rows(1.0, 2.0))
    assert torch.equal(torch.get_rng_state(), state) and trainer.log_completions
    assert found.predictions is None and found.metrics["test_reward"] == 1.5
    assert {"test_loss", "test_runtime"} <= found.metrics.keys() and not [*tmp_path.glob("completions/*")]
    assert not [name for name in found.metrics if name.startswith("eval_")]
    assert trainer.evaluate()["eval_reward"] == 5.0  # nothing of the one before


@pytest.mark.parametrize("removes", [True, False])
def test_a_reward_sees_its_columns_in_an_evaluation(removes: bool, sampling: Any) -> None:
    seen = []

    def reward(prompts: list[str], **columns: Any) -> list[float]:
        seen.append("extra" in columns)
        return worth(prompts)

    trainer = sampling("grpo", rows(5.0), reward, remove_unused_columns=removes)
    trainer.train()
    trainer.evaluate()
    assert seen == [not removes] * 2


# Metrics, outputs, card


@pytest.mark.parametrize("settings", [{}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}])
def test_clipping_is_logged_as_by_trl(settings: dict[str, Any], build: Any) -> None:
    """Means over tokens: with micro-batches of unequal lengths TRL's is a mean of their means."""
    clipped = {"num_iterations": 2, "epsilon": 0.01, "epsilon_high": 0.02, "max_steps": 4}
    logs = []
    for method in ("grpo", "trl"):
        trainer = build(method, method, **clipped, **settings)
        trainer.train()
        logs.append(trainer.state.log_history[:4])
    names = {name for row in logs[1] for name in row if name.startswith("clip_ratio/")}
    assert len(names) == 5
    for ours, theirs in zip(*logs, strict=True):
        for name in names:
            tolerance = 0.05 if settings and name.endswith("mean") else 1e-6
            assert ours[name] == pytest.approx(theirs[name], abs=tolerance), name
    assert logs[0][1]["clip_ratio/region_mean"] > 0 and logs[0][1]["clip_ratio/high_max"] > 0


@pytest.mark.parametrize(("method", "paper"), [("grpo", "2402.03300"), ("gtpo", "2508.03772")])
def test_a_library_run_has_the_card_of_trl(method: str, paper: str, build: Any, tmp_path: Path) -> None:
    build(method, save_strategy="steps", save_steps=1).train()
    front, _, text = (tmp_path / "README.md").read_text().partition("# Model Card")
    assert f"- {method}\n" in front
    assert paper in text and method.upper() in text and "```bibtex\n@article" in text


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (lambda completions, **_: [None] * len(completions), "returned None for all 2 completions of step 1"),
        (lambda completions, **_: [float("nan")] * len(completions), "is not finite in step 1"),
        (lambda completions, **_: 1 / 0, "raised ZeroDivisionError"),
    ],
    ids=["none", "nan", "raises"],
)
def test_a_message_to_a_library_script_names_no_flag(reward: Any, said: str, sampling: Any) -> None:
    with pytest.raises(RunError, match=said) as raised:
        sampling("grpo", rewards=reward).train()
    assert "--" not in str(raised.value) and "again, or from a checkpoint" in str(raised.value)


# Adapters of tied embeddings


@pytest.mark.parametrize(("target", "said"), [("embed_tokens", "ties them"), ("lm_head", "lm_head")])
def test_an_adapter_of_tied_embeddings_is_refused(target: str, said: str, tiny: Path, tmp_path: Path) -> None:
    """A merge writes it into the matrix that both share: another model."""

    def build(ties: bool) -> Any:
        model = AutoModelForCausalLM.from_pretrained(tiny, tie_word_embeddings=ties)
        policy = get_peft_model(model, LoraConfig(target_modules=["q_proj", target]))
        args = trl.GRPOConfig(str(tmp_path), **QUIET)
        return GRPOTrainer(policy, worth, args, FOUR, processing_class=AutoTokenizer.from_pretrained(tiny))

    with pytest.raises(ValueError, match=said):
        build(ties=True)  # from TRL 1.15 on the refusal of lm_head is TRL's
    if target == "embed_tokens":
        assert build(ties=False).model.peft_config
