"""The embedded sampler on a CUDA device: kernels against the reference, captured steps, scores, pages, memory."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.arch.registry import spec_from_config
from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.kernels import cuda
from dovetail.kernels.registry import kernels_for
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.base import SamplingParams, TokenPrompt
from dovetail.sampler.kv_cache import PagedCache
from dovetail.sampler.model_runner import CapturedStep, cuda_capture
from dovetail.sampler.native import NativeSampler, SamplerOptions
from dovetail.sampler.turn import Turn
from tests.helpers.caches import fill, held
from tests.helpers.parity_configs import VOCAB, moe_configs, tiny_configs, tiny_model
from tests.helpers.prompts import some_prompts
from tests.helpers.tolerances import HALF_SHARE, MODEL_FP32, OP_BF16, OP_FP32, assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PARAMS = SamplingParams(
    samples=3, max_new_tokens=40, temperature=1.3, stop_ids=tuple(range(0, VOCAB, 40)), seed=4
)
DTYPES = [torch.float32, torch.bfloat16]
ON_DEVICE = torch.cuda.is_available() and cuda.grouped_mm_without_sync(
    torch.device("cuda"), torch.bfloat16, 8
)


def uncaptured(fn: Callable[[], Any]) -> Callable[[], Any]:
    return fn


def sampler_of(name: str, dtype: torch.dtype, capture: Any = None, **options: Any) -> NativeSampler:
    config = (tiny_configs() | moe_configs())[name]
    mesh, spec = Mesh.solo("cuda"), spec_from_config(config.to_dict())
    kernels, chosen = kernels_for(mesh.device), SamplerOptions(**options)
    sampler = NativeSampler(spec, mesh, kernels, dtype, options=chosen, capture=capture)
    sampler.refill((n, w.to("cuda")) for n, w in tiny_model(config).state_dict().items())
    return sampler


@torch.no_grad()
def scored(
    model: torch.nn.Module, prompts: list[TokenPrompt], done: list[Turn], device: str
) -> Tensor:
    """Log-probs of all drawn tokens from one packed pass, as in training, in the order of `done`."""
    ids = {prompt.row: list(prompt.ids) for prompt in prompts}
    rows = []
    for c in done:
        mask = [False] * len(ids[c.row]) + [True] * len(c.ids)
        rows.append(Sequence([*ids[c.row], *c.ids], mask, {"temperature": PARAMS.temperature}))
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    return model(MicroBatch.of(PackedBatch.pack(rows, dtype=dtype).to(device), 1)).logprob.cpu()


def drawn(done: list[Turn]) -> Tensor:
    return torch.tensor([x for c in done for x in c.log_probs], dtype=torch.float64)


def test_kernels_equal_the_reference() -> None:
    pytest.importorskip("triton")
    from tests.helpers.decode_rows import (  # triton is there only where a GPU may be
        measure,
        written,
    )

    for case, error in {**measure("cuda"), **written("cuda")}.items():
        assert error <= (OP_FP32 if "float32" in case else OP_BF16), case


def test_draws_are_those_of_torch() -> None:
    pytest.importorskip("triton")
    from tests.helpers.draw_rows import measure, odd

    for case, (others, error) in measure("cuda").items():
        assert others == 0, case
        assert error <= OP_FP32, case
    assert all(odd("cuda").values())


@pytest.mark.parametrize(
    "params", [PARAMS, replace(PARAMS, temperature=0), replace(PARAMS, banned_ids=tuple(range(90)))]
)
def test_samples_are_those_of_torch_s_draws(params: SamplingParams) -> None:
    ours, plain = (sampler_of("llama", torch.float32, keep_cache=True) for _ in range(2))
    plain.kernels = plain.model.kernels = replace(plain.kernels, draw=None)
    assert ours.kernels.draw is not None
    for mine, other in zip(
        ours.sample(some_prompts(), params), plain.sample(some_prompts(), params), strict=True
    ):
        assert mine.ids == other.ids
        assert_close(torch.tensor(mine.log_probs), torch.tensor(other.log_probs), MODEL_FP32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("name", ["llama", "qwen3_window"])
def test_captured_steps_give_what_plain_ones_give(
    name: str, top_p: float, dtype: torch.dtype
) -> None:
    """To the bit: the same kernels on the same memory."""
    prompts, params = some_prompts(), replace(PARAMS, top_p=top_p)
    captured = sampler_of(name, dtype, keep_cache=True)
    assert captured.capture is not None
    plain = sampler_of(name, dtype, uncaptured)
    expected = plain.sample(prompts, params)
    assert len({len(c.ids) for c in expected}) > 3
    for _ in range(2):
        assert captured.sample(prompts, params) == expected
    other = replace(params, seed=9, step=7)
    assert captured.sample(prompts, other) == plain.sample(prompts, other) != expected


@pytest.mark.parametrize(
    "name", ["llama", "qwen3_window", *(["qwen3_moe_many"] if ON_DEVICE else [])]
)
@torch.no_grad()
def test_captured_prefills_give_what_plain_ones_give(name: str) -> None:
    """To the bit; near what comes without padding, but for experts that rounding may choose apart.

    The first call runs plain, the second captures, others replay.
    """
    runners = []
    for capture, joining in ((None, True), (uncaptured, True), (None, False)):
        sampler = sampler_of(name, torch.bfloat16, capture)
        assert sampler.capture_prefill
        cache = PagedCache(sampler.spec, sampler.mesh, sampler.dtype, pages=40, page_size=16)
        runners.append(sampler.make_runner(cache, 8, 8))
        runners[-1].joining = joining
    drawing = random.Random(3)
    for lengths in ((70, 30), (100,), (5, 64, 9), (1, 127), (60, 60), (99, 1)):
        pages = iter(range(1, 40))
        prompts = [
            (
                drawing.choices(range(VOCAB), k=length),
                [next(pages) for _ in range(-(-length // 16))],
            )
            for length in lengths
        ]
        captured, padded, plain = (runner.prefill(prompts)[0] for runner in runners)
        assert torch.equal(captured, padded)
        if name != "qwen3_moe_many":
            assert_close(captured, plain, OP_BF16)
    assert torch.equal(*(held(runner.cache) for runner in runners[:2]))
    assert [len(runner._prefills) for runner in runners] == [1, 1, 0]


@pytest.mark.skipif(not ON_DEVICE, reason="elsewhere torch reads where experts' rows end")
@pytest.mark.parametrize("trace", [False, True], ids=["", "trace"])
@pytest.mark.parametrize("name", ["mixtral_window", "qwen3_moe_many", "qwen2_moe", "deepseek_v3"])
def test_captured_experts_give_what_plain_ones_give(name: str, trace: bool) -> None:
    prompts, params = some_prompts(), replace(PARAMS, trace=trace)
    captured = sampler_of(name, torch.bfloat16, keep_cache=True)
    assert captured.capture is not None
    expected = sampler_of(name, torch.bfloat16, uncaptured).sample(prompts, params)
    for _ in range(2):
        found = captured.sample(prompts, params)
        assert [(c.ids, c.log_probs) for c in found] == [(c.ids, c.log_probs) for c in expected]
        for got, true in zip(found, expected, strict=True):
            assert (got.routing is not None) == trace
            if got.routing is not None and true.routing is not None:
                assert torch.equal(got.routing.indices, true.routing.indices)


def test_graphs_are_freed_with_their_cache() -> None:
    """Or with a way to draw, where the cache is held; those that come after are made in memory of their own."""
    prompts, params = some_prompts(), (PARAMS, replace(PARAMS, temperature=0.5))
    samplers = [sampler_of("llama", torch.float32, keep_cache=keep) for keep in (False, True)]
    expected = [
        sampler_of("llama", torch.float32, uncaptured).sample(prompts, each) for each in params
    ]
    for _ in range(2):
        for each, wanted in zip(params, expected, strict=True):
            assert [sampler.sample(prompts, each) for sampler in samplers] == [wanted] * 2


def test_a_graph_replays_on_new_contents() -> None:
    x, y, calls = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda"), []

    def double() -> Tensor:
        calls.append(1)
        return y.copy_(2 * x)

    step = cuda_capture()(double)
    assert isinstance(step, CapturedStep)
    for value in range(5):
        x.fill_(value)
        assert step().tolist() == [2.0 * value] * 4
    assert len(calls) == 2, "run once, captured once"


@pytest.mark.parametrize("name", ["llama_biases", "qwen2_window", "qwen3_tied"])
def test_log_probs_are_those_of_scoring(name: str) -> None:
    prompts, sampler = some_prompts(), sampler_of(name, torch.float32)
    done = sampler.sample(prompts, PARAMS)
    found = scored(sampler.model, prompts, done, "cuda")
    assert_close(drawn(done), found.to(torch.float64), MODEL_FP32)


def test_half_precision_strays_no_further_than_scoring() -> None:
    """From the same weights in float64: decoding's mean error is at most that of a packed pass, within the usual share."""
    prompts = some_prompts((30, 25, 40, 17, 33, 28, 21, 36))
    sampler = sampler_of("llama", torch.bfloat16)
    done = sampler.sample(prompts, replace(PARAMS, samples=6, stop_ids=()))
    exact = NativeSampler(
        sampler.spec, Mesh.solo(), kernels_for(torch.device("cpu")), torch.float64
    )
    exact.refill(
        (n, w.to(torch.bfloat16))
        for n, w in tiny_model(tiny_configs()["llama"]).state_dict().items()
    )
    expected = scored(exact.model, prompts, done, "cpu")
    ours = (drawn(done) - expected).abs().mean()
    theirs = (scored(sampler.model, prompts, done, "cuda") - expected).abs().mean()
    assert ours <= HALF_SHARE * theirs, (float(ours), float(theirs))


