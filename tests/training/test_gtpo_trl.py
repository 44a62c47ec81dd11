"""examples/gtpo_trl.py against our trainer: weights, metrics, initial entropy, refusals.

``make test-backend BACKEND=trl`` runs this file with TRL 1.15, between the two that other tests have.
"""

import runpy
from typing import Any

import pytest
import torch
import trl
from accelerate import Accelerator
from helpers.canned import (
    GROUP,
    PREFIX,
    SUFFIX,
    TRAINERS,
    CannedGRPO,
    batch_of,
    canned_group,
    trained_weights,
)
from helpers.files import tables_of
from helpers.weights import Weights
from pytest import MonkeyPatch

from examples import gtpo_trl
from examples.gtpo_trl import GTPOConfig
from examples.objectives.tag_correction import TagCorrection
from gtpo.training import initial_entropy
from gtpo_loss import conflict_mask

TABLES = tables_of(__file__)

ATOL = 1e-6  # on weights after three steps at learning rate 0.03; observed 3e-8
METRICS = ("loss", "entropy", "filtered_fraction", "conflict_tokens", "conflict_fraction")


def gap(left: Weights, right: Weights) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


CASES: dict[str, Any] = {
    "the paper": {},
    "old policy": {"num_iterations": 2},
    "temperature": {"temperature": 0.7},
    "correction and filter off": {"gtpo": {"conflict_correction": False, "entropy_filter": "off"}},
    "negative_only": {"gtpo": {"entropy_filter": "negative_only"}},
    "A = 0 skipped, initially spread": {"gtpo": {"zero_advantage": "skip", "gamma": 2.0, "initial_entropy": 0.8}},
    "other values in micro-batches": {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 4,
        "gtpo": {"gamma": 0.3, "conflict_positive_weight": 1.0, "conflict_span": "common"},
    },
}


def test_the_correction_on_tags_is_a_setting_of_both(build: Any) -> None:
    """The second token of the prefix and of the suffix are the tags; other conflict tokens keep lambda 1."""
    settings = {"conflict_tokens": "tags"}
    ours = build("gtpo", "ours", max_steps=3, gtpo=settings)
    tags = ours._tokenizer.convert_ids_to_tokens([PREFIX[1], SUFFIX[1]])
    ours.tags = tags
    mine = build("gtpo_trl", "mine", max_steps=3, gtpo=settings, tags=" ".join(tags))
    batch = batch_of(ours)
    is_tag = torch.zeros_like(batch["conflict_mask"])
    for marked, ids in zip(is_tag, canned_group(0), strict=True):
        pieces = ours._tokenizer.convert_ids_to_tokens(ids)
        token_of = [token for token, piece in enumerate(pieces) for _ in piece]  # of each character
        text = "".join(pieces)
        for tag in tags:
            for start in range(len(text)):
                if text.startswith(tag, start):
                    marked[token_of[start : start + len(tag)]] = True
    everything = conflict_mask(batch["completion_ids"], batch["completion_mask"], batch["advantages"], GROUP)
    assert torch.equal(batch["conflict_mask"], everything & is_tag)
    assert 0 < batch["conflict_mask"].sum() < everything.sum()
    assert gap(trained_weights(mine), trained_weights(ours)) <= ATOL
    of_all = build("gtpo", "all", max_steps=3)
    assert gap(trained_weights(of_all), trained_weights(ours)) > 1e-3


@pytest.mark.parametrize("off_policy", [{}, {"num_iterations": 2}])
def test_it_trains_as_the_objective_of_one_file(off_policy: Any, build: Any, monkeypatch: MonkeyPatch) -> None:
    """examples/objectives/tag_correction.py, which comparisons ran, but for the rows that the head skips here."""

    class CannedTags(CannedGRPO, TagCorrection):
        pass

    monkeypatch.setitem(TRAINERS, "tags", CannedTags)
    settings = {"conflict_tokens": "tags", "gamma": 0.0, "entropy_filter": "off"}
    ours = build("gtpo", "ours", max_steps=3, gtpo=settings, **off_policy)
    ours.tags = ours._tokenizer.convert_ids_to_tokens([PREFIX[1], SUFFIX[1]])
    file = build("tags", "file", max_steps=3, **off_policy)
    file.settings.corrected_tags = " ".join(ours.tags)
    assert gap(trained_weights(file), trained_weights(ours)) <= 1e-5  # observed 1e-6


@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_those_of_our_trainer(case: str, build: Any) -> None:
    mine, ours = (build(method, method, max_steps=3, **CASES[case]) for method in ("gtpo_trl", "gtpo"))
    assert gap(trained_weights(mine), trained_weights(ours)) <= ATOL
    log, our_log = ([row for row in trainer.state.log_history if "loss" in row] for trainer in (mine, ours))
    assert len(log) == len(our_log) == 3
    for row, other in zip(log, our_log, strict=True):
        expected = {name: other[name] for name in METRICS if name in other}  # conflicts: of the steps that generate
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=2e-5)


