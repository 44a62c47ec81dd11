"""Tools, environments and rollout functions: GTPO and GRPO on the tokens of the policy alone."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.canned import GROUP, TOOLS_LENGTH, TURNS, ToolBox, make_trainer, trained_weights
from helpers.reference import (
    naive_completion_entropy,
    naive_conflict_mask,
    naive_conflict_push,
    naive_conflict_weights,
    naive_entropy_filter,
    naive_gtpo_loss,
    naive_span_mask,
    unpad,
)

from examples import calculator
from gtpo import ConflictMetrics
from gtpo.errors import RunError, UsageError
from gtpo.grading.user_functions import checked_reward
from gtpo.training.rollout_check import sampler_gap
from gtpo.training.tag_logps import tag_logps
from gtpo.training.tools import policy_mask
from study.one_step import OneStep

ATOL = 1e-6


def group_of(trainer: Any) -> dict[str, Any]:
    """The scored batch of the canned group."""
    trainer.model.train()
    return trainer._generate_and_score_completions([trainer.train_dataset[0]] * GROUP)


def canned_policy_tokens(trainer: Any) -> list[list[int]]:
    """What the policy has written, from ``TURNS`` alone: the last turns of rows 5 and 6 have no room."""
    rows = [turns[: 1 if row in (5, 6) else None] for row, turns in enumerate(TURNS)]
    return [trainer.processing_class.encode("".join(turns), add_special_tokens=False) for turns in rows]


def float64_reference(trainer: Any, batch: dict[str, Any]) -> tuple[list[list[torch.Tensor]], list[list[float]], Any]:
    """ln pi, with gradient, and H of the policy's tokens, one row at a time on the plain logits of a float64 copy."""
    model = copy.deepcopy(trainer.model).double()
    logps, entropies = [], []
    prompts = unpad(batch["prompt_ids"], batch["prompt_mask"])
    rows = zip(
        prompts,
        unpad(batch["completion_ids"], batch["completion_mask"]),
        unpad(batch["tool_mask"], batch["completion_mask"]),
        strict=True,
    )
    for prompt, completion, by_policy in rows:
        log_pi = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = [t for t, mine in enumerate(by_policy) if mine]
        logps.append([log_pi[t, completion[t]] for t in own])
        entropies.append([-(log_pi[t].exp() * log_pi[t]).sum().item() for t in own])
    return logps, entropies, model


def test_the_policy_tokens_are_those_of_the_turns(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, tools=True)
    batch = group_of(trainer)
    tokens = canned_policy_tokens(trainer)
    assert unpad(batch["completion_ids"], policy_mask(batch)) == tokens
    lengths = batch["completion_mask"].sum(1).tolist()
    assert max(lengths) == lengths[5] == TOOLS_LENGTH  # its last tokens are the tool's
    assert lengths[6] == len(tokens[6]) and lengths[7:] == [len(row) for row in tokens[7:]]
    texts = trainer.processing_class.batch_decode(unpad(batch["completion_ids"], batch["completion_mask"]))
    assert texts[2].count("<|user|>") == 2 and "<|user|>35<|assistant|>" in texts[2]
    assert "{'error': 'expected two whole numbers" in texts[3]
    assert trainer._metrics["train"]["tools/call_frequency"] == [pytest.approx(8 / GROUP)]
    assert trainer._metrics["train"]["tools/failure_frequency"] == [pytest.approx(1 / 8)]
    assert set(batch["advantages"].sign().tolist()) == {1.0, -1.0}


@pytest.mark.parametrize("span", ["anchored", "first_run", "common"])
def test_gtpo_with_tools_is_gtpo_on_the_policy_tokens(span: str, tiny: Path, tmp_path: Path) -> None:
    """Loss and gradient of every weight, with naive Eq. 11 on the tokens that are left without the tools' ones."""
    trainer = make_trainer("gtpo", tiny, tmp_path, tools=True, gtpo={"conflict_span": span})
    batch = group_of(trainer)
    tokens, advantages = canned_policy_tokens(trainer), batch["advantages"].tolist()
    assert unpad(batch["completion_ids"], policy_mask(batch)) == tokens
    mask = reference_spans(tokens, advantages, span)
    assert unpad(batch["conflict_mask"], policy_mask(batch)) == mask
    assert not batch["conflict_mask"][~policy_mask(batch).bool()].any()
    logps, entropies, model = float64_reference(trainer, batch)
    means = naive_completion_entropy(entropies)
    threshold = sum(sorted(means)[GROUP // 2 - 1 : GROUP // 2 + 1]) / 2  # filters half of the group
    trainer.gtpo.entropy_threshold = threshold
    delta = naive_entropy_filter(means, advantages, 0.1, threshold, "auto")
    assert 0 < sum(delta) < GROUP
    expected, gradient = naive_gtpo_loss(
        [[logp.item() for logp in row] for row in logps],
        advantages,
        weights=naive_conflict_weights(mask, advantages),
        token_entropy=entropies,
        gamma=0.1,
        delta=delta,
    )
    coefficients = torch.tensor([g for row in gradient for g in row], dtype=torch.float64)
    torch.stack([logp for row in logps for logp in row]).backward(coefficients)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=ATOL)
    wanted = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    found = {name: weight.grad for name, weight in trainer.model.named_parameters() if weight.grad is not None}
    assert wanted.keys() == found.keys() and max(grad.abs().max() for grad in found.values()) > 100 * ATOL
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name].double(), grad, atol=ATOL, rtol=1e-4, msg=lambda text, n=name: n + text)
    assert trainer._metrics["train"]["entropy"] == [pytest.approx(sum(means) / GROUP, abs=1e-5)]


