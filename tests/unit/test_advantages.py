"""Advantage estimators against closed forms and plain loops."""

from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.rl.advantages import gae, group_relative, leave_one_out, terminal_rewards, whiten
from tests.helpers.tolerances import EXACT, SUM_ORDER, assert_close, assert_sum_close

F64 = torch.float64


def packed(prompts: Seq[int], masks: Seq[Seq[int]]) -> tuple[Tensor, Tensor]:
    """mask and sequence ids of sequences with so many prompt tokens and then this mask over the response."""
    rows = [
        Sequence([1] * (p + len(m)), mask=[False] * p + [bool(x) for x in m])
        for p, m in zip(prompts, masks, strict=True)
    ]
    batch = PackedBatch.pack(rows)
    return batch.mask, batch.sequence_ids


def gae_loop(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Equation 16 as the double sum it is: A_t = sum_l (gamma lam)^l delta_{t+l}."""
    following = [*values[1:], 0.0]
    delta = [r + gamma * v2 - v for r, v, v2 in zip(rewards, values, following, strict=True)]
    advantages = [
        sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(delta))
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (0.99, 0.0), (0.0, 0.5)])
def test_gae_equals_the_double_sum(gamma: float, lam: float) -> None:
    mask, owner = packed([3, 1, 2, 4], [[1, 1, 1, 1], [1], [], [1, 0, 0, 1, 1]])
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(len(mask), generator=generator, dtype=F64) * mask
    values = torch.randn(len(mask), generator=generator, dtype=F64)
    advantages, returns = gae(rewards, values, mask, owner, gamma=gamma, lam=lam)
    expected, expected_returns = (
        torch.zeros(len(mask), dtype=F64),
        torch.zeros(len(mask), dtype=F64),
    )
    for sequence in range(4):
        where = ((owner == sequence) & mask).nonzero().flatten()
        if not len(where):
            continue
        a, r = gae_loop(rewards[where].tolist(), values[where].tolist(), gamma, lam)
        expected[where], expected_returns[where] = (
            torch.tensor(a, dtype=F64),
            torch.tensor(r, dtype=F64),
        )
    assert_close(advantages, expected, SUM_ORDER)
    assert_close(returns, expected_returns, SUM_ORDER)
    assert float(advantages[~mask].abs().max()) == EXACT


def test_gae_with_lam_and_gamma_one_is_return_minus_value() -> None:
    mask, owner = packed([2, 1], [[1, 1, 1], [1, 1]])
    rewards = terminal_rewards(torch.tensor([1.0, -2.0], dtype=F64), mask, owner)
    values = torch.arange(len(mask), dtype=F64)
    advantages, returns = gae(rewards, values, mask, owner)
    assert returns[mask].tolist() == [1.0, 1.0, 1.0, -2.0, -2.0]
    terms = (returns[mask], values[mask])
    assert_sum_close(advantages[mask], terms[0] - terms[1], terms, SUM_ORDER)


def test_a_better_outcome_has_the_larger_advantage_at_the_predicting_position() -> None:
    """Sign and shift: the value before the first response token sits on the last prompt token."""
    mask, owner = packed([2], [[1, 1]])
    assert mask.tolist() == [False, True, True, False]
    values = torch.tensor([9.0, 0.25, 0.5, 9.0])
    good, _ = gae(terminal_rewards(torch.tensor([1.0]), mask, owner), values, mask, owner)
    bad, _ = gae(terminal_rewards(torch.tensor([0.0]), mask, owner), values, mask, owner)
    assert good.tolist() == [0.0, 0.75, 0.5, 0.0]
    assert bad.tolist() == [0.0, -0.25, -0.5, 0.0]


def test_values_outside_the_mask_never_matter() -> None:
    mask, owner = packed([2, 2], [[1, 1], [1, 1, 1]])
    rewards = terminal_rewards(torch.tensor([1.0, 2.0]), mask, owner)
    values = torch.where(mask, torch.ones(len(mask)), torch.nan)
    advantages, returns = gae(rewards, values, mask, owner, gamma=0.9, lam=0.9)
    assert bool(advantages.isfinite().all() and returns.isfinite().all())


def test_no_sequence_and_no_response_are_fine() -> None:
    empty = torch.zeros(0)
    advantages, returns = gae(empty, empty, empty.bool(), empty.long())
    assert len(advantages) == len(returns) == 0
    mask, owner = packed([3], [[]])
    advantages, _ = gae(torch.zeros(3), torch.ones(3), mask, owner)
    assert advantages.tolist() == [0.0, 0.0, 0.0]


def test_terminal_rewards_lie_on_the_last_response_token() -> None:
    mask, owner = packed([1, 2, 1], [[1, 1, 0], [], [1]])
    rewards = terminal_rewards(torch.tensor([3.0, 5.0, 7.0]), mask, owner)
    assert rewards.tolist() == [0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 7.0, 0.0]


REWARDS = torch.tensor([1.0, 0.1, 0.0, 0.1, 4.0, 0.1, 2.5], dtype=F64)
GROUPS = torch.tensor([7, 3, 7, 3, 7, 3, 11])


def test_group_relative_equals_the_formula_group_by_group() -> None:
    eps = 1e-3
    actual = group_relative(REWARDS, GROUPS, eps=eps)
    plain = group_relative(REWARDS, GROUPS, divide_by_std=False)
    members = REWARDS[GROUPS == 7]
    mean = members.mean()
    scale = members.std() + eps
    terms = (members / scale, mean / scale + 0 * members)
    assert_sum_close(actual[GROUPS == 7], (members - mean) / scale, terms, SUM_ORDER)
    assert_sum_close(plain[GROUPS == 7], members - mean, (members, mean + 0 * members), SUM_ORDER)
    assert actual[GROUPS != 7].tolist() == plain[GROUPS != 7].tolist() == [0.0] * 4
    assert int(actual.argmax()) == 4, "the best response has the largest advantage"


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-8, -7.7])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    rewards, groups = torch.full((size,), reward), torch.zeros(size, dtype=torch.int64)
    for result in (
        group_relative(rewards, groups),
        group_relative(rewards, groups, divide_by_std=False),
        leave_one_out(rewards, groups),
    ):
        assert result.tolist() == [0.0] * size


def test_leave_one_out_equals_the_mean_of_the_others() -> None:
    actual = leave_one_out(REWARDS, GROUPS)
    for i in range(len(REWARDS)):
        others = [
            float(REWARDS[j]) for j in range(len(REWARDS)) if j != i and GROUPS[j] == GROUPS[i]
        ]
        if GROUPS[i] != 7:  # of one, or of equal rewards
            assert float(actual[i]) == EXACT
            continue
        terms = (REWARDS[i], -torch.tensor(others, dtype=F64).mean())
        assert_sum_close(actual[i], terms[0] + terms[1], terms, SUM_ORDER)


def test_dropping_a_sample_or_permuting_changes_only_its_group() -> None:
    kept = torch.tensor([0, 1, 3, 4, 5, 6])
    order = torch.tensor([6, 2, 0, 5, 1, 4, 3])
    for estimate in (group_relative, leave_one_out):
        full = estimate(REWARDS, GROUPS)
        assert_close(estimate(REWARDS[order], GROUPS[order]), full[order], SUM_ORDER)
        less = estimate(REWARDS[kept], GROUPS[kept])
        assert_close(less[GROUPS[kept] != 7], full[kept][GROUPS[kept] != 7], SUM_ORDER)
        assert not torch.allclose(less[:1], full[:1]), "group 7 lost a member"


def test_a_wrong_group_is_seen() -> None:
    wrong = GROUPS.clone()
    wrong[0] = 3
    assert not torch.allclose(group_relative(REWARDS, wrong), group_relative(REWARDS, GROUPS))


def test_whiten_masked_entries() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, generator=generator, dtype=F64) * 3 + 5
    mask = torch.rand(50, generator=generator) < 0.6
    white = whiten(x, mask, eps=0.0)
    assert_close(white[mask], (x[mask] - x[mask].mean()) / x[mask].std(), SUM_ORDER)
    assert white[~mask].abs().sum() == EXACT
    assert whiten(x, torch.zeros_like(mask)).abs().sum() == EXACT
    one = torch.zeros_like(mask)
    one[3] = True
    assert whiten(x, one).abs().sum() == EXACT


def test_types_are_kept_or_widened() -> None:
    groups = torch.zeros(2, dtype=torch.int64)
    for given, expected in [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (F64, F64),
    ]:
        rewards = torch.tensor([0.0, 1.0], dtype=given)
        assert (
            group_relative(rewards, groups).dtype
            == leave_one_out(rewards, groups).dtype
            == expected
        )
        assert whiten(rewards, torch.tensor([True, True])).dtype == expected
