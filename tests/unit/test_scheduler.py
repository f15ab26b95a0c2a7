"""How the embedded sampler runs rows: pages, admission, several decode steps between two looks, captured steps."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail.arch.registry import spec_from_config
from dovetail.kernels import reference
from dovetail.kernels.reference import Spans
from dovetail.kernels.registry import KernelSet
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.base import SamplingParams
from dovetail.sampler.kv_cache import PageBudget, PagedCache, PagePool
from dovetail.sampler.model_runner import GraphPool, ModelRunner, pad_to_bucket
from dovetail.sampler.native import NativeSampler
from dovetail.sampler.scheduler import Group, Request, Scheduler
from dovetail.sampler.turn import Turn
from tests.helpers.caches import fill, held
from tests.helpers.parity_configs import VOCAB, tiny_configs, tiny_model
from tests.helpers.prompts import some_prompts
from tests.helpers.schedulers import PARAMS, sampler_of
from tests.helpers.tolerances import SUM_ORDER, assert_close


def assert_same(actual: list[Turn], expected: list[Turn]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a.row, a.sample, a.ids, a.finish) == (b.row, b.sample, b.ids, b.finish)
        assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), SUM_ORDER)


def test_pages_are_free_without_references() -> None:
    pool = PagePool(5)
    a, b = pool.allocate(2), pool.allocate(3)
    assert sorted(a + b) == [1, 2, 3, 4, 5] and pool.num_free == 0
    pool.share(a)
    pool.free(a)
    assert pool.num_free == 0
    pool.free(a)
    pool.free(b[:1])
    assert sorted(pool.allocate(3)) == sorted(a + b[:1])
    with pytest.raises(AssertionError, match="freed twice"):
        PagePool(2).free([1])


@pytest.mark.parametrize("pages", [7, 8, 11, 40])
@pytest.mark.parametrize("samples", [1, 3])
def test_every_row_runs_once_on_pages_of_its_own_and_gives_all_back(
    pages: int, samples: int
) -> None:
    lengths, budget = (
        {3: 9, 5: 4, 8: 10, 9: 1, 11: 8},
        PageBudget(samples=samples, new_tokens=7, page_size=4),
    )
    pool, order = PagePool(pages), sorted(lengths, key=lambda i: -lengths[i])
    scheduler, none = (
        Scheduler(pool, max_num_seqs=5, max_prefill_tokens=12),
        np.zeros(samples, np.int64),
    )
    for i in order:
        scheduler.add(Group([i] * lengths[i], budget, none, none))
    assert max(map(budget.pages_for_first, lengths.values())) <= 7
    running: list[Request] = []
    seen: list[tuple[int, int]] = []
    most, entering = 0, True
    while True:
        while entering:
            prompts, rows = scheduler.admit()
            assert sum(prompt.group.length for prompt in prompts) <= 12
            assert {row.group for row in rows} >= {prompt.group for prompt in prompts}
            running += rows
            seen += [(row.group.ids[0], row.sample) for row in rows]
            entering = bool(rows)
        if not running:
            break
        most = max(most, len(running))
        assert len(running) <= 5
        for row in running:
            assert (
                len(row.pages) == budget.pages_for_sample(row.group.length) and 0 not in row.pages
            )
        writable = [page for row in running for page in row.pages[row.group.length // 4 :]]
        shared = [page for row in running for page in row.pages[: row.group.length // 4]]
        assert len(set(writable)) == len(writable) and not set(writable) & set(shared)
        scheduler.free([running.pop(0).pages])
        entering = scheduler.should_admit
    assert seen == [(prompt, sample) for prompt in order for sample in range(samples)]
    assert pool.num_free == pages
    assert pages < 40 or most == 5


@pytest.mark.parametrize(
    ("max_tokens", "options"),
    [
        (None, {"page_size": 4, "decode_steps": 5}),
        (50, {"page_size": 4, "decode_steps": 3, "max_prefill_tokens": 10}),
        (None, {"page_size": 5, "max_num_seqs": 3}),
        (1, {"page_size": 16, "decode_steps": 8}),
    ],
)
def test_pages_budget_and_looks_change_no_sample(
    max_tokens: int | None, options: dict[str, int]
) -> None:
    expected = sampler_of("qwen2_window").sample(some_prompts(), PARAMS)
    assert {c.finish for c in expected} == {"stop", "length"}
    assert_same(
        sampler_of("qwen2_window", max_tokens, **options).sample(some_prompts(), PARAMS), expected
    )


def test_experts_are_told_however_often_the_host_looks() -> None:
    params = replace(PARAMS, trace=True)
    expected = sampler_of("mixtral_window").sample(some_prompts(), params)
    found = sampler_of("mixtral_window", 60, page_size=4, decode_steps=3).sample(
        some_prompts(), params
    )
    assert_same(found, expected)
    for a, b in zip(found, expected, strict=True):
        assert a.routing is not None and b.routing is not None
        assert torch.equal(a.routing.indices, b.routing.indices) and torch.equal(
            a.routing.valid, b.routing.valid
        )


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_steps_are_captured_once_a_bucket_and_stay_valid(top_p: float) -> None:
    """The same code as with CUDA graphs, which replay instead of running."""
    captured: list[int] = []

    def capture(fn: Callable[[], Tensor]) -> Callable[[], Tensor]:
        captured.append(0)
        place = len(captured) - 1

        def run() -> Tensor:
            captured[place] += 1
            return fn()

        return run

    params = replace(PARAMS, top_p=top_p, stop_ids=())
    expected = sampler_of("llama").sample(some_prompts(), params)
    sampler = sampler_of("llama", 200, capture, page_size=4, decode_steps=2, keep_cache=True)
    assert_same(sampler.sample(some_prompts(), params), expected)
    count, steps = len(captured), sum(captured)
    assert count == 2, "of 8 rows, and of 32"
    assert_same(sampler.sample(some_prompts(), params), expected)
    assert (len(captured), sum(captured)) == (count, 2 * steps), (
        "a second call captures nothing again"
    )
    weights = {
        name: 0.5 * w for name, w in tiny_model(tiny_configs()["llama"]).state_dict().items()
    }
    sampler.refill(weights.items())
    other = sampler.sample(some_prompts(), replace(params, seed=8, step=3))
    fresh = sampler_of("llama")
    fresh.refill(weights.items())
    assert_same(other, fresh.sample(some_prompts(), replace(params, seed=8, step=3)))
    assert len(captured) == count, "neither weights nor noise are part of a graph"
    sampler.sample(some_prompts(), replace(params, temperature=0.7))
    assert len(captured) > count, "the temperature is"


def test_bans_hold_and_change_with_a_kept_runner() -> None:
    sampler = sampler_of("llama", keep_cache=True)
    even, odd = tuple(range(0, VOCAB, 2)), tuple(range(1, VOCAB, 2))
    for banned in (even, odd, ()):
        completions = sampler.sample(
            some_prompts(), replace(PARAMS, stop_ids=(), banned_ids=banned)
        )
        drawn = {token for c in completions for token in c.ids}
        assert not drawn & set(banned)
    assert drawn & set(even) and drawn & set(odd)


def test_buckets_are_few() -> None:
    assert sorted({pad_to_bucket(n) for n in range(1, 513)}) == [8, 32, 64, 128, 256, 512]
    assert all(n <= pad_to_bucket(n) <= max(2 * n, 8) or 8 < n <= 16 for n in range(1, 513))
    assert {pad_to_bucket(n, fine=True) for n in range(1, 513)} == {8, *range(32, 513, 32)}
    assert all(n <= pad_to_bucket(n, fine=True) <= pad_to_bucket(n) for n in range(1, 513))


def test_pages_that_others_left_change_nothing() -> None:
    sampler = sampler_of("qwen2_window", page_size=4, decode_steps=3, keep_cache=True)
    expected = sampler.sample(some_prompts(), PARAMS)
    runner = sampler._runner
    assert runner is not None
    fill(runner.cache, 1e3)
    assert_same(sampler.sample(some_prompts(), PARAMS), expected)
    assert sampler._runner is runner
    longer = replace(PARAMS, max_new_tokens=40, stop_ids=())
    assert_same(
        sampler.sample(some_prompts(), longer),
        sampler_of("qwen2_window").sample(some_prompts(), longer),
    )
    assert sampler._runner is not runner, "a longer row needs a wider table"


class OnMeta(TorchDispatchMode):
    """Fails where an operation takes or makes a tensor that lies elsewhere: sent to the device, or asked of it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, found)):
            assert not isinstance(x, Tensor) or x.device.type == "meta", f"{func} on {x.device}"
        return found


