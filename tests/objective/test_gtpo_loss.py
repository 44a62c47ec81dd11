"""The objectives of GTPO and GRPO against naive references, hand-drawn groups, and identities of the paper.

All tests run on a CPU with small tensors. The references are in reference.py and share no code with gtpo_loss.py.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers.files import tables_of
from helpers.reference import (
    LN2,
    length_mask,
    naive_completion_entropy,
    naive_conflict_mask,
    naive_conflict_weights,
    naive_entropy_filter,
    naive_grpo_loss,
    naive_gtpo_loss,
    naive_token_weights,
    pad,
    unpad,
)
from torch import Tensor

from examples.objectives.credit import credited_mask
from gtpo_loss import (
    LOSS_TYPES,
    completion_entropy,
    conflict_mask,
    conflict_weights,
    entropy_filter,
    grpo_loss,
    gtpo_loss,
    rewards_at_mean,
    tag_mask,
)

ATOL64 = 1e-12  # float64, values and gradients of order 1; observed error 3e-16
ROUNDING = 1e-6  # float32 and bfloat16: allowed on top of rounding to the dtype of the inputs

TABLES = tables_of(__file__)
DRAWN: dict[str, dict[str, str]] = TABLES["groups"]
Found = tuple[Tensor, Tensor, dict[str, Tensor]]  # loss, its gradient, metrics


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Exactly equal: no tolerance for masks and weights."""
    assert actual.tolist() == expected.tolist()


# --- conflict mask and weights: hand-drawn groups --------------------------------------------------------------------


@pytest.mark.parametrize("pad_token", "_abE")  # padding that equals a real token makes no conflict
@pytest.mark.parametrize(("span", "title"), [(span, title) for span, groups in DRAWN.items() for title in groups])
def test_mask_and_weights_of_drawn_group(span: str, title: str, pad_token: str) -> None:
    rows = [[cell.split() for cell in row.split("|")] for row in DRAWN[span][title].splitlines()]
    advantages = [float(row[0][0]) for row in rows]
    completions = [[ord(token) for token in row[1]] for row in rows]
    mask = [[cell == "#" for cell in row[2]] for row in rows]
    weights = [[float(cell) for cell in row[3]] for row in rows]
    size = len(rows)
    assert naive_conflict_mask(completions, advantages, size, span) == mask  # the reference agrees with the table
    assert naive_conflict_weights(mask, advantages) == weights

    lengths = [len(completion) for completion in completions]
    width = max(lengths) + 3  # columns of padding after the longest completion
    ids = pad(completions, width, ord(pad_token), torch.int64)
    scores = torch.tensor(advantages)
    find = credited_mask if span == "credited" else partial(conflict_mask, span=span)
    found = find(ids, length_mask(lengths, width), scores, size)
    assert found.dtype == torch.bool
    assert_same(found, pad(mask, width, False, torch.bool))
    assert_same(conflict_weights(found, scores), pad(weights, width, 1.0, torch.float32))


def test_the_weight_of_positive_rows_is_an_option() -> None:
    mask = torch.tensor([[False, True]] * 3)
    advantages = torch.tensor([0.7, -0.7, 0.0])
    assert conflict_weights(mask, advantages, positive_weight=3.5).tolist() == [[1.0, 3.5], [1.0, 0.0], [1.0, 1.0]]


CHANGES: list[Callable[[Tensor], Tensor]] = [lambda r: r, lambda r: 10 * r, lambda r: 0.1 * r, lambda r: r + 100.0]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("rewards", "expected"), TABLES["at_mean"])
def test_a_reward_at_the_mean_in_any_unit(
    change: Callable[[Tensor], Tensor], rewards: list[float], expected: str
) -> None:
    size = len(rewards)
    other = [1.0, math.nan, 0.0, 0.0, 0.0][:size]  # NaN is not at the mean, nor is another reward of its group
    found = rewards_at_mean(torch.cat([change(torch.tensor(rewards)), torch.tensor(other)]), size)
    assert found.tolist() == [cell == "1" for cell in expected] + [False] * size


