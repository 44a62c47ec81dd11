"""What users of TRL's GRPOTrainer rely on in a library script: its arguments, evaluation, metrics, model card."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from helpers.canned import reward_parity
from helpers.refusals import refused
from peft import LoraConfig, get_peft_model
from pytest import MonkeyPatch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import gtpo_trl
from gtpo import GRPOTrainer, GTPOArguments, GTPOConfig, GTPOTrainer
from gtpo.errors import RunError

QUIET = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "optim": "sgd"}
SMALL = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 4, "max_steps": 1}
CLASSES = {"grpo": (GRPOTrainer, trl.GRPOConfig), "gtpo": (GTPOTrainer, GTPOConfig)}


def worth(prompts: list[str], **columns: Any) -> list[float]:
    return [float(prompt.split()[-1]) for prompt in prompts]


def rows(*values: float) -> Dataset:
    return Dataset.from_dict({"prompt": [f"A row worth {value}" for value in values], "extra": [*map(str, values)]})


@pytest.fixture
def sampling(tiny: Path, tmp_path: Path) -> Any:
    def sampling(method: str, evaluated: Any = None, rewards: Any = worth, train: Any = None, **settings: Any) -> Any:
        trainer, config = CLASSES[method]
        args = config(str(tmp_path), **QUIET | SMALL | settings)
        if method == "gtpo":
            args.initial_entropy = 0.1
        return trainer(
            AutoModelForCausalLM.from_pretrained(tiny),
            rewards,
            args,
            train_dataset=rows(1.0, 2.0, 3.0, 4.0) if train is None else train,
            eval_dataset=evaluated,
            processing_class=AutoTokenizer.from_pretrained(tiny),
        )

    return sampling


# Arguments


@pytest.mark.parametrize("method", ["grpo", "gtpo"])
def test_arguments_may_be_given_by_position(method: str, tiny: Path, tmp_path: Path) -> None:
    trainer, config = CLASSES[method]
    model = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    found = trainer(model, worth, config(str(tmp_path), **QUIET), rows(1.0), rows(2.0), tokenizer)
    assert (len(found.train_dataset), found.eval_dataset["extra"]) == (1, ["2.0"])
    assert found.processing_class is tokenizer and [f.__name__ for f in found.reward_funcs] == ["worth"]
    with refused("tools is not supported"):  # by position too
        trainer(
            model,
            worth,
            config(str(tmp_path), **QUIET),
            None,
            None,
            None,
            None,
            None,
            (None, None),
            None,
            None,
            [print],
        )


@pytest.mark.parametrize("method", ["grpo", "gtpo", "gtpo_trl"])
def test_a_trainer_without_args_has_the_defaults(method: str, tiny: Path, here: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)  # TRL's default
    trainer, config = CLASSES.get(method, (gtpo_trl.GTPOTrainer, gtpo_trl.GTPOConfig))
    found = trainer(str(tiny), worth, train_dataset=rows(1.0, 2.0))
    assert type(found.args) is config
    assert found.args.output_dir == f"{tiny.name}-{'GRPO' if method == 'grpo' else 'GTPO'}"
    assert found.args.loss_type == ("grpo" if method != "grpo" else trl.GRPOConfig.loss_type)
    with pytest.raises(ValueError, match="reward_funcs"):  # TRL's sentence
        trainer(str(tiny), train_dataset=rows(1.0, 2.0))


def test_the_config_has_the_fields_of_the_file(tmp_path: Path) -> None:
    ours = GTPOConfig(str(tmp_path), **QUIET)
    theirs = gtpo_trl.GTPOConfig(str(tmp_path), **QUIET)
    assert ours.to_dict() == theirs.to_dict()
    settings = {"gamma": 0.3, "conflict_span": "common", "initial_entropy": 0.2, "temperature": 0.7}
    given = GTPOConfig(str(tmp_path), **QUIET, **settings)
    assert given.to_dict() == gtpo_trl.GTPOConfig(str(tmp_path), **QUIET, **settings).to_dict()
    with refused("gamma is -1"):
        GTPOConfig(str(tmp_path), gamma=-1)


def test_the_settings_of_the_method_are_given_once(tiny: Path, tmp_path: Path) -> None:
    args = GTPOConfig(str(tmp_path), gamma=0.3, **QUIET)
    with refused("pass one of them"):
        GTPOTrainer(str(tiny), worth, args, gtpo=GTPOArguments(gamma=0.2))
    assert GTPOTrainer(str(tiny), worth, args, rows(1.0)).gtpo.gamma == 0.3


SCRIPT = """
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