@pytest.mark.parametrize(
    "cuts", [{}, {"top_k": 20, "temperature": 0.6, "banned_ids": (2, 5)}, {"temperature": 0.0}]
)
def test_a_step_neither_synchronizes_nor_copies(cuts: dict[str, float]) -> None:
    """On a device without numbers, where asking for one raises: what is captured as a CUDA graph must not."""
    mesh = Mesh.solo("meta")
    kernels = KernelSet(decode_attention=lambda q, *_: torch.empty_like(q))
    spec = spec_from_config(tiny_configs()["qwen3_window"].to_dict())
    sampler = NativeSampler(spec, mesh, kernels, torch.bfloat16)
    cache = PagedCache(spec, mesh, torch.bfloat16, pages=9, page_size=16)
    runner = ModelRunner(sampler.model, cache, rows=8, table_width=3, decode_steps=4, capture=None)
    runner.set_params(SamplingParams(**cuts))  # type: ignore[arg-type]  # of several kinds
    with torch.no_grad(), OnMeta():
        runner._decode_step(partial(runner._forward, 4), 4)
    runner.set_params(SamplingParams(top_p=0.5))
    with torch.no_grad(), OnMeta(), pytest.raises(Exception, match="meta"):
        runner._decode_step(partial(runner._forward, 4), 4)