def test_rounding_hides_no_difference_of_rewards() -> None:
    """In float32 the places after the point of 1e6 are sixteenths: 0.1 of some rewards is more than rounding."""
    for size in (4, 8, 12):
        rewards = torch.tensor([1e6 + 0.1 * i for i in range(size)])
        assert not rewards_at_mean(rewards, size).any()
    tenths = torch.tensor([3, 6, 9, 6, 1, 11, 6, 2, 10, 6, 5, 7])
    assert_same(rewards_at_mean(1e4 + tenths / 10, 12), tenths == 6)
    # 1.3e-5 from the mean, in a group whose rounding is 2e-6
    assert not rewards_at_mean(torch.tensor([0.0, 2.0, 1.00002]), 3).any()


def test_rewards_equal_but_for_rounding_are_at_the_mean() -> None:
    """Sums of the same rewards in another order: neighbours in float32."""
    for size in (0.6, 100.6, 1e6):
        reward = torch.tensor(size)
        neighbour = reward.nextafter(torch.tensor(math.inf))
        assert rewards_at_mean(torch.stack([reward, neighbour, reward]), 3).all()


# --- entropy and filter ----------------------------------------------------------------------------------------------


def test_completion_entropy_is_the_mean_over_its_tokens() -> None:
    token_entropy = torch.tensor([[0.5, 1.5, 9.0], [3.0, 9.0, 9.0], [1.0, 2.0, 6.0], [9.0, 9.0, 9.0]])
    for dtype in (torch.bool, torch.float32):
        entropy = completion_entropy(token_entropy.requires_grad_(), length_mask([2, 1, 3, 0], 3).to(dtype))
        assert entropy.tolist() == [1.0, 3.0, 3.0, 0.0] and not entropy.requires_grad


BELOW = 0.3
AT = LN2
ABOVE = 1.3  # <H>_i below, exactly at and above the threshold ln 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("mode", "initial_entropy"), [(mode, initial) for mode, row in TABLES["filter"].items() for initial in row]
)
def test_filter_in_every_branch(mode: str, initial_entropy: float | None, dtype: torch.dtype) -> None:
    entropy = torch.tensor([BELOW, AT, ABOVE] * 3, dtype=dtype)
    advantages = torch.tensor([1.0] * 3 + [-1.0] * 3 + [0.0] * 3)
    expected = [int(cell) for cell in TABLES["filter"][mode][initial_entropy].replace(" ", "")]
    assert naive_entropy_filter([BELOW, AT, ABOVE] * 3, advantages.tolist(), initial_entropy, LN2, mode) == expected
    assert entropy_filter(entropy, advantages, initial_entropy, mode=mode).tolist() == expected


@pytest.mark.parametrize("threshold", [0.5, 1.05, 2.0])
def test_threshold_replaces_ln_2_for_the_completions_alone(threshold: float) -> None:
    """The model is prone to collapse if <H>_ini < ln 2, for any threshold on the completions; auto is the default."""
    entropy = torch.tensor([threshold - 0.01, threshold, threshold + 0.01], dtype=torch.float64)
    for initial, expected in [(0.69, [1, 1, 0]), (0.695, [1, 1, 1])]:
        assert entropy_filter(entropy, torch.full((3,), -1.0), initial, threshold).tolist() == expected


# --- objectives: a random batch and its references -------------------------------------------------------------------


@dataclass
class Batch:
    """Random inputs of an objective. Lengths are between one token and the full width."""

    mask: Tensor
    advantages: Tensor
    logps: Tensor
    old_logps: Tensor
    ref_logps: Tensor
    token_entropy: Tensor
    weights: Tensor

    def lists(self, name: str) -> list[list[float]]:
        return unpad(getattr(self, name), self.mask)


PER_TOKEN = ("logps", "old_logps", "ref_logps", "token_entropy")


