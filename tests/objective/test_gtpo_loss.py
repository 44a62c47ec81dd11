"""The objectives of GTPO and GRPO against naive references, hand-drawn groups, and identities of the paper.

All tests run on a CPU with small tensors. The references are in reference.py and share no code with gtpo_loss.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from helpers.files import tables_of
from helpers.objective import composed_gtpo_loss
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
    plain_gtpo_loss,
    unpad,
)
from hypothesis import given, settings
from torch import Tensor

from gtpo_loss import (
    LOSS_TYPES,
    completion_entropy,
    conflict_mask,
    conflict_weights,
    entropy_filter,
    grpo_loss,
    gtpo_loss,
    rewards_at_mean,
)

ATOL64 = 1e-12  # float64, values and gradients of order 1; observed error 3e-16
ROUNDING = 1e-6  # float32 and bfloat16: allowed on top of the plain computation's error

many = settings(max_examples=300)

TABLES = tables_of(__file__)
DRAWN: dict[str, dict[str, str]] = TABLES["groups"]


# --- groups: drawn by hand, or by hypothesis -------------------------------------------------------------------------


@dataclass
class Groups:
    """Completions as lists and as padded tensors."""

    completions: list[list[int]]
    advantages: list[float]
    group_size: int
    pad_token: int = 0
    extra: int = 0  # columns of padding after the longest completion

    @property
    def lengths(self) -> list[int]:
        return [len(completion) for completion in self.completions]

    @property
    def width(self) -> int:
        return max(self.lengths, default=0) + self.extra

    @property
    def ids(self) -> Tensor:
        return pad(self.completions, self.width, self.pad_token, torch.int64)

    @property
    def mask(self) -> Tensor:
        return length_mask(self.lengths, self.width)

    @property
    def scores(self) -> Tensor:
        return torch.tensor(self.advantages)

    def conflict_mask(self, span: str = "anchored") -> Tensor:
        return conflict_mask(self.ids, self.mask, self.scores, self.group_size, span)

    def expected_rows(self, span: str) -> list[list[bool]]:
        return naive_conflict_mask(self.completions, self.advantages, self.group_size, span)

    def expected_mask(self, span: str = "anchored") -> Tensor:
        return pad(self.expected_rows(span), self.width, False, torch.bool)

    def expected_weights(self, span: str = "anchored") -> Tensor:
        rows = naive_conflict_weights(self.expected_rows(span), self.advantages)
        return pad(rows, self.width, 1.0, torch.float32)


def drawn(table: str, pad_token: str) -> tuple[Groups, Tensor, Tensor]:
    """A group of test_gtpo_loss.yaml with three columns of padding, its mask and its weights."""
    advantages = []
    completions = []
    masks = []
    weights = []
    for row in table.splitlines():
        advantage, tokens, mask, weight = (cell.split() for cell in row.split("|"))
        assert len(tokens) == len(mask) == len(weight), row
        advantages.append(float(advantage[0]))
        completions.append([ord(token) for token in tokens])
        masks.append([cell == "#" for cell in mask])
        weights.append([float(cell) for cell in weight])
    groups = Groups(completions, advantages, len(masks), ord(pad_token), extra=3)
    return groups, pad(masks, groups.width, False, torch.bool), pad(weights, groups.width, 1.0, torch.float32)


@st.composite
def random_groups(draw: st.DrawFn, advantages: tuple[float, ...] = (-1.5, -0.5, 0.0, 0.5, 1.5)) -> Groups:
    """Up to three groups over one to four tokens, so that conflicts occur; half of the rows are near-copies."""
    group_size = draw(st.integers(1, 5))
    token = st.integers(0, draw(st.integers(0, 3)))
    completions = []
    for _ in range(draw(st.integers(1, 3))):
        base = draw(st.lists(token, max_size=8))
        for _ in range(group_size):
            row = list(base)
            kind = draw(st.sampled_from(["copy", "cut", "insert", "change", "other", "other"]))
            position = draw(st.integers(0, len(base)))
            if kind == "cut":
                del row[position : position + 2]
            elif kind == "insert":
                row[position:position] = draw(st.lists(token, min_size=1, max_size=4))
            elif kind == "change" and row:
                row[position % len(row)] = draw(token)
            elif kind == "other":
                row = draw(st.lists(token, max_size=8))
            completions.append(row)
    scores = draw(st.lists(st.sampled_from(advantages), min_size=len(completions), max_size=len(completions)))
    return Groups(completions, scores, group_size, pad_token=draw(token), extra=draw(st.integers(0, 2)))


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Exactly equal: no tolerance for masks and weights."""
    assert actual.shape == expected.shape
    assert actual.tolist() == expected.tolist()