def by_cu_seqlens(
    q: Tensor, k: Tensor, v: Tensor, queries: Spans, keys: Spans, window: int | None
) -> Tensor:
    """Lengths from the device alone, as FlashAttention's kernels; `Spans.lengths` of a captured prefill are not real."""
    spans = Spans(queries.cu_seqlens, tuple(queries.cu_seqlens.diff().tolist()))
    assert queries.longest >= spans.longest and torch.equal(queries.cu_seqlens, keys.cu_seqlens)
    return reference.attention(q, k, v, spans, spans, window)


@pytest.mark.parametrize("name", ["llama", "qwen2_window"])
def test_captured_prefills_are_those_of_before(name: str) -> None:
    """Of prompts that join what runs: a graph for each length in steps of 128, later 256."""
    fed: list[int] = []

    def capture(fn: Callable[[], Tensor]) -> Callable[[], Tensor]:
        fed.append(0)

        def run(place: int = len(fed) - 1) -> Tensor:
            fed[place] += 1
            return fn()

        return run

    sampler = sampler_of(name, capture=capture)
    sampler.model.kernels = replace(sampler.kernels, attention=by_cu_seqlens)
    sampler.capture_prefill = True
    runners = []
    for joining in (True, False):
        cache = PagedCache(sampler.spec, sampler.mesh, sampler.dtype, pages=90, page_size=4)
        runners.append(sampler.make_runner(cache, 8, 40))
        runners[-1].joining = joining
    drawing = random.Random(5)
    with torch.no_grad():
        for lengths in ((5, 17, 1), (3,), (120, 8), (64, 66), (130, 130), (1,) * 63, (1,) * 64):
            pages = iter(range(1, 90))
            prompts = [
                (
                    drawing.choices(range(VOCAB), k=length),
                    [next(pages) for _ in range(-(-length // 4))],
                )
                for length in lengths
            ]
            one, other = ((runner.prefill(prompts)[0], held(runner.cache)) for runner in runners)
            assert_close(one[0], other[0], SUM_ORDER)
            assert_close(one[1], other[1], SUM_ORDER)
    assert fed == [4, 1, 1], "128 tokens, 256 and 512; 64 prompts are too many"


def test_a_pool_ends_with_its_last_graph() -> None:
    """The next graph begins another; as long as one is left, they share."""

    class Graph:
        pass

    pool, first, second = GraphPool(itertools.count().__next__), Graph(), Graph()
    assert [pool.acquire(first), pool.acquire(second)] == [0, 0]
    del first
    third = Graph()
    assert pool.acquire(third) == 0
    del second, third
    assert pool.acquire(Graph()) == 1
