"""The harness itself: results, failures, hung and dead ranks, and that workers are reused."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from tests.helpers.harness import RankFailed, distributed, run, worker_ids
from tests.helpers.tolerances import (
    EXACT,
    SUM_ORDER,
    assert_all_close,
    assert_close,
    assert_sum_close,
    sum_error,
    tensor_error,
    worst_ratio,
)


def sum_of_ranks(offset: int) -> tuple[int, int, torch.Tensor]:
    x = torch.ones(3, requires_grad=True) * (dist.get_rank() + offset)
    total = x.detach().clone()
    dist.all_reduce(total)
    return dist.get_rank(), os.getpid(), total + 0 * x


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"planted on {rank}")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    time.sleep(600)  # in a collective it would fail, and might be heard first


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_back_in_rank_order_and_detached(world: int) -> None:
    results = run(world, sum_of_ranks, 5)
    assert [rank for rank, _, _ in results] == list(range(world))
    for _, _, total in results:
        assert total.tolist() == [sum(range(world)) + 5 * world] * 3
        assert not total.requires_grad


def test_workers_are_reused() -> None:
    first = [pid for _, pid, _ in run(3, sum_of_ranks, 0)]
    assert [pid for _, pid, _ in run(2, sum_of_ranks, 1)] == first[:2]
    assert [pid for _, pid, _ in run(3, sum_of_ranks, 2)] == first


def test_failing_rank_gives_its_traceback_and_discards_its_workers() -> None:
    run(2, sum_of_ranks, 0)
    before = worker_ids()
    with pytest.raises(
        RankFailed, match=r"(?s)rank 1 of 2 failed.*in fail_on.*ValueError: planted on 1"
    ):
        run(2, fail_on, 1)
    assert 0 not in worker_ids() and 1 not in worker_ids()
    after = [pid for _, pid, _ in run(2, sum_of_ranks, 0)]
    assert not set(after) & set(before.values())


def test_hung_rank_is_named_with_its_stack() -> None:
    for seconds in (
        1,
        4,
        16,
        64,
    ):  # until both have come so far: a fresh worker imports for a while
        with pytest.raises(
            RankFailed, match=rf"ranks \[0, 1\] did not finish within {seconds} s"
        ) as caught:
            run(2, hang_on, 0, timeout=seconds)
        if "in hang_on" in str(caught.value):
            return
    raise AssertionError(caught.value)


def test_dead_rank_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankFailed, match="rank 0 of 2 died with exit code 7"):
        run(2, die_on, 0)


@pytest.mark.parametrize("factor", [2, 3])
@distributed(world=2)
def test_body_runs_on_ranks_with_parameters(factor: int) -> None:
    mesh = Mesh.build(Layout(tp=2))
    x = torch.tensor(float(mesh["tp"].rank))
    dist.all_reduce(x, group=mesh["tp"].group)
    assert x.item() * factor == factor


@distributed(world=1)
def test_one_rank_has_a_group_too() -> None:
    assert Mesh.build(Layout())["world"].size == 1 == dist.get_world_size()


def test_tolerances_measure_what_they_say() -> None:
    one = torch.ones(4)
    assert tensor_error(one, one) == EXACT
    assert tensor_error(1.5 * one, one) == 0.5
    assert tensor_error(1.5 * one, one, largest=1000.0) == 0.05
    assert tensor_error(one, 0 * one) == float("inf")
    big, small = torch.full((2,), 100.0), torch.full((2,), 0.001)
    with pytest.raises(AssertionError, match="small: off by a factor"):
        assert_all_close(
            {"big": big, "small": 2 * small}, {"big": big, "small": small}, tolerance=1e-2
        )
    assert worst_ratio({"x": 2 * one}, {"x": one}) == (1.0, "x")
    difference = torch.tensor([1e-3, 0.5])
    terms = (torch.tensor([100.0, 1.0]), torch.tensor([-99.999, -0.5]))
    assert sum_error(difference, difference, terms) == EXACT
    error = sum_error(difference + torch.tensor([2e-3, 0.0]), difference, terms)
    assert error == pytest.approx(2e-3 / 199.999), "against the terms, which cancel"
    assert sum_error(3 * one, 2 * one, [one, one]) == tensor_error(3 * one, 2 * one) == 0.5
    assert sum_error(one, 0 * one, [0 * one]) == float("inf")
    with pytest.raises(AssertionError, match="terms of"):
        sum_error(one, one, [one[:2]])
    with pytest.raises(AssertionError, match="margin: error 5"):
        assert_sum_close(3 * one, 2 * one, [one, one], SUM_ORDER, "margin")
    with pytest.raises(AssertionError, match="names differ"):
        assert_all_close({"a": one}, {"b": one}, SUM_ORDER)
    with pytest.raises(AssertionError, match="shapes"):
        assert_close(one, torch.ones(3), SUM_ORDER)