def reference_spans(tokens: list[list[int]], advantages: list[float], span: str) -> list[list[bool]]:
    if span == "anchored":
        return naive_conflict_mask(tokens, advantages, GROUP)
    return naive_span_mask(tokens, advantages, GROUP, span)


def test_the_metrics_count_policy_tokens(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, tools=True)
    batch = group_of(trainer)
    tokens, advantages = canned_policy_tokens(trainer), batch["advantages"].tolist()
    mask = naive_conflict_mask(tokens, advantages, GROUP)
    count, lengths = sum(map(sum, mask)), [len(row) for row in tokens]
    push, corrected = naive_conflict_push(tokens, advantages, GROUP, [1 / GROUP / n for n in lengths])
    expected = {
        "conflict_tokens": count / GROUP,
        "conflict_fraction": count / sum(lengths),
        "conflict_push": push,
        "conflict_push_corrected": corrected,
        "completion_length": sum(lengths) / GROUP,
        "completions/mean_length": sum(lengths) / GROUP,
    }
    found = trainer._metrics["train"]
    assert {name: found[name] for name in expected} == {name: [pytest.approx(v)] for name, v in expected.items()}
    assert any(row[26:30] == [True] * 4 for row in mask)  # a span goes on after the syntax of a call


@pytest.mark.parametrize(
    "settings",
    [{}, {"beta": 0.04}, {"loss_type": "dapo"}, {"loss_type": "dr_grpo"}, {"loss_type": "bnpo"}, {"num_iterations": 2}],
    ids=str,
)
def test_grpo_with_tools_is_that_of_trl(settings: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    halves = {"per_device_train_batch_size": GROUP // 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    logs, weights = [], []
    for method in ("grpo", "trl"):
        trainer = make_trainer(method, tiny, tmp_path / method, tools=True, **halves, **settings)
        weights.append(trained_weights(trainer))
        logs.append([row for row in trainer.state.log_history if "loss" in row])
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], atol=ATOL, rtol=0, msg=name)
    for ours, theirs in zip(*logs, strict=True):
        shared = {"loss", "reward", "num_tokens", "tools/call_frequency", "completions/clipped_ratio"}
        shared |= {f"completions/{kind}_length" for kind in ("mean", "min", "max", "mean_terminated")}
        assert {name: ours.get(name) for name in shared} == pytest.approx(
            {name: theirs.get(name) for name in shared}, abs=1e-6
        )