trainer = GTPOTrainer(
    AutoModelForCausalLM.from_pretrained(model),
    lambda completion_ids, **columns: [float(row % 3) for row, _ in enumerate(completion_ids)],
    GTPOConfig(
        output, num_generations=4, per_device_train_batch_size=4, max_completion_length=8, max_steps=3, gamma=0.2,
        use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, learning_rate=0.01, optim="sgd", seed=3,
        lr_scheduler_type="constant", initial_entropy=0.1, entropy_threshold=9.0, top_k=1,
    ),
    train_dataset=Dataset.from_dict({"prompt": ["One?", "Two?", "Three?", "Four?"]}),
    processing_class=AutoTokenizer.from_pretrained(model),
)
trainer.train()
"""


def test_a_script_moves_to_the_package_by_its_import(tiny: Path, tmp_path: Path) -> None:
    """The same script; it generates with top_k = 1, since the two draw other random numbers."""
    weights = []
    for module in ("examples.gtpo_trl", "gtpo"):
        names = {"model": str(tiny), "output": str(tmp_path / module)}
        torch.manual_seed(0)
        exec(f"from {module} import GTPOConfig, GTPOTrainer\n{SCRIPT}", names)
        trainer: Any = names["trainer"]
        assert trainer.state.global_step == 3 and trainer.args.loss_type == "grpo"
        weights.append(torch.cat([weight.flatten() for weight in trainer.model.parameters()]).detach())
    before = AutoModelForCausalLM.from_pretrained(tiny)
    start = torch.cat([weight.flatten() for weight in before.parameters()]).detach()
    assert (weights[0] - weights[1]).norm() < 1e-4 * (weights[0] - start).norm()


# Evaluation


@pytest.mark.parametrize("method", ["grpo", "gtpo"])
def test_several_evaluation_sets_have_names_in_the_metrics(method: str, sampling: Any) -> None:
    sets = {"one": rows(1.0, 2.0), "two": rows(4.0)}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_two_reward", "save_steps": 1}
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2} | best
    trainer = sampling(method, sets, **settings)
    trainer.train()
    for name, reward in (("one", 1.5), ("two", 4.0)):
        found = [row[f"eval_{name}_reward"] for row in trainer.state.log_history if f"eval_{name}_reward" in row]
        assert found == [reward, reward]
    assert not [row for row in trainer.state.log_history if "eval_reward" in row]
    assert trainer.state.best_metric == 4.0
    found = trainer.evaluate({"three": rows(8.0)})
    assert found["eval_three_reward"] == 8.0 and "eval_three_loss" in found and "eval_loss" not in found


def test_metrics_have_the_prefix_of_their_evaluation(sampling: Any) -> None:
    trainer = sampling("grpo")
    found = trainer.evaluate(rows(1.0, 2.0), metric_key_prefix="test")
    assert found["test_reward"] == 1.5 and {"test_loss", "test_runtime"} <= found.keys()
    assert not [name for name in found if name.startswith("eval_")]
    assert trainer.evaluate(rows(3.0))["eval_reward"] == 3.0  # nothing of the one before


def test_a_stream_is_evaluated_as_its_rows(sampling: Any) -> None:
    trainer = sampling("gtpo", rows(1.0, 2.0, 6.0).to_iterable_dataset())
    streamed = trainer.evaluate()
    listed = trainer.evaluate(rows(1.0, 2.0, 6.0))
    assert streamed["eval_reward"] == listed["eval_reward"] == 3.0
    assert streamed["eval_loss"] == listed["eval_loss"]


@pytest.mark.parametrize("method", ["grpo", "gtpo"])
def test_a_stream_is_trained_on(method: str, sampling: Any, monkeypatch: MonkeyPatch) -> None:
    trainer = sampling(method, train=rows(*range(120)).to_iterable_dataset())
    if method == "gtpo":
        trainer.args.initial_entropy = None
        asked: list[Any] = []
        monkeypatch.setattr(
            trainer.initial_entropy, "sampled_entropies", lambda rows: asked.extend(rows) or [0.5] * len(rows)
        )
    trainer.train()
    assert trainer.state.global_step == 1
    if method == "gtpo":
        shuffled = trainer.train_dataset.shuffle(seed=trainer.args.seed)
        assert asked == list(shuffled)[:100] != list(trainer.train_dataset)[:100]


def test_an_evaluation_needs_rows(sampling: Any) -> None:
    with pytest.raises(ValueError, match="evaluation requires an eval_dataset"):
        sampling("grpo").evaluate()


def test_predictions_are_metrics_and_leave_training_as_it_is(sampling: Any, tmp_path: Path) -> None:
    trainer = sampling("gtpo", rows(5.0), log_completions=True)
    state = torch.get_rng_state()
    found = trainer.predict(rows(1.0, 2.0))
    assert torch.equal(torch.get_rng_state(), state) and trainer.log_completions
    assert found.predictions is None and found.metrics["test_reward"] == 1.5
    assert {"test_loss", "test_runtime"} <= found.metrics.keys() and not [*tmp_path.glob("completions/*")]
    assert trainer.evaluate()["eval_reward"] == 5.0


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


@pytest.mark.parametrize(("method", "paper"), [("grpo", "2402.03300"), ("gtpo", "2508.03772")], ids=["grpo", "gtpo"])
def test_a_library_run_has_the_card_of_trl(method: str, paper: str, build: Any, tmp_path: Path) -> None:
    trainer = build(method, save_strategy="steps", save_steps=1)
    trainer.train()
    card = (tmp_path / "README.md").read_text()
    assert paper in card and f"- {method}\n" in card.partition("# Model Card")[0]
    assert (CLASSES[method][0]._name in card) and re.search(r"```bibtex\n@article", card)


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


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_of_tied_embeddings_is_refused(target: str, tiny: Path, tmp_path: Path) -> None:
    """A merge writes it into the matrix that both share: another model."""

    def build(ties: bool) -> Any:
        model = AutoModelForCausalLM.from_pretrained(tiny, tie_word_embeddings=ties)
        policy = get_peft_model(model, LoraConfig(target_modules=["q_proj", target]))
        tokenizer = AutoTokenizer.from_pretrained(tiny)
        args = trl.GRPOConfig(str(tmp_path), **QUIET)
        return GRPOTrainer(policy, reward_parity, args, rows(1.0), processing_class=tokenizer)

    with pytest.raises(ValueError, match="ties them" if target == "embed_tokens" else "lm_head"):
        build(ties=True)  # from TRL 1.15 on the refusal of lm_head is TRL's
    if target == "embed_tokens":
        assert build(ties=False).model.peft_config