def test_the_importance_weights_of_the_sampler_enter_the_loss(build: Any) -> None:
    """vLLM's log-probabilities, here those of a uniform policy."""

    def train(method: str, logp: float) -> Weights:
        trainer = build(method, vllm_importance_sampling_mode="token_truncate", max_steps=2)

        def sample(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            group = canned_group(trainer.state.global_step)
            return group, [[logp] * len(row) for row in group]

        trainer._generate_single_turn = sample
        trainer.use_vllm = True
        trainer._next_rollout_check = 9
        return trained_weights(trainer)

    mine = train("gtpo_trl", -5.0)
    assert gap(mine, train("gtpo", -5.0)) <= ATOL
    assert gap(mine, train("gtpo_trl", -7.0)) > 100 * ATOL


@pytest.mark.parametrize(("rows", "shuffles", "streams"), [(12, False, False), (3, True, False), (12, True, True)])
def test_the_initial_entropy_is_that_of_our_trainer(
    rows: int, shuffles: bool, streams: bool, build: Any, monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the first rows of training, in micro-batches, measured once with random numbers of its own."""
    for module in (gtpo_trl, initial_entropy):
        monkeypatch.setattr(module, "PROMPTS", 5)
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": GROUP // rows, "seed": 5}
    settings |= {"gtpo": {"initial_entropy": None}, "shuffle_dataset": shuffles}
    mine, ours = (build(method, **settings) for method in ("gtpo_trl", "gtpo"))
    if streams:
        mine.train_dataset = ours.train_dataset = mine.train_dataset.to_iterable_dataset()
    monkeypatch.setattr(ours.initial_entropy, "_rows_at_once", lambda share: rows)  # as in the file
    expected = pytest.approx(ours.initial_entropy._sampled()["initial_entropy"], abs=1e-5)
    canned = mine._generate_single_turn
    mine._generate_single_turn = lambda *args, **kwargs: (torch.rand(1), canned(*args, **kwargs))[1]  # as a sampler
    before = torch.random.get_rng_state()
    assert mine._measure_initial_entropy() == expected
    assert torch.equal(before, torch.random.get_rng_state())
    for _ in range(2):
        mine._generate_and_score_completions([{"prompt": "Question?"}] * GROUP)
    assert mine.state.log_history == [{"initial_entropy": expected, "step": 0}]
    said = f"Initial entropy {mine.state.log_history[0]['initial_entropy']:.2f} nats, entropy filter off"
    assert said in caplog.messages


def test_a_prompt_is_measured_once_untrained(build: Any, monkeypatch: MonkeyPatch) -> None:
    trainer = build("gtpo_trl", gtpo={"initial_entropy": None})
    with monkeypatch.context() as patch:  # three processes have nine rows of eight prompts
        patch.setattr(Accelerator, "num_processes", 3)
        patch.setattr(trainer.accelerator, "gather", lambda means: torch.arange(9.0))
        assert trainer._measure_initial_entropy() == 3.5
    trainer.state.global_step = 7
    with pytest.raises(ValueError, match="the policy is trained: set initial_entropy"):
        batch_of(trainer)
    trainer.state.log_history.append({"initial_entropy": 0.9, "step": 0})  # of the checkpoint
    batch_of(trainer)
    assert trainer._initial_entropy() == 0.9
    trainer.args.initial_entropy = 0.5  # set: it wins over a measured one
    assert trainer._initial_entropy() == 0.5 and len(trainer.state.log_history) == 1


@pytest.mark.parametrize(("settings", "message"), TABLES["settings_that_change_the_objective_are_refused"])
def test_settings_that_change_the_objective_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GTPOConfig(use_cpu=True, bf16=False, **settings)


def test_environments_tools_and_images_are_refused(build: Any, monkeypatch: MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="does not support environments"):
        build("gtpo_trl", trainer_settings={"environment_factory": object})
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", lambda self, inputs: {"tool_mask": 1})
    with pytest.raises(ValueError, match="does not support tool_mask: use text and no tools"):
        batch_of(build("gtpo_trl"))


@pytest.mark.parametrize("name", gtpo_trl.OVERRIDDEN)
def test_a_trl_without_an_overridden_method_is_refused(name: str, monkeypatch: MonkeyPatch) -> None:
    """The class would train plain GRPO."""
    monkeypatch.delattr(trl.GRPOTrainer, name)
    with pytest.raises(ImportError, match=f"has no GRPOTrainer.{name}: install TRL 1.14"):
        runpy.run_path(gtpo_trl.__file__)


def test_a_trl_that_was_not_tested_is_named(monkeypatch: MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    for version in ("1.14.2", "1.16.0", "1.18.0"):
        monkeypatch.setattr(trl, "__version__", version)
        runpy.run_path(gtpo_trl.__file__)
    said = [str(each.message) for each in recwarn if "was tested with" in str(each.message)]
    assert said == ["gtpo_trl.py was tested with TRL 1.14 to 1.16, not with 1.18.0."]