def random_batch(seed: int = 0, width: int = 11) -> Batch:
    """A float64 batch of three groups of four. One row has no token, one has one, one has the full width.

    The entropy of every third row is well above ln 2, that of the others well below, so rounding does not matter.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = 12

    def uniform() -> Tensor:
        return torch.rand(rows, width, generator=generator, dtype=torch.float64)

    lengths = [0, 1, width, *torch.randint(1, width + 1, (rows - 3,), generator=generator).tolist()]
    mask = length_mask(lengths, width)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    advantages[-1] = 0.0
    logps = -3.0 * uniform()
    ids = torch.randint(0, 2, (rows, width), generator=generator)
    conflicts = naive_conflict_mask(unpad(ids, mask), advantages.tolist(), 4)
    return Batch(
        mask=mask,
        advantages=advantages,
        logps=logps,
        old_logps=logps + 4.0 * (uniform() - 0.5),  # ratios up to e^2, far outside 1 +- 0.2
        ref_logps=logps + 2.0 * (uniform() - 0.5),
        token_entropy=0.4 + 0.2 * uniform() + 0.8 * (torch.arange(rows) % 3 == 1)[:, None],
        weights=pad(naive_conflict_weights(conflicts, advantages.tolist()), width, 1.0, torch.float64),
    )


def run(loss_function: Callable, logps: Tensor, *arguments: Any, **options: Any) -> Found:
    """Loss, gradient with respect to the log-probabilities, metrics."""
    leaf = logps.detach().clone().requires_grad_()
    loss, metrics = loss_function(leaf, *arguments, **options)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert not any(value.requires_grad for value in metrics.values())
    return loss.detach(), gradient, metrics


def run_gtpo(batch: Batch, **options: Any) -> Found:
    entropy = completion_entropy(batch.token_entropy, batch.mask)
    keep = entropy_filter(entropy, batch.advantages, initial_entropy=0.3)
    return run(gtpo_loss, batch.logps, entropy, batch.mask, batch.advantages, batch.weights, keep, **options)


def run_grpo(batch: Batch, beta: float = 0.04, **options: Any) -> Found:
    options["ref_per_token_logps"] = batch.ref_logps if beta else None
    return run(grpo_loss, batch.logps, batch.mask, batch.advantages, beta=beta, **options)


def loss_options(
    batch: Batch, loss_type: str = "grpo", old: bool = False, corrected: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a loss and of its naive reference; w_i by the definitions of the papers."""
    lengths = batch.mask.sum(1).tolist()
    rows = len(batch.mask)
    count = {"grpo": None, "dr_grpo": 20 * rows}.get(loss_type, sum(lengths))  # T_max = 20; all tokens
    importance = None
    if corrected is not None:  # (B, T) with garbage in the padding, or (B, 1); one per token for the reference
        importance = (1.5 + batch.logps / 4).masked_fill(batch.mask == 0, math.nan)
        importance = importance if corrected == "token" else importance[:, :1].nan_to_num(nan=0.5)
    ours = {"loss_type": loss_type, "normalizer": count, "importance_weights": importance}
    ours["old_per_token_logps"] = batch.old_logps if old else None
    lists = {
        "token_weights": naive_token_weights(lengths, loss_type, 20),
        "old_logps": batch.lists("old_logps") if old else None,
    }
    lists["importance"] = None if importance is None else unpad(importance.expand_as(batch.logps), batch.mask)
    return ours, lists


def expected_gtpo(batch: Batch, gamma: float = 0.1, **lists: Any) -> tuple[float, list[list[float]], dict[str, float]]:
    """The naive reference with every term of Eq. 11."""
    token_entropy = batch.lists("token_entropy")
    entropies = naive_completion_entropy(token_entropy)
    advantages = batch.advantages.tolist()
    delta = naive_entropy_filter(entropies, advantages, 0.3, LN2, "auto")
    terms = {"weights": batch.lists("weights"), "token_entropy": token_entropy, "gamma": gamma, "delta": delta}
    loss, gradient = naive_gtpo_loss(batch.lists("logps"), advantages, **terms, **lists)
    rows = len(delta)
    return loss, gradient, {"entropy": math.fsum(entropies) / rows, "filtered_fraction": delta.count(0.0) / rows}