def test_other_neighbors_change_no_sample() -> None:
    """In float32, where rounding is far below what lies between two draws; in half precision it may tell."""
    prompts, sampler = some_prompts(), sampler_of("llama", torch.float32)
    expected = {(c.row, c.sample): c for c in sampler.sample(prompts, PARAMS)}
    few = sampler_of("llama", torch.float32, page_size=16, max_num_seqs=4, decode_steps=3)
    for found in (sampler.sample(prompts[::-1][:3], PARAMS), few.sample(prompts, PARAMS)):
        for c in found:
            same = expected[c.row, c.sample]
            assert (c.ids, c.finish) == (same.ids, same.finish)
            assert_close(torch.tensor(c.log_probs), torch.tensor(same.log_probs), MODEL_FP32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_that_others_left_change_nothing(dtype: torch.dtype) -> None:
    sampler = sampler_of("qwen2_window", dtype, page_size=16, keep_cache=True)
    expected = sampler.sample(some_prompts(), PARAMS)
    runner = sampler._runner
    assert runner is not None
    fill(runner.cache, 1e4)
    assert sampler.sample(some_prompts(), PARAMS) == expected


@pytest.mark.parametrize("name", ["mixtral_window", "deepseek_v3"])
def test_float32_experts_and_latent_attention_run_uncaptured(name: str) -> None:
    prompts, sampler = some_prompts(), sampler_of(name, torch.float32)
    assert sampler.capture is None
    done = sampler.sample(prompts, PARAMS)
    assert_close(
        drawn(done), scored(sampler.model, prompts, done, "cuda").to(torch.float64), MODEL_FP32
    )


def test_weights_that_come_later_are_in_the_graph() -> None:
    prompts, config = some_prompts(), tiny_configs()["llama"]
    sampler = sampler_of("llama", torch.float32, keep_cache=True)
    before = sampler.sample(prompts, PARAMS)
    weights = {n: (0.5 * w).to("cuda") for n, w in tiny_model(config).state_dict().items()}
    sampler.refill(weights.items())
    plain = sampler_of("llama", torch.float32, uncaptured)
    plain.refill(weights.items())
    assert sampler.sample(prompts, PARAMS) == plain.sample(prompts, PARAMS) != before


def test_a_call_leaves_no_memory_behind() -> None:
    sampler = sampler_of("llama", torch.bfloat16)
    held = []
    for _ in range(4):
        sampler.sample(some_prompts(), PARAMS)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[1:] == held[1:2] * 3, held