def test_conflict_metrics_of_trls_trainer_count_policy_tokens(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("trl", tiny, tmp_path / "trl", tools=True)
    trainer.add_callback(ConflictMetrics(trainer))
    trained_weights(trainer)
    ours = make_trainer("grpo", tiny, tmp_path / "ours", tools=True)
    trained_weights(ours)
    (found, *_), (expected, *_) = trainer.state.log_history, ours.state.log_history
    for name in ("conflict_tokens", "conflict_fraction", "conflict_push", "conflict_push_corrected"):
        assert found[name] == pytest.approx(expected[name]), name
    assert found["completion_entropy"] == pytest.approx(expected["entropy"], abs=1e-5)


def test_the_initial_entropy_is_that_of_all_turns(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, tools=True, gtpo={"initial_entropy": None})
    batch = group_of(trainer)
    expected = naive_completion_entropy(float64_reference(trainer, batch)[1])[:8]
    before = copy.deepcopy((trainer._metrics, trainer._logs, trainer.state.num_input_tokens_seen))
    trainer.train_dataset = Dataset.from_list([trainer.train_dataset[0]] * 8)
    found = trainer.initial_entropy._measure()
    assert found["per_prompt"][:8] == pytest.approx(expected, abs=1e-5)
    assert found["prompts"] == 100  # the environment writes another prompt each time
    assert (trainer._metrics, trainer._logs, trainer.state.num_input_tokens_seen) == before
    assert trainer.num_generations == trainer.num_generations_eval == GROUP


def test_the_table_has_the_whole_text_and_marks_policy_tokens(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, tools=True, log_completions=True)
    trainer.reward_funcs = [checked_reward(lambda completions, **columns: [float(i < 3) for i in range(GROUP)])]
    batch = group_of(trainer)
    texts, extra = list(trainer._logs["completion"]), trainer._logs["extra"]
    assert "35" in texts[2] and "7 7 7" in texts[5]
    decode = trainer.processing_class.decode
    for row in range(GROUP):
        marked = "".join(texts[row][first:last] for first, last in extra["conflicts"][row])
        ids = batch["completion_ids"][row][batch["conflict_mask"][row]]
        assert marked == decode(ids, skip_special_tokens=True)
    call = '<call>calculate {"expression": "7 + 5"}</call>'  # rows 0 and 4 agree on it, and on 12 behind its answer
    assert texts[0] == f"{call}1212"  # without special tokens
    assert extra["conflicts"][0] == [[0, len(call)], [len(call) + 2, len(call) + 4]]
    assert list(extra["cut_off"]) == [row in (4, 5, 8) for row in range(GROUP)]


def test_a_group_is_inspected_with_its_tools(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, tools=True)
    group = trainer.inspect_group(0)
    batch = group_of(trainer)
    assert [len(row) for row in group.tokens] == batch["completion_mask"].sum(1).tolist()
    weights = trainer._lambda(batch)
    for row, of_policy in enumerate(unpad(batch["tool_mask"], batch["completion_mask"])):
        assert {w for w, mine in zip(group.weights[row], of_policy, strict=True) if not mine} <= {1.0}
        assert group.weights[row] == weights[row][batch["completion_mask"][row].bool()].tolist()


def test_tag_logps_are_those_of_policy_tokens() -> None:
    class Letters:
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [chr(token) for token in ids]

    ids = torch.tensor([[ord(letter) for letter in "a<cc>b"]])  # the tool has written cc
    valid = torch.tensor([[1, 1, 0, 0, 1, 1]])
    logps = torch.tensor([[1.0, 2.0, 30.0, 40.0, 5.0, 6.0]])
    found = tag_logps(Letters(), ids, valid, logps, ("<>", "b", "a", "cc"))
    assert found[:3].tolist() == [7.0, 6.0, 1.0] and found[3].isnan()


def test_a_turn_after_tools_stops_at_nan_without_asking_other_processes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tool loop processes call the model differently often: none may wait for another."""
    trainer = make_trainer("gtpo", tiny, tmp_path)
    asked: list[bool] = []
    monkeypatch.setattr("gtpo.training.trainer.any_process", lambda flag, device: asked.append(flag) or flag)

    def fail(ids: Any) -> Any:
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")

    monkeypatch.setattr(trainer, "_sample", fail)
    generate = super(type(trainer).__mro__[1], trainer)._generate_single_turn
    for kwargs, collectives in (({"has_tool_images": False}, []), ({}, [True])):
        asked.clear()
        with pytest.raises(RunError, match="the probability of a sampled token is not finite"):
            generate([[300]], None, {}, 1, **kwargs)
        assert asked == collectives


def test_the_sampler_is_compared_and_corrected_on_policy_tokens(tiny: Path, tmp_path: Path) -> None:
    """TRL has 0 for the log-probabilities of the answers; a ratio of the whole completion must not contain them."""
    trainer = make_trainer("grpo", tiny, tmp_path, tools=True, vllm_importance_sampling_mode="sequence_truncate")
    trainer.num_iterations, trainer._next_rollout_check = 2, 9  # old log-probabilities
    turn = trainer._canned_turn

    def sample(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        turns = turn(prompt_ids, "has_tool_images" in kwargs)
        return turns, [[-6.0] * len(ids) for ids in turns]

    trainer._generate_single_turn, trainer.use_vllm, trainer.vllm_mode = sample, True, "server"
    trainer.vllm_importance_sampling_correction, trainer.vllm_importance_sampling_clip_max = True, 1e9
    batch = group_of(trainer)
    log_ratio = (batch["old_per_token_logps"] + 6.0) * policy_mask(batch)
    expected = log_ratio.sum(1, keepdim=True).exp().clamp(max=1e9)
    torch.testing.assert_close(batch["importance_sampling_ratio"], expected, rtol=1e-4, atol=0)
    gap = (log_ratio.abs().sum() / policy_mask(batch).sum()).item()
    assert sampler_gap(batch["old_per_token_logps"], batch).item() == pytest.approx(gap, rel=1e-5)


def test_held_out_rows_are_evaluated_with_tools(tiny: Path, tmp_path: Path) -> None:
    settings = {"eval_strategy": "no", "num_generations_eval": 1, "per_device_eval_batch_size": 5}
    trainer = make_trainer("gtpo", tiny, tmp_path, tools=True, held_out=5, **settings)
    trainer.model.eval()
    found = trainer.evaluate()
    lengths = [len(row) for row in canned_policy_tokens(trainer)[:5]]
    assert found["eval_completion_length"] == pytest.approx(sum(lengths) / 5)
    assert found["eval_tools/call_frequency"] == pytest.approx(6 / 5)


def test_one_step_effects_are_of_policy_tokens(tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, tools=True)
    effects = object.__new__(OneStep)  # without prompts that are scored
    effects.trainer, effects.taken, effects.prompts, effects.counts, effects.directions = trainer, [], [0], {}, {}
    effects.weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    trainer.model.train()
    found = effects.of_group(0)
    batch = group_of(trainer)
    signs, lengths = batch["advantages"].sign().tolist(), [len(row) for row in canned_policy_tokens(trainer)]
    by_sign = {sign: [n for n, s in zip(lengths, signs, strict=True) if s == sign] for sign in (1.0, -1.0)}
    assert found["longer"] == pytest.approx(sum(by_sign[1]) / len(by_sign[1]) - sum(by_sign[-1]) / len(by_sign[-1]))
    assert found["entropy"] == pytest.approx(trainer.mean_entropies(batch).mean().item(), abs=1e-5)


# Tools and rollout functions without an environment


def image() -> list[dict[str, str]]:
    """Draw."""
    return [{"type": "image", "image": "a.png"}]


def numbers() -> list[int]:
    """Count."""
    return [1, 2]


@pytest.mark.parametrize("tool", [image, numbers])
def test_a_tool_that_returns_a_list_is_refused(tool: Any, tiny: Path, tmp_path: Path) -> None:
    trainer = make_trainer("gtpo", tiny, tmp_path, tools=True)
    message = {"role": "tool", "name": tool.__name__, "content": tool()}
    with pytest.raises(UsageError, match=f"^the tool {tool.__name__} returned a list, which TRL takes for images"):
        trainer._get_tool_suffix_ids([message])


def test_tools_alone_are_an_environment_without_state(tiny: Path, tmp_path: Path) -> None:
    box = ToolBox()
    box.reset()
    weights = []
    for name, extra in (
        ("environment", {}),
        ("tools", {"environment_factory": None, "tools": [box.calculate, box.say]}),
    ):
        trainer = make_trainer("gtpo", tiny, tmp_path / name, tools=True, trainer_settings=extra)
        weights.append(trained_weights(trainer))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("method", ["gtpo", "grpo"])
def test_a_rollout_function_with_an_env_mask_is_an_environment(method: str, tiny: Path, tmp_path: Path) -> None:
    with_tools = make_trainer(method, tiny, tmp_path / "tools", tools=True)
    batch = group_of(with_tools)
    expected = trained_weights(with_tools)
    asked: list[int] = []

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        asked.append(len(prompts))
        masks = {name: unpad(batch[name], batch["completion_mask"]) for name in ("completion_ids", "tool_mask")}
        prompt_ids = unpad(batch["prompt_ids"], batch["prompt_mask"])
        found = {"prompt_ids": prompt_ids, "completion_ids": masks["completion_ids"], "env_mask": masks["tool_mask"]}
        return {name: rows[: len(prompts)] for name, rows in found.items()} | {"logprobs": None}

    extra = {"environment_factory": None, "rollout_func": rollout}
    trainer = make_trainer(method, tiny, tmp_path / "rollout", tools=True, trainer_settings=extra)
    found = trained_weights(trainer)
    assert asked == [GROUP]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_environment_may_own_prompt_and_reward(tiny: Path, tmp_path: Path) -> None:
    """reset() returns a part of the prompt; get_reward() scores, under the name of the class."""

    class Owner(calculator.Calculator):
        number = 0

        def reset(self, **row: Any) -> str:
            super().reset()
            Owner.number += 1
            return f"Question {Owner.number}?"

        def get_reward(self) -> float:
            return float(self.calls)

    trainer = make_trainer(
        "gtpo",
        tiny,
        tmp_path,
        tools=True,
        gtpo={"initial_entropy": None},
        trainer_settings={"environment_factory": Owner},
    )
    trainer.train()
    (row, *_) = trainer.state.log_history
    calls = sum(turn.startswith("<call>calculate") and turn.endswith("</call></s>") for t in TURNS for turn in t)
    assert row["rewards/Owner/mean"] == pytest.approx((calls - 1) / GROUP)  # a call without arguments that are JSON
    assert math.isfinite(row["loss"]) and Owner.number == 100 + GROUP