def expected_grpo(batch: Batch, beta: float = 0.04, **lists: Any) -> tuple[float, list[list[float]], dict[str, float]]:
    lists["ref_logps"] = batch.lists("ref_logps")
    loss, gradient, kl = naive_grpo_loss(batch.lists("logps"), batch.advantages.tolist(), beta=beta, **lists)
    return loss, gradient, {"kl": kl} if beta else {}


def assert_loss(actual: Found, expected: tuple, atol: float = ATOL64, rtol: float = 0.0) -> None:
    """Value, gradient and metrics of a naive reference; the gradient of the padding is zero."""
    loss, gradient, metrics = actual
    assert loss.shape == ()
    assert abs(loss.item() - expected[0]) <= atol
    wanted = pad(expected[1], gradient.shape[1], 0.0, torch.float64)
    torch.testing.assert_close(gradient.double(), wanted, atol=atol, rtol=rtol)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected[2], abs=atol)


# --- the references against values computed by hand ------------------------------------------------------------------


def test_references_reproduce_gtpo_computed_by_hand() -> None:
    # Two completions, A = +1 and -1, of 2 and 4 tokens; the first token of both is a conflict; <H> = 0.5 and 2.
    #   row 1: delta 1, A - 0.1 * 0.5 = 0.95, over 2 tokens, lambda 2 1:     0.475 * (2 + 1) = 1.425
    #   row 2: delta 1, A - 0.1 * 2 = -1.2, over 4 tokens, lambda 0 1 1 1:   -0.3 * 3 = -0.9
    #   J = (1.425 - 0.9) / 2 = 0.2625
    logps = [[-0.1, -0.2], [-0.3, -0.4, -0.5, -0.6]]
    weights = [[2.0, 1.0], [0.0, 1.0, 1.0, 1.0]]
    entropy = [[0.25, 0.75], [2.0] * 4]
    arguments: dict[str, Any] = {"weights": weights, "token_entropy": entropy, "gamma": 0.1}
    loss, gradient = naive_gtpo_loss(logps, [1.0, -1.0], **arguments, delta=[1.0, 1.0])
    assert loss == pytest.approx(-0.2625, abs=1e-15)
    assert gradient[0] == pytest.approx([-0.475, -0.2375], abs=1e-15)
    assert gradient[1] == pytest.approx([0.0, 0.15, 0.15, 0.15], abs=1e-15)

    # The filter drops row 2 (2 > ln 2), but G is still 2: J = 1.425 / 2.
    loss, gradient = naive_gtpo_loss(logps, [1.0, -1.0], **arguments, delta=[1.0, 0.0])
    assert loss == pytest.approx(-0.7125, abs=1e-15)
    assert gradient[1] == [0.0] * 4

    # Row 1's first token is twice as likely as when it was sampled: r = 2, so J gains 0.475 * 2 / 2.
    old = [[-0.1 - LN2, -0.2], [-0.3, -0.4, -0.5, -0.6]]
    loss, gradient = naive_gtpo_loss(logps, [1.0, -1.0], **arguments, delta=[1.0, 0.0], old_logps=old)
    assert loss == pytest.approx(-0.7125 - 0.475, abs=1e-15)
    assert gradient[0] == pytest.approx([-0.95, -0.2375], abs=1e-15)


