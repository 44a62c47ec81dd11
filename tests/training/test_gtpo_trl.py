"""examples/gtpo_trl.py against our trainer: weights, metrics, initial entropy, refusals.

``make test-backend BACKEND=trl`` runs this file with each version of TRL that the example names.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from accelerate import Accelerator
from helpers.canned import GROUP, batch_of, canned_group, trained_weights
from helpers.files import tables_of
from helpers.scripts import ROOT
from pytest import MonkeyPatch

from examples import gtpo_trl
from examples.gtpo_trl import GTPOConfig
from gtpo.training import initial_entropy

TABLES = tables_of(__file__)

ATOL = 1e-6  # on weights after three steps at learning rate 0.03; observed 3e-8
METRICS = ("loss", "entropy", "filtered_fraction", "conflict_tokens", "conflict_fraction")


def gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


CASES: dict[str, dict[str, Any]] = {
    "the paper": {},
    "micro-batches": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4},
    "old policy": {"num_iterations": 2},
    "temperature": {"temperature": 0.7},
    "correction off": {"gtpo": {"conflict_correction": False}},
    "filter off": {"gtpo": {"entropy_filter": "off"}},
    "negative_only": {"gtpo": {"entropy_filter": "negative_only"}},
    "A = 0 skipped": {"gtpo": {"zero_advantage": "skip", "gamma": 2.0}},
    "initially spread": {"gtpo": {"initial_entropy": 0.8}},
    "other values": {"gtpo": {"gamma": 0.3, "conflict_positive_weight": 1.0, "conflict_span": "common"}},
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_those_of_our_trainer(case: str, build: Any) -> None:
    mine, ours = (build(method, method, max_steps=3, **CASES[case]) for method in ("gtpo_trl", "gtpo"))
    assert gap(trained_weights(mine), trained_weights(ours)) <= ATOL
    log, our_log = ([row for row in trainer.state.log_history if "loss" in row] for trainer in (mine, ours))
    assert len(log) == len(our_log) == 3
    for row, other in zip(log, our_log, strict=True):
        names = [name for name in METRICS if name in other]  # conflicts: of the steps that generate
        assert [row[name] for name in names] == pytest.approx([other[name] for name in names], abs=2e-5)


def test_the_importance_weights_of_the_sampler_enter_the_loss(build: Any) -> None:
    """vLLM's log-probabilities, which are those of a uniform policy here: ratios of 0.05 to 20."""

    def train(method: str, noise: tuple[float, ...]) -> dict[str, torch.Tensor]:
        trainer = build(method, vllm_importance_sampling_mode="token_truncate", max_steps=2)

        def sample(prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            group = canned_group(trainer.state.global_step)
            return group, [(noise * len(row))[: len(row)] for row in group]

        trainer._generate_single_turn = sample
        trainer.use_vllm = True
        trainer._next_rollout_check = 9
        return trained_weights(trainer)

    noise = (-4.0, -5.0, -5.5, -7.0)
    mine = train("gtpo_trl", noise)
    assert gap(mine, train("gtpo", noise)) <= ATOL
    assert gap(mine, train("gtpo_trl", noise[:1])) > 100 * ATOL


@pytest.mark.parametrize("rows", [GROUP, 3])
def test_the_initial_entropy_is_measured_once_before_training(
    rows: int, build: Any, monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In micro-batches, with random numbers of its own."""
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": GROUP // rows, "max_steps": 2}
    ours = build("gtpo", gtpo={"initial_entropy": None})
    monkeypatch.setattr(ours.initial_entropy, "_rows_at_once", lambda share: rows)  # as in the file
    expected = pytest.approx(ours.initial_entropy._measure()["initial_entropy"], abs=1e-5)
    trainer = build("gtpo_trl", gtpo={"initial_entropy": None}, **settings)
    canned = trainer._generate_single_turn
    trainer._generate_single_turn = lambda *args, **kwargs: (torch.rand(1), canned(*args, **kwargs))[1]  # as a sampler
    before = torch.random.get_rng_state()
    trainer._measure_initial_entropy()
    assert torch.equal(before, torch.random.get_rng_state())
    trainer.train()
    (stored,) = [row for row in trainer.state.log_history if "initial_entropy" in row]
    assert stored == {"initial_entropy": expected, "step": 0}
    assert f"Initial entropy {stored['initial_entropy']:.2f} nats, entropy filter off" in caplog.messages


@pytest.mark.parametrize("streams", [False, True], ids=["data", "stream"])
@pytest.mark.parametrize("shuffles", [False, True], ids=["in order", "shuffled"])
def test_the_initial_entropy_is_of_the_first_rows(
    shuffles: bool, streams: bool, build: Any, monkeypatch: MonkeyPatch
) -> None:
    """Of the same rows as in the package, which are not the first ones of the data."""
    asked: list[list[str]] = []
    for module in (gtpo_trl, initial_entropy):
        monkeypatch.setattr(module, "PROMPTS", 3)
    for method in ("gtpo_trl", "gtpo"):
        trainer = build(method, gtpo={"initial_entropy": None}, shuffle_dataset=shuffles, seed=5)
        if streams:
            trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
        tokenize = trainer._tokenize_prompts
        monkeypatch.setattr(
            trainer, "_tokenize_prompts", lambda prompts, t=tokenize: (asked.append(prompts), t(prompts))[1]
        )
        trainer._measure_initial_entropy() if method == "gtpo_trl" else trainer.initial_entropy._measure()
    assert asked[0] == asked[1] and len(asked[0]) == 3
    assert (asked[0] == list(trainer.train_dataset.take(3)["prompt"])) is not shuffles


@pytest.mark.slow
def test_a_resumed_run_keeps_entropy_and_weights(build: Any, tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 4}
    settings |= {"gtpo": {"initial_entropy": None, "entropy_filter": "auto", "entropy_threshold": 5.05}}
    trainer, resumed = (build("gtpo_trl", **settings) for _ in range(2))
    expected = trained_weights(trainer)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    rows = [[row for row in each.state.log_history if "initial_entropy" in row] for each in (trainer, resumed)]
    assert rows[0] == rows[1] and len(rows[0]) == 1
    found = {name: weight for name, weight in resumed.model.named_parameters() if weight.requires_grad}
    assert gap(found, expected) <= ATOL


def test_a_prompt_is_measured_once_untrained(build: Any, monkeypatch: MonkeyPatch) -> None:
    trainer = build("gtpo_trl", gtpo={"initial_entropy": None})
    with monkeypatch.context() as patch:  # three processes have nine rows of eight prompts
        patch.setattr(Accelerator, "num_processes", 3)
        patch.setattr(trainer.accelerator, "gather", lambda means: torch.arange(9.0))
        assert trainer._measure_initial_entropy() == 3.5
    trainer.state.global_step = 7
    with pytest.raises(ValueError, match="the policy is trained: set initial_entropy"):
        batch_of(trainer)
    trainer.args.initial_entropy = 0.5  # set: it would win over a measured one
    batch_of(trainer)
    trainer.state.log_history.append({"initial_entropy": 0.9, "step": 0})
    assert trainer._initial_entropy() == 0.5 and len(trainer.state.log_history) == 1


@pytest.mark.parametrize(("settings", "message"), TABLES["settings_that_change_the_objective_are_refused"])
def test_settings_that_change_the_objective_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GTPOConfig(use_cpu=True, bf16=False, **settings)


def test_environments_tools_and_images_are_refused(build: Any, monkeypatch: MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="does not support environments"):
        build("gtpo_trl", trainer_settings={"environment_factory": object})
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", lambda self, inputs: {"tool_mask": 1})
    with pytest.raises(ValueError, match="does not support tool_mask: use text and no tools"):
        batch_of(build("gtpo_trl"))


def execute_with(monkeypatch: MonkeyPatch, **changes: Any) -> None:
    """Import the file again, with another TRL."""
    for name, value in changes.items():
        monkeypatch.setattr(trl, name, value)
    exec(compile((ROOT / "examples" / "gtpo_trl.py").read_text(), "gtpo_trl.py", "exec"), {"__name__": "copied"})


@pytest.mark.parametrize("name", gtpo_trl.OVERRIDDEN)
def test_a_trl_without_an_overridden_method_is_refused(name: str, monkeypatch: MonkeyPatch) -> None:
    """The class would train plain GRPO."""
    found = {key: value for key, value in vars(trl.GRPOTrainer).items() if key != name}
    with pytest.raises(ImportError, match=f"has no GRPOTrainer.{name}: install TRL 1.14"):
        execute_with(monkeypatch, GRPOTrainer=type("GRPOTrainer", (), found))


def test_a_trl_that_was_not_tested_is_named(monkeypatch: MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    for version in ("1.14.2", "1.16.0"):
        execute_with(monkeypatch, __version__=version)
    assert not [each for each in recwarn if "was tested with" in str(each.message)]
    with pytest.warns(UserWarning, match="tested with TRL 1.14 to 1.16, not with 1.18.0"):
        execute_with(monkeypatch, __version__="1.18.0")
