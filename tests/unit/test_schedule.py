"""Schedules carried out on paper: every plan is whole, never deadlocks, keeps few activations and wastes little time."""

import random
from collections.abc import Iterator, Sequence

import pytest

from dovetail.pipeline.schedule import Action, Costs, Kind, Plan, PlanError, make_plan, simulate
from tests.helpers.tolerances import SUM_ORDER

RANKS, VIRTUAL, MICROS = range(1, 9), range(1, 5), range(1, 33)


@pytest.fixture(
    params=[(*range(1, 10), 16, 17, 32), pytest.param(MICROS, marks=pytest.mark.soak)],
    ids=["few", "all"],
)
def micros(request: pytest.FixtureRequest) -> Sequence[int]:
    """Numbers of micro-batches: below, at and beyond multiples of the ranks."""
    found: Sequence[int] = request.param
    return found


def cases(micros: Sequence[int], *virtual: int) -> Iterator[tuple[int, int, int]]:
    return ((p, v, m) for p in RANKS for v in virtual or VIRTUAL for m in micros)


def check_whole(plan: Plan, ranks: int, virtual: int, micros: int, *kinds: Kind) -> None:
    """Every rank does all kinds for each of its stages and micro-batches once."""
    assert len(plan) == ranks
    for rank, actions in enumerate(plan):
        stages = range(rank, ranks * virtual, ranks)
        assert len(actions) == len(kinds) * virtual * micros
        assert set(actions) == {(k, s, i) for k in kinds for s in stages for i in range(micros)}


def check_roads(plan: Plan) -> None:
    """What a rank sends to another arrives in the order in which that one needs it."""
    last = max(action.stage for actions in plan for action in actions)
    forwards = [[(s, i) for kind, s, i in actions if kind == "forward"] for actions in plan]
    grads = [
        [(s, i) for kind, s, i in actions if kind in ("input", "backward")] for actions in plan
    ]
    for rank in range(len(plan)):
        assert [(s + 1, i) for s, i in forwards[rank - 1] if s < last] == [
            (s, i) for s, i in forwards[rank] if s > 0
        ]
        assert [(s, i) for s, i in grads[rank - 1] if s < last] == [
            (s - 1, i) for s, i in grads[rank] if s > 0
        ]


def test_forward_is_whole_and_keeps_nothing(micros: Sequence[int]) -> None:
    for p, v, m in cases(micros):
        plan = make_plan("forward", p, v, m)
        done = simulate(plan)
        check_whole(plan, p, v, m, "forward")
        check_roads(plan)
        assert done.live == (0,) * p
        if m % p == 0:
            assert done.total == v * m + p - 1


def test_gpipe_keeps_every_activation(micros: Sequence[int]) -> None:
    for p, v, m in cases(micros):
        plan = make_plan("gpipe", p, v, m)
        done = simulate(plan)
        check_whole(plan, p, v, m, "forward", "backward")
        check_roads(plan)
        assert done.live == (m * v,) * p
        if v == 1:
            assert done.bubble == pytest.approx((p - 1) / (m + p - 1), abs=SUM_ORDER)


def test_1f1b_keeps_no_more_than_the_ranks_that_follow_and_waits_as_long_as_it_must(
    micros: Sequence[int],
) -> None:
    for p, v, m in cases(micros, 1):
        plan = make_plan("1f1b", p, v, m)
        done = simulate(plan)
        check_whole(plan, p, v, m, "forward", "backward")
        check_roads(plan)
        assert done.live == tuple(min(m, p - rank) for rank in range(p))
        assert done.bubble == pytest.approx((p - 1) / (m + p - 1), abs=SUM_ORDER)


def test_interleaved_waits_less_for_a_bounded_number_of_activations(micros: Sequence[int]) -> None:
    for p, v, m in cases(micros, 2, 3, 4):
        plan = make_plan("interleaved", p, v, m)
        done = simulate(plan)
        check_whole(plan, p, v, m, "forward", "backward")
        check_roads(plan)
        bounds = tuple(min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1) for rank in range(p))
        assert all(live <= bound for live, bound in zip(done.live, bounds, strict=True))
        if m % p == 0:
            assert done.live == bounds
            assert done.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=SUM_ORDER)


def test_interleaved_and_1f1b_are_one_schedule() -> None:
    for v in VIRTUAL:
        assert make_plan("interleaved", 4, v, 10) == make_plan("1f1b", 4, v, 10)


def check_zero_bubble(plan: Plan, p: int, m: int) -> None:
    """Every backward split in two; as many micro-batches live as on 1f1b's first rank."""
    for rank, actions in enumerate(plan):
        assert set(actions) == {
            (kind, rank, i) for kind in ("forward", "input", "weight") for i in range(m)
        }
        assert len(actions) == 3 * m
    check_roads(plan)
    assert max(simulate(plan).live) <= min(m, p)