def test_references_reproduce_grpo_computed_by_hand() -> None:
    # A = 1, two tokens, r = 2 (clipped at 1.2, no gradient) and 1: C = 1.1.
    # A = -1, one token, r = 2: min(-2, -1.2) = -2 with gradient. J = (1.1 - 2) / 2 = -0.45
    logps = [[0.0, -1.0], [-1.0]]
    old = [[-LN2, -1.0], [-1.0 - LN2]]
    loss, gradient, _ = naive_grpo_loss(logps, [1.0, -1.0], old_logps=old)
    assert loss == pytest.approx(0.45, abs=1e-15)
    assert gradient[0] == pytest.approx([0.0, -0.25], abs=1e-15)
    assert gradient[1] == pytest.approx([1.0], abs=1e-15)

    # k3 with ref / pi = 2 is 2 - ln 2 - 1, its slope in logp is 1 - 2; with ref = pi both are 0. KL is the token mean.
    ref = [[LN2, -1.0], [-1.0]]
    loss_kl, gradient_kl, kl = naive_grpo_loss(logps, [1.0, -1.0], old_logps=old, ref_logps=ref, beta=0.4)
    assert kl == pytest.approx((1 - LN2) / 3, abs=1e-15)
    assert loss_kl == pytest.approx(0.45 + 0.4 * (1 - LN2) / 4, abs=1e-15)  # over 2 tokens, then over 2 rows
    assert gradient_kl[0] == pytest.approx([-0.1, -0.25], abs=1e-15)


# --- losses ----------------------------------------------------------------------------------------------------------


IS_OLD = pytest.mark.parametrize("old", [False, True], ids=["on-policy", "old logps"])
IS_CORRECTED = pytest.mark.parametrize("corrected", [None, "token", "sequence"])
BOTH = pytest.mark.parametrize(
    ("loss_of", "expected_of"), [(run_gtpo, expected_gtpo), (run_grpo, expected_grpo)], ids=["gtpo", "grpo"]
)


@pytest.mark.parametrize("gamma", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@IS_OLD
@IS_CORRECTED
def test_gtpo_value_and_gradient_equal_the_naive_reference(
    gamma: float, loss_type: str, old: bool, corrected: str | None
) -> None:
    batch = random_batch()
    options, lists = loss_options(batch, loss_type, old, corrected)
    actual = run_gtpo(batch, gamma=gamma, **options)
    assert actual[0].dtype == torch.float64
    assert_loss(actual, expected_gtpo(batch, gamma, **lists))


@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.1, 0.28)])
@pytest.mark.parametrize("beta", [0.0, 0.04, 1.0])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@IS_OLD
@IS_CORRECTED
def test_grpo_value_and_gradient_equal_the_naive_reference(
    low: float, high: float, beta: float, loss_type: str, old: bool, corrected: str | None
) -> None:
    batch = random_batch()
    options, lists = loss_options(batch, loss_type, old, corrected)
    bounds = {"epsilon_low": low, "epsilon_high": high}
    assert_loss(run_grpo(batch, beta, **options, **bounds), expected_grpo(batch, beta, **lists, **bounds))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@BOTH
@IS_OLD
def test_half_precision_is_computed_in_float32(
    dtype: torch.dtype, loss_of: Callable, expected_of: Callable, old: bool
) -> None:
    """The error is that of rounding the gradient to the dtype of the inputs, in which the sums would be 1e-2 off."""
    batch = random_batch(seed=2, width=40)
    narrow = {name: getattr(batch, name).to(dtype) for name in PER_TOKEN}
    batch = replace(batch, advantages=batch.advantages.float(), weights=batch.weights.float(), **narrow)
    options, lists = loss_options(batch, old=old)
    actual = loss_of(batch, **options)
    assert actual[1].dtype == dtype
    assert {value.dtype for value in (actual[0], *actual[2].values())} == {torch.float32}
    assert_loss(actual, expected_of(batch, **lists), atol=ROUNDING, rtol=torch.finfo(dtype).eps)  # observed 3e-8


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@BOTH
@IS_OLD
def test_garbage_in_the_padding_changes_nothing(
    garbage: float, loss_of: Callable, expected_of: Callable, old: bool
) -> None:
    batch = random_batch(seed=6)
    for name in (*PER_TOKEN, "weights"):
        getattr(batch, name).masked_fill_(batch.mask == 0, garbage)
    options, lists = loss_options(batch, old=old)
    assert_loss(loss_of(batch, **options), expected_of(batch, **lists))