# --- conflict mask: hand-drawn groups --------------------------------------------------------------------------------


@pytest.mark.parametrize("pad_token", "_abE")  # padding that equals a real token makes no conflict
@pytest.mark.parametrize(("span", "title"), [(span, title) for span, groups in DRAWN.items() for title in groups])
def test_mask_and_weights_of_drawn_group(span: str, title: str, pad_token: str) -> None:
    groups, mask, weights = drawn(DRAWN[span][title], pad_token)
    assert_same(groups.expected_mask(span), mask)  # the reference itself agrees with the table
    assert_same(groups.expected_weights(span), weights)
    assert_same(groups.conflict_mask(span), mask)
    assert_same(conflict_weights(groups.conflict_mask(span), groups.scores), weights)


# --- conflict mask: properties ---------------------------------------------------------------------------------------


@many
@given(random_groups())
def test_mask_and_weights_equal_reference_on_random_groups(groups: Groups) -> None:
    mask = groups.conflict_mask()
    weights = conflict_weights(mask, groups.scores)
    assert mask.dtype == torch.bool and weights.is_floating_point()
    assert_same(mask, groups.expected_mask())
    assert_same(weights, groups.expected_weights())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_completion_mask_of_any_dtype_gives_the_same_mask(dtype: torch.dtype) -> None:
    groups, mask, _ = drawn("+1 | a b E | # . # | 2 1 2\n-1 | a E | # # | 0 0", "b")
    assert_same(conflict_mask(groups.ids, groups.mask.to(dtype), groups.scores, 2), mask)


# --- weights ---------------------------------------------------------------------------------------------------------


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


def test_a_large_offset_hides_no_difference_of_rewards() -> None:
    """In float32 the places after the point of 1e6 are sixteenths: 0.1 of twelve rewards is more than rounding."""
    for size in (4, 8, 12):
        rewards = torch.tensor([1e6 + 0.1 * i for i in range(size)])
        assert not rewards_at_mean(rewards, size).any()
    tenths = torch.tensor([3, 6, 9, 6, 1, 11, 6, 2, 10, 6, 5, 7])
    assert_same(rewards_at_mean(1e4 + tenths / 10, 12), tenths == 6)


def test_a_small_difference_is_no_rounding() -> None:
    """1.3e-5 from the mean, in a group whose rounding is 2e-6."""
    assert not rewards_at_mean(torch.tensor([0.0, 2.0, 1.00002]), 3).any()


def test_rewards_equal_but_for_rounding_are_at_the_mean() -> None:
    """Sums of the same rewards in another order: neighbours in float32."""
    for size in (0.6, 100.6, 1e6):
        reward = torch.tensor(size)
        neighbour = reward.nextafter(torch.tensor(math.inf))
        assert rewards_at_mean(torch.stack([reward, neighbour, reward]), 3).all()


# --- entropy ---------------------------------------------------------------------------------------------------------


def test_completion_entropy_is_the_mean_over_its_tokens() -> None:
    token_entropy = torch.tensor([[0.5, 1.5, 9.0], [3.0, 9.0, 9.0], [1.0, 2.0, 6.0], [9.0, 9.0, 9.0]])
    for dtype in (torch.bool, torch.int64, torch.float32):
        entropy = completion_entropy(token_entropy.requires_grad_(), length_mask([2, 1, 3, 0], 3).to(dtype))
        assert entropy.tolist() == [1.0, 3.0, 3.0, 0.0] and not entropy.requires_grad