def test_zero_bubble_fills_the_waiting_of_equal_stages(micros: Sequence[int]) -> None:
    """Where there are stages that wait, and a second micro-batch to wait for, it is faster than 1f1b."""
    for p, _, m in cases(micros, 1):
        plan, other = make_plan("zero_bubble", p, 1, m), make_plan("1f1b", p, 1, m)
        before, after = simulate(other).total, simulate(plan).total
        assert before == 3 * (m + p - 1)
        if p == 1:
            assert plan == other
        else:
            check_zero_bubble(plan, p, m)
            assert after < before
        if m >= 2 * p:  # at least a third of 1f1b's waiting is filled
            assert after - 3 * m <= 2 * (p - 1)


def test_zero_bubble_between_unequal_stages_takes_at_most_as_long_as_1f1b() -> None:
    generator, shorter = random.Random(0), 0
    for _ in range(200):
        p, m = generator.choice(RANKS), generator.choice(MICROS)
        times = [
            tuple(generator.choice((0.5, 1.0, 1.5, 2.0, 3.0)) for _ in range(p)) for _ in range(3)
        ]
        costs = Costs(*times)
        plan, other = make_plan("zero_bubble", p, 1, m, costs), make_plan("1f1b", p, 1, m)
        check_roads(plan)
        done = simulate(plan, costs)
        assert max(done.live) <= min(m, p)
        assert done.total <= simulate(other, costs).total
        if plan != other:
            check_zero_bubble(plan, p, m)
        shorter += done.total < simulate(other, costs).total
    assert shorter > 150


def test_one_rank_goes_micro_batch_by_micro_batch() -> None:
    expected = tuple((kind, 0, i) for i in range(3) for kind in ("forward", "backward"))
    assert make_plan("1f1b", 1, 1, 3) == (expected,)


def test_times_of_a_small_pipeline() -> None:
    """Two ranks, two micro-batches, by hand; the second stage's forward takes longer."""
    costs = Costs(forward=(1.0, 2.0), input=1.5, weight=0.5)
    done = simulate(make_plan("1f1b", 2, 1, 2), costs)
    assert done.start == ((0.0, 1.0, 5.0, 9.0), (1.0, 3.0, 5.0, 7.0))
    assert done.finish == ((1.0, 2.0, 7.0, 11.0), (3.0, 5.0, 7.0, 9.0))
    assert (done.total, done.busy, done.live) == (11.0, (6.0, 8.0), (2, 1))
    assert done.bubble == pytest.approx(1 - 14 / 22, abs=SUM_ORDER)


def test_zero_bubble_wins_the_waiting_of_a_slow_first_stage() -> None:
    costs = Costs(*[(2.0, 1.0, 1.0, 1.0)] * 3)
    assert simulate(make_plan("1f1b", 4, 1, 16), costs).total == 99.0
    assert simulate(make_plan("zero_bubble", 4, 1, 16, costs), costs).total <= 97.0


def swapped(plan: Plan, rank: int, first: int, second: int) -> Plan:
    actions = list(plan[rank])
    actions[first], actions[second] = actions[second], actions[first]
    return (*plan[:rank], tuple(actions), *plan[rank + 1 :])


def test_a_deadlock_names_the_actions_that_wait() -> None:
    plan = swapped(
        make_plan("1f1b", 2, 1, 2), 1, 0, 1
    )  # the last stage's backward before its forward
    with pytest.raises(
        PlanError,
        match=r"deadlocks: rank 0 at Action\(kind='backward', stage=0, micro=0\); rank 1 at",
    ):
        simulate(plan)


def test_two_ranks_that_wait_for_each_other_are_noticed() -> None:
    plan = make_plan("1f1b", 2, 1, 4)
    assert [action[::2] for action in plan[0][1:3]] == [("forward", 1), ("backward", 0)]
    simulate(swapped(plan, 0, 1, 2))  # slower, but possible
    plan = swapped(plan, 1, 1, 2)
    simulate(plan)
    with pytest.raises(
        PlanError, match=r"deadlocks.*rank 0 at .*micro=0.*rank 1 at .*'forward', stage=1, micro=1"
    ):
        simulate(swapped(plan, 0, 1, 2))


def test_a_weight_gradient_before_its_input_gradient_is_noticed() -> None:
    plan = make_plan("zero_bubble", 2, 1, 4)
    actions = plan[0]
    first, second = actions.index(Action("input", 0, 0)), actions.index(Action("weight", 0, 0))
    with pytest.raises(PlanError, match=r"deadlocks: rank 0 at .*'weight', stage=0, micro=0"):
        simulate(swapped(plan, 0, first, second))