@pytest.mark.parametrize(("name", "loss_of"), [("logps", run_gtpo), ("token_entropy", run_gtpo), ("logps", run_grpo)])
def test_nan_in_a_real_token_is_propagated(name: str, loss_of: Callable) -> None:
    """A run stops on a NaN loss; a loss that ignored the token would continue training."""
    batch = random_batch(seed=6)
    getattr(batch, name)[2, 0] = math.nan  # row 2 has the full width and passes the filter
    assert loss_of(batch)[0].isnan()


def test_no_gradient_flows_into_the_entropy() -> None:
    """It comes from the same logits; only the path through logp has a gradient (Eq. 28, 30)."""
    batch = random_batch()
    logps = batch.logps.requires_grad_()
    entropy = torch.ones(12, requires_grad=True)
    loss, _ = gtpo_loss(logps, entropy, batch.mask, batch.advantages, batch.weights, torch.ones(12))
    loss.backward()
    assert logps.grad is not None and entropy.grad is None


@pytest.mark.parametrize("seed", range(5))
@IS_OLD
def test_the_correction_adds_supervised_training_on_the_conflict_tokens(seed: int, old: bool) -> None:
    """Eq. 8 is J of GRPO + 1/G sum_i |A_i| / |o_i| sum over conflict tokens r_it."""
    batch = random_batch(seed)
    options, _ = loss_options(batch, old=old)
    ones = torch.ones(12)
    arguments = (ones, batch.mask, batch.advantages, batch.weights, ones)
    corrected, gradient, _ = run(gtpo_loss, batch.logps, *arguments, gamma=0.0, **options)
    grpo, grpo_gradient, _ = run_grpo(batch, beta=0.0, epsilon_low=1e9, epsilon_high=1e9, **options)
    ratio = (batch.logps - batch.old_logps).exp() if old else torch.ones_like(batch.logps)
    share = batch.advantages.abs() / batch.mask.sum(1).clamp(min=1) / 12
    added = (batch.weights != 1) * ratio * share[:, None]  # r' = r
    assert added.any()
    torch.testing.assert_close(grpo - corrected, added.sum(), atol=ATOL64, rtol=0)
    torch.testing.assert_close(grpo_gradient - gradient, added, atol=ATOL64, rtol=0)


def push(lengths: list[int], rewards: list[float], entropy: list[float], keep: list[float], gamma: float) -> Any:
    """A_i, and GTPO's push on a first token that all completions share: the sum of dJ / d ln pi over the rows."""
    rewards_64 = torch.tensor(rewards, dtype=torch.float64)
    advantages = (rewards_64 - rewards_64.mean()) / (rewards_64.std() + 1e-4)
    advantages[rewards_64 == rewards_64.mean()] = 0.0
    mask = length_mask(lengths, max(lengths))
    shared = torch.zeros_like(mask, dtype=torch.bool)
    shared[:, 0] = True
    logps = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
    given = [torch.tensor(values, dtype=torch.float64) for values in (entropy, keep)]
    weights = conflict_weights(shared, advantages)
    loss, _ = gtpo_loss(logps, given[0], mask, advantages, weights, given[1], gamma=gamma)
    loss.backward()
    return advantages.tolist(), float(-logps.grad[:, 0].sum())


def test_one_rewarded_completion_does_not_push_a_shared_token_up() -> None:
    """The counterexample that docs/method.md links: 2 (0.996 - 0.01) / 64 + 2 (0.0067 - 0.06) / 2, over three rows."""
    advantages, found = push([64, 2, 30], [1, 0.505, 0], [0.1, 0.6, 0.1], [1, 1, 1], 0.1)
    by_hand = (2 * (advantages[0] - 0.01) / 64 + 2 * (advantages[1] - 0.06) / 2) / 3
    assert found == pytest.approx(by_hand, abs=ATOL64) and round(found, 4) == -0.0075
    assert push([64, 64, 2, 2], [1, 0.5, 0.5, 0], [0.1, 0.1, 1.0, 0.1], [1, 1, 1, 1], 0.1)[1] < 0  # rows with A = 0
    assert push([64, 64, 2, 2], [1, 0.5, 0.5, 0], [0.1, 0.1, 1.0, 0.1], [1, 0, 0, 1], 0.1)[1] > 0  # filtered