def test_entropy_averages_bfloat16_in_float32() -> None:
    # 1,001 tokens of entropy 1: a bfloat16 length would be 1000, a bfloat16 sum would stall at 256.
    token_entropy = torch.ones(1, 1001, dtype=torch.bfloat16)
    actual = completion_entropy(token_entropy, torch.ones(1, 1001))
    assert actual.dtype == torch.float32 and actual.item() == 1.0


# --- filter ----------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("threshold", [0.5, 0.7, 1.05, 2.0])
@pytest.mark.parametrize("mode", ["auto", "on", "negative_only"])
def test_threshold_replaces_ln_2_for_the_completions_alone(mode: str, threshold: float) -> None:
    entropy = torch.tensor([threshold - 0.01, threshold, threshold + 0.01], dtype=torch.float64)
    advantages = torch.full((3,), -1.0)
    assert entropy_filter(entropy, advantages, 0.1, threshold, mode).tolist() == [1, 1, 0]
    # The model is prone to collapse if <H>_ini < ln 2, for any threshold on the completions; auto is the default.
    assert entropy_filter(entropy, advantages, 0.69, threshold).tolist() == [1, 1, 0]
    assert entropy_filter(entropy, advantages, 0.695, threshold).tolist() == [1, 1, 1]


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

    def to(self, dtype: torch.dtype) -> "Batch":
        """Per-token values in ``dtype``; advantages and weights in at least float32, as in the trainer."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        narrow_names = ("logps", "old_logps", "ref_logps", "token_entropy")
        narrow = {name: getattr(self, name).to(dtype) for name in narrow_names}
        return Batch(mask=self.mask, advantages=self.advantages.to(wide), weights=self.weights.to(wide), **narrow)

    def lists(self, name: str) -> list[list[float]]:
        return unpad(getattr(self, name), self.mask)


def random_batch(seed: int, *, groups: int = 3, group_size: int = 4, width: int = 11, empty: bool = True) -> Batch:
    """A float64 batch. One row has no token (unless ``empty`` is False), one has one, one has the full width.

    The entropy of half of the rows is well above ln 2, that of the others well below, so rounding does not matter.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    rows = groups * group_size
    lengths = torch.randint(1, width + 1, (rows,), generator=generator).tolist()
    lengths[:3] = [0 if empty else 2, 1, width]
    mask = length_mask(lengths, width)
    raw = torch.randn(groups, group_size, generator=generator, dtype=torch.float64)
    advantages = ((raw - raw.mean(1, keepdim=True)) / raw.std(1, keepdim=True)).flatten()
    advantages[-1] = 0.0
    logps = -3.0 * uniform(rows, width)
    high = torch.arange(rows).remainder(2)[:, None]
    ids = torch.randint(0, 2, (rows, width), generator=generator)
    naive = naive_conflict_mask(unpad(ids, mask), advantages.tolist(), group_size)
    return Batch(
        mask=mask,
        advantages=advantages,
        logps=logps,
        old_logps=logps + 4.0 * (uniform(rows, width) - 0.5),  # ratios up to e^2, far outside 1 +- 0.2
        ref_logps=logps + 2.0 * (uniform(rows, width) - 0.5),
        token_entropy=(0.4 + 0.2 * uniform(rows, width)) + 0.8 * high,
        weights=pad(naive_conflict_weights(naive, advantages.tolist()), width, 1.0, torch.float64),
    )