def test_every_rewarded_completion_pushes_a_shared_token_up() -> None:
    """Where each kept one has A_i > gamma <H>_i and none has A_i = 0."""
    held = 0
    for seed in range(300):
        draw = random.Random(seed)
        rewards = [draw.choice([0.0, 0.5, 1.0, draw.random()]) for _ in range(6)]
        keep = [float(draw.random() < 0.8) for _ in rewards]
        entropy = [3 * draw.random() for _ in rewards]
        gamma = draw.choice([0.0, 0.1, 0.5])
        advantages, found = push([draw.randrange(1, 60) for _ in rewards], rewards, entropy, keep, gamma)
        kept = [(a, gamma * h) for a, h, is_kept in zip(advantages, entropy, keep, strict=True) if is_kept and a >= 0]
        if kept and all(a > bound and a > 0 for a, bound in kept):
            held += 1
            assert found > 0, seed
    assert held > 100


# --- input that is refused -------------------------------------------------------------------------------------------


ROWS = torch.ones(4)
TOKENS = torch.ones(4, 3)
GOOD = {
    conflict_mask: (TOKENS.long(), TOKENS, ROWS, 2),
    conflict_weights: (TOKENS.bool(), ROWS),
    completion_entropy: (TOKENS, TOKENS),
    entropy_filter: (ROWS, ROWS, 0.5),
    gtpo_loss: (TOKENS, ROWS, TOKENS, ROWS, TOKENS, ROWS),
    grpo_loss: (TOKENS, TOKENS, ROWS),
}


@pytest.mark.parametrize("function", GOOD)
def test_mismatched_shapes_are_refused(function: Callable) -> None:
    tensors = [i for i, value in enumerate(GOOD[function]) if isinstance(value, Tensor)]
    function(*GOOD[function])
    for place in tensors:
        value = GOOD[function][place]
        narrow = [value[:, :1]] if value.ndim == 2 and function is not conflict_weights else []  # of any width
        for bad in (value[:2], value[:1], value[:0], value[..., None], *narrow):
            with pytest.raises(ValueError):
                function(*GOOD[function][:place], bad, *GOOD[function][place + 1 :])


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (conflict_mask, {"span": "longest"}),
        (entropy_filter, {"mode": "always"}),
        (entropy_filter, {"initial_entropy": None}),
        (gtpo_loss, {"old_per_token_logps": TOKENS[:2]}),
        (grpo_loss, {"old_per_token_logps": TOKENS[:2]}),
        (grpo_loss, {"ref_per_token_logps": TOKENS[:, :1], "beta": 0.04}),
        (grpo_loss, {"beta": 0.04}),
        (grpo_loss, {"loss_type": "cispo", "normalizer": 25}),
        *((grpo_loss, {"loss_type": loss_type}) for loss_type in LOSS_TYPES[1:]),
        (grpo_loss, {"importance_weights": ROWS}),
    ],
)
def test_options_that_cannot_be_used_are_refused(function: Callable, options: dict[str, Any]) -> None:
    arguments = GOOD[function][:2] if "initial_entropy" in options else GOOD[function]
    with pytest.raises(ValueError):
        function(*arguments, **options)


def test_tokens_that_touch_a_tag() -> None:
    """A tag of several tokens, one that shares a token with text, one cut off, two in a row; an id without a piece."""
    rows = [
        ["<", "rea", ">", "x", "</rea", ">y", "<re"],
        ["a<rea>b", None, "<rea>", "z"],
        [],
    ]
    expected = [[1, 1, 1, 0, 1, 1, 0, 0], [1, 0, 1, 0, 0, 0, 0, 0], [0] * 8]
    assert tag_mask(rows, ("<rea>", "</rea>"), 8).int().tolist() == expected