def run(
    loss_function: Callable, logps: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, gradient with respect to the log-probabilities, metrics."""
    leaf = logps.detach().clone().requires_grad_()
    loss, metrics = loss_function(leaf, *arguments, **options)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, metrics


def run_gtpo(batch: Batch, **options: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    weights = options.pop("weights", batch.weights)
    arguments = (batch.token_entropy, batch.mask, batch.advantages, weights)
    return run(composed_gtpo_loss, batch.logps, *arguments, **({"initial_entropy": 0.3} | options))


def run_grpo(batch: Batch, **options: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return run(grpo_loss, batch.logps, batch.mask, batch.advantages, **options)


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


def expected_gtpo(
    batch: Batch, *, mode: str = "auto", gamma: float | None = 0.1, initial: float = 0.3, **lists: Any
) -> tuple[float, list[list[float]]]:
    """The naive reference with every term of Eq. 11."""
    entropies = batch.lists("token_entropy")
    advantages = batch.advantages.tolist()
    delta = naive_entropy_filter(naive_completion_entropy(entropies), advantages, initial, LN2, mode)
    terms = {"weights": batch.lists("weights"), "token_entropy": entropies, "gamma": gamma, "delta": delta}
    return naive_gtpo_loss(batch.lists("logps"), advantages, **terms | lists)


def assert_loss(actual: tuple[Tensor, Tensor, dict], expected: tuple, atol: float = ATOL64) -> None:
    """Value and gradient against (loss, gradient rows) of a naive reference; the gradient of the padding is zero."""
    loss, gradient, _ = actual
    assert loss.shape == ()
    assert abs(loss.item() - expected[0]) <= atol
    torch.testing.assert_close(gradient, pad(expected[1], gradient.shape[1], 0.0, gradient.dtype), atol=atol, rtol=0)


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


# --- GTPO loss -------------------------------------------------------------------------------------------------------


IS_OLD = pytest.mark.parametrize("old", [False, True], ids=["on-policy", "old logps"])
IS_CORRECTED = pytest.mark.parametrize("corrected", [None, "token", "sequence"])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@IS_OLD
@IS_CORRECTED
def test_gtpo_value_and_gradient_equal_the_naive_reference(
    seed: int, loss_type: str, old: bool, corrected: str | None
) -> None:
    batch = random_batch(seed)
    options, lists = loss_options(batch, loss_type, old, corrected)
    actual = run_gtpo(batch, **options)
    assert actual[0].dtype == torch.float64
    assert_loss(actual, expected_gtpo(batch, **lists))


@pytest.mark.parametrize("mode", ["auto", "on", "off", "negative_only"])
@pytest.mark.parametrize("initial", [0.3, 0.9])
@pytest.mark.parametrize("gamma", [0.0, 1e-6, 0.01, 1.0])
def test_gtpo_uses_mode_initial_entropy_and_gamma(mode: str, initial: float, gamma: float) -> None:
    batch = random_batch(seed=1)
    actual = run_gtpo(batch, initial_entropy=initial, filter_mode=mode, gamma=gamma)
    assert_loss(actual, expected_gtpo(batch, mode=mode, initial=initial, gamma=gamma))
    entropies = naive_completion_entropy(batch.lists("token_entropy"))
    delta = naive_entropy_filter(entropies, batch.advantages.tolist(), initial, LN2, mode)
    assert actual[2]["entropy"].item() == pytest.approx(math.fsum(entropies) / len(entropies))
    assert actual[2]["filtered_fraction"].item() == pytest.approx(delta.count(0.0) / len(delta))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gtpo", "grpo"])
@IS_OLD
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, name: str, old: bool) -> None:
    """The error is that of rounding the gradient to the dtype of the inputs, in which the sums would be 1e-2 off."""
    batch = random_batch(seed=2, width=40).to(dtype)
    options, lists = loss_options(batch, old=old)
    if name == "gtpo":
        loss, gradient, metrics = run_gtpo(batch, **options)
        expected = expected_gtpo(batch, **lists)
    else:
        loss, gradient, metrics = run_grpo(batch, beta=0.04, ref_per_token_logps=batch.ref_logps, **options)
        lists["ref_logps"] = batch.lists("ref_logps")
        expected = naive_grpo_loss(batch.lists("logps"), batch.advantages.tolist(), beta=0.04, **lists)[:2]
    assert loss.dtype == torch.float32 and gradient.dtype == dtype
    assert all(value.dtype == torch.float32 for value in metrics.values())
    assert abs(loss.item() - expected[0]) < ROUNDING  # observed 3e-8
    wanted = pad(expected[1], gradient.shape[1], 0.0, torch.float64)
    torch.testing.assert_close(gradient.double(), wanted, rtol=torch.finfo(dtype).eps, atol=ROUNDING)


def test_the_plain_formula_equals_the_naive_reference() -> None:
    batch = random_batch(seed=0)
    leaf = batch.logps.clone().requires_grad_()
    delta = torch.ones(len(batch.mask))
    arguments = (batch.token_entropy, batch.mask, batch.advantages, batch.weights, delta, 0.1, batch.old_logps)
    plain = plain_gtpo_loss(leaf, *arguments)
    (gradient,) = torch.autograd.grad(plain, leaf)
    assert_loss((plain.detach(), gradient, {}), expected_gtpo(batch, mode="off", old_logps=batch.lists("old_logps")))


def test_empty_completions_have_zero_loss_and_gradient() -> None:
    logps = torch.full((2, 3), -1.0)
    weights = torch.ones(2, 3)
    empty_mask = torch.zeros(2, 3)
    loss, gradient, metrics = run(
        composed_gtpo_loss, logps, weights, empty_mask, torch.tensor([1.0, -1.0]), weights, initial_entropy=0.3
    )
    assert loss.item() == 0.0 and not gradient.any()
    assert metrics["entropy"].item() == 0.0 and metrics["filtered_fraction"].item() == 0.0
    loss, gradient, _ = run(grpo_loss, logps, empty_mask, torch.tensor([1.0, -1.0]))
    assert loss.item() == 0.0 and not gradient.any()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["gtpo", "grpo"])
@IS_OLD
def test_garbage_in_the_padding_changes_neither_loss_nor_gradient(garbage: float, name: str, old: bool) -> None:
    batch = random_batch(seed=6)

    def compute() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        options = {"old_per_token_logps": batch.old_logps if old else None}
        if name == "gtpo":
            return run_gtpo(batch, **options)
        return run_grpo(batch, beta=0.04, ref_per_token_logps=batch.ref_logps, **options)

    loss, gradient, metrics = compute()
    for tensor in ("logps", "old_logps", "ref_logps", "token_entropy", "weights"):
        setattr(batch, tensor, torch.where(batch.mask.bool(), getattr(batch, tensor), garbage))
    found = compute()
    assert (found[0].item(), found[1].tolist()) == (loss.item(), gradient.tolist())
    assert {key: value.item() for key, value in found[2].items()} == {k: v.item() for k, v in metrics.items()}


def test_nan_in_a_real_token_is_propagated() -> None:
    # A run stops on a NaN loss; a loss that ignored the token would continue training.
    for name in ("logps", "token_entropy"):
        batch = random_batch(seed=6)
        getattr(batch, name)[2, 0] = math.nan  # row 2 has the full width and passes the filter
        assert math.isnan(run_gtpo(batch)[0].item())
        if name == "logps":
            assert math.isnan(run_grpo(batch)[0].item())


def test_entropy_scales_the_gradient_and_has_none() -> None:
    # Entropy and log-probability come from the same logits; only the path through logp has a gradient (Eq. 28, 30).
    logits = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = length_mask([5, 3, 1], 5)
    advantages = torch.tensor([1.0, -0.7, -0.3], dtype=torch.float64)
    weights = torch.ones(3, 5, dtype=torch.float64)

    def gradient(detach: bool, loss_function: Callable) -> Tensor:
        leaf = logits.clone().requires_grad_()
        logp = torch.log_softmax(leaf, -1)
        entropy = -(logp.exp() * logp).sum(-1)
        loss = loss_function(logp[..., 0], entropy.detach() if detach else entropy)
        return torch.autograd.grad(loss, leaf)[0]

    def ours(logps: Tensor, entropy: Tensor) -> Tensor:
        return composed_gtpo_loss(
            logps, entropy, mask, advantages, weights, initial_entropy=None, filter_mode="off", gamma=2
        )[0]

    def of_means(logps: Tensor, entropy: Tensor) -> Tensor:
        return gtpo_loss(logps, entropy.mean(1), mask, advantages, weights, torch.ones(3), gamma=2)[0]

    for loss_function in (ours, of_means):
        torch.testing.assert_close(gradient(False, loss_function), gradient(True, loss_function), atol=ATOL64, rtol=0)


@pytest.mark.parametrize("old", [False, True], ids=["on-policy", "old logps"])
@pytest.mark.parametrize("seed", range(25))
def test_the_correction_adds_supervised_training_on_the_conflict_tokens(seed: int, old: bool) -> None:
    """Eq. 8 is J of GRPO + 1/G sum_i |A_i| / |o_i| sum over conflict tokens r_it: (lambda - 1) A_i = |A_i| on them."""
    batch = random_batch(seed, group_size=4 + seed % 4, empty=seed % 2 == 0)
    old_logps = batch.old_logps if old else None
    conflicts = (batch.weights != 1) & batch.mask.bool()
    factor = (batch.weights - 1) * batch.advantages[:, None]
    assert torch.equal(factor[conflicts], batch.advantages.abs()[:, None].expand_as(factor)[conflicts])
    corrected, gradient, _ = run_gtpo(batch, gamma=0.0, filter_mode="off", old_per_token_logps=old_logps)
    grpo, expected, _ = run_grpo(batch, epsilon_low=1e9, epsilon_high=1e9, old_per_token_logps=old_logps)
    expected = expected.clone()
    added = 0.0
    rows = len(batch.mask)
    for i, length in enumerate(batch.mask.sum(1).tolist()):
        for t in range(length):
            if conflicts[i, t]:
                ratio = math.exp(batch.logps[i, t] - batch.old_logps[i, t]) if old else 1.0
                term = abs(batch.advantages[i].item()) / length * ratio / rows
                added += term
                expected[i, t] -= term  # of the loss; r' = r
    assert added > 0
    assert -corrected.item() == pytest.approx(-grpo.item() + added, abs=ATOL64)
    torch.testing.assert_close(gradient, expected, atol=ATOL64, rtol=0)


# --- components disabled, and input that is refused ------------------------------------------------------------------


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


# --- GRPO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("beta", [0.0, 1e-6, 0.04, 1.0])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@IS_OLD
@IS_CORRECTED
def test_grpo_value_and_gradient_equal_the_naive_reference(
    seed: int, beta: float, loss_type: str, old: bool, corrected: str | None
) -> None:
    batch = random_batch(seed)
    options, lists = loss_options(batch, loss_type, old, corrected)
    lists["ref_logps"] = batch.lists("ref_logps")
    expected = naive_grpo_loss(batch.lists("logps"), batch.advantages.tolist(), beta=beta, **lists)
    actual = run_grpo(batch, beta=beta, ref_per_token_logps=batch.ref_logps if beta else None, **options)
    assert_loss(actual, expected)
    assert ("kl" in actual[2]) == (beta != 0) and all(not value.requires_grad for value in actual[2].values())
    if beta:
        assert actual[2]["kl"].item() == pytest.approx(expected[2], abs=ATOL64)


@pytest.mark.parametrize("low, high", [(0.2, 0.2), (0.05, 0.05), (0.1, 0.28), (0.28, 0.1)])
def test_grpo_clipping_matches_the_naive_reference(low: float, high: float) -> None:
    batch = random_batch(seed=16, width=40)
    arguments = (batch.lists("logps"), batch.advantages.tolist())
    old = batch.lists("old_logps")
    expected = naive_grpo_loss(*arguments, epsilon_low=low, epsilon_high=high, old_logps=old)
    unclipped = naive_grpo_loss(*arguments, epsilon_low=9.0, epsilon_high=9.0, old_logps=old)
    assert abs(expected[0] - unclipped[0]) > 1e-4  # the clipping is active
    actual = run_grpo(batch, epsilon_low=low, epsilon_high=high, old_per_token_logps=batch.old_logps)
    assert_loss(actual, expected)
