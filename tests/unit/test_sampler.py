"""The embedded sampler on one rank: greedy generation and scores against transformers, draws, stops, refilling."""

import math
import weakref
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from dovetail.arch.registry import spec_from_config
from dovetail.errors import CheckpointError, ConfigError, DataError, LayoutError, ModelError
from dovetail.factory.sampler import sampling_layout
from dovetail.kernels import cuda
from dovetail.kernels.registry import KernelSet
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.rollout.base import Completion, Prompt, SamplingParams
from dovetail.rollout.native import NativeSampler, capturer_for
from dovetail.rollout.noise import uniforms
from dovetail.rollout.sampling import cut, draw, inverse_cdf
from dovetail.rollout.transformers import plan_static_batches
from tests.parity.configs import MAX_POSITIONS, VOCAB, moe_configs, tiny_configs, tiny_model
from tests.tolerances import MODEL_FP32, SUM_ORDER, assert_close

LENGTHS = (9, 3, 17, 9, 1, 12)
CHI_SQUARE_LIMIT = {2: 13.8, 5: 20.5, 11: 31.3}  # exceeded once in a thousand draws, by degrees of freedom


def sampler_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float32, **options) -> NativeSampler:
    sampler = NativeSampler(spec_from_config(config.to_dict()), Mesh.solo(), KernelSet(), dtype, **options)
    sampler.refill(tiny_model(config).state_dict().items())
    return sampler


def some_prompts(lengths=LENGTHS, seed: int = 3) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    return [Prompt(10 + i, torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for i, n in enumerate(lengths)]


@torch.no_grad()
def full_scores(config: PreTrainedConfig, prompt: Prompt, done: Completion, temperature: float) -> Tensor:
    """transformers' log-probs of a completion, from one pass over prompt and completion without a cache."""
    ids = torch.tensor([[*prompt.ids, *done.ids]])
    log_probs = (tiny_model(config)(ids, use_cache=False).logits[0] / (temperature or 1.0)).log_softmax(-1)
    return log_probs[len(prompt.ids) - 1 : -1].gather(1, torch.tensor(done.ids)[:, None])[:, 0]


@pytest.mark.parametrize("name", tiny_configs())
def test_greedy_and_log_probs_equal_transformers(name: str) -> None:
    config = tiny_configs()[name]
    model = tiny_model(config)
    prompts = some_prompts()
    greedy = sampler_of(config).sample(prompts, SamplingParams(max_new_tokens=12, temperature=0))
    for prompt, done in zip(prompts, greedy, strict=True):
        ids = torch.tensor([prompt.ids])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(done.ids) == expected[0, len(prompt.ids) :].tolist()
        assert_close(torch.tensor(done.log_probs), full_scores(config, prompt, done, 0.0), MODEL_FP32)


@pytest.mark.parametrize("name", ["llama_tied", "mistral_window", "qwen2_window", "qwen3_window"])
def test_log_probs_of_samples_equal_full_scoring_at_the_temperature(name: str) -> None:
    config = tiny_configs()[name]
    prompts = some_prompts()
    params = SamplingParams(samples=3, max_new_tokens=10, temperature=1.7, top_k=40, top_p=0.8, seed=5)
    done = sampler_of(config).sample(prompts, params)
    assert [(c.row, c.sample) for c in done] == [(p.row, s) for p in prompts for s in range(3)]
    for i, completion in enumerate(done):
        expected = full_scores(config, prompts[i // 3], completion, 1.7)
        assert_close(torch.tensor(completion.log_probs), expected, MODEL_FP32)


@pytest.mark.parametrize("budget", [1, 40, 100, 10_000])
def test_waves_and_order_of_prompts_change_no_sample(budget: int) -> None:
    config = tiny_configs()["qwen2_window"]
    prompts = some_prompts()
    params = SamplingParams(samples=4, max_new_tokens=8, temperature=1.3, stop_ids=tuple(range(20)))
    expected = {(c.row, c.sample): c for c in sampler_of(config, torch.float64).sample(prompts, params)}
    sampler = sampler_of(config, torch.float64, max_tokens=budget)
    for order in (prompts, prompts[::-1], prompts[2:4]):
        done = sampler.sample(order, params)
        assert [(c.row, c.sample) for c in done] == [(p.row, s) for p in order for s in range(4)]
        for c in done:
            same = expected[c.row, c.sample]
            assert (c.ids, c.finish) == (same.ids, same.finish)
            assert_close(torch.tensor(c.log_probs), torch.tensor(same.log_probs), SUM_ORDER)


def test_no_step_is_recorded_that_asks_the_device() -> None:
    """Longer heads than those of the kernels take the reference, which asks for lengths."""
    spec, mesh = spec_from_config(tiny_configs()["llama"].to_dict()), Mesh.imagined(Layout(), 0, "cuda")
    kernels = KernelSet(decode_attention=lambda q, *_: q)
    long = replace(spec, attention=replace(spec.attention, head_dim=264))
    assert capturer_for(spec, mesh, kernels, torch.float32) is not None
    assert capturer_for(long, mesh, kernels, torch.float32) is None
    assert capturer_for(spec, mesh, kernels, torch.float64) is None
    assert capturer_for(spec, mesh, KernelSet(), torch.float32) is None
    experts = spec_from_config(moe_configs()["mixtral"].to_dict())
    assert capturer_for(experts, mesh, kernels, torch.bfloat16) is None  # the reference reads where their rows end
    grouped = replace(kernels, grouped_mm=cuda.grouped_mm)
    for stays in (False, True):
        with mock.patch.object(cuda, "grouped_mm_without_sync", return_value=stays):
            assert (capturer_for(experts, mesh, grouped, torch.bfloat16) is not None) == stays
            assert capturer_for(experts, Mesh.imagined(Layout(dp=2, ep=2), 0, "cuda"), grouped, torch.bfloat16) is None


def test_rows_that_stop_leave_at_any_step_and_change_nothing_for_the_others() -> None:
    config, prompts = tiny_configs()["llama"], some_prompts()
    sampler = sampler_of(config, torch.float64)
    free = sampler.sample(prompts, SamplingParams(samples=6, max_new_tokens=20))
    stops = tuple(range(0, VOCAB, 7))
    stopped = sampler.sample(prompts, SamplingParams(samples=6, max_new_tokens=20, stop_ids=stops))
    assert {c.finish for c in stopped} == {"stop", "length"}
    assert len({len(c.ids) for c in stopped}) > 5
    for a, b in zip(free, stopped, strict=True):
        cut_at = next((i + 1 for i, token in enumerate(a.ids) if token in stops), 20)
        assert b.ids == a.ids[:cut_at]
        assert b.finish == ("stop" if b.ids[-1] in stops else "length")
        assert len(b.log_probs) == cut_at


def test_first_token_may_stop() -> None:
    config, prompts = tiny_configs()["llama"], some_prompts()[:1]
    sampler = sampler_of(config)
    first = sampler.sample(prompts, SamplingParams(max_new_tokens=1, temperature=0))[0]
    assert first.finish == "length"
    params = SamplingParams(max_new_tokens=9, temperature=0, stop_ids=(first.ids[0],))
    done = sampler.sample(prompts, params)[0]
    assert (done.ids, done.log_probs, done.finish) == (first.ids, first.log_probs, "stop")


def test_a_prompt_is_computed_once_for_all_its_samples() -> None:
    sampler, sizes = sampler_of(tiny_configs()["llama"]), []
    sampler.model.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    sampler.sample(some_prompts(), SamplingParams(samples=5, max_new_tokens=4))
    assert sizes == [sum(LENGTHS)] + [5 * len(LENGTHS)] * 3


def test_rows_that_stopped_are_computed_no_longer() -> None:
    sampler, sizes = sampler_of(tiny_configs()["llama"]), []
    sampler.model.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    stops = tuple(range(0, VOCAB, 3))
    done = sampler.sample(some_prompts(), SamplingParams(samples=20, max_new_tokens=30, stop_ids=stops))
    going = [sum(len(c.ids) > step for c in done) for step in range(1, 30)]
    assert len(sizes) == 1 + sum(n > 0 for n in going)
    assert sizes[1:] == [n for n in going if n]


def test_no_prompts_give_no_completions() -> None:
    assert sampler_of(tiny_configs()["llama"]).sample([], SamplingParams()) == []


def test_noise_is_golden_and_every_key_matters() -> None:
    rows, samples = np.array([0, 0, 1, 7]), np.array([0, 1, 0, 3])
    assert uniforms(0, 0, rows, samples, 0).tolist() == GOLDEN_AT_ZERO
    assert uniforms(-5, 12, rows, samples, 300).tolist() == GOLDEN_ELSEWHERE
    grid = np.arange(20)
    r, s = (x.ravel() for x in np.meshgrid(grid, grid))
    keys = [(seed, step, position) for seed in range(3) for step in range(3) for position in range(6)]
    drawn = np.concatenate([uniforms(seed, step, r, s, position) for seed, step, position in keys])
    assert len(np.unique(drawn)) == len(drawn)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.bincount((drawn * 12).astype(int), minlength=12)
    assert chi_square(counts, np.full(12, 1 / 12)) < CHI_SQUARE_LIMIT[11]
    ordered = drawn.reshape(len(keys), -1)
    assert abs(np.corrcoef(ordered[:-1].ravel(), ordered[1:].ravel())[0, 1]) < 4 / math.sqrt(len(drawn))


GOLDEN_AT_ZERO = [0.47141042966848024, 0.17732475569272, 0.2380165699112271, 0.1415867710518045]
GOLDEN_ELSEWHERE = [0.883102083828125, 0.9344168812870338, 0.652114914860066, 0.6487602963747291]


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    return float((((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum())


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept", "freedom"),
    [(0, 1.0, 12, 11), (6, 1.0, 6, 5), (0, 0.6, 3, 2), (6, 0.7, 3, 2), (100, 1.0, 12, 11)],
)
def test_draws_follow_the_distribution(top_k: int, top_p: float, kept: int, freedom: int) -> None:
    z = torch.randn(12, generator=torch.Generator().manual_seed(11)) * 1.5
    n, temperature = 40_000, 1.4
    p = (z.double() / temperature).softmax(-1)
    by_weight = p.argsort(descending=True)
    expected = torch.zeros_like(p)
    expected[by_weight[:kept]] = p[by_weight[:kept]]
    noise = torch.from_numpy(uniforms(1, 2, np.arange(n), np.zeros(n, np.int64), 3))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    ids, log_probs = draw(z.expand(n, -1), noise, params)
    counts = torch.bincount(ids, minlength=12)
    assert counts[expected == 0].sum() == 0
    assert chi_square(counts.numpy(), (expected / expected.sum()).numpy()) < CHI_SQUARE_LIMIT[freedom]
    assert_close(log_probs, p.log()[ids], MODEL_FP32, "log-probs before the cuts")


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("gap", [1.0, 500.0])
def test_banned_ids_are_never_drawn(temperature: float, gap: float) -> None:
    """Though they are the likeliest, by much; log-probs are those of the model without the ban."""
    z = torch.randn(12, generator=torch.Generator().manual_seed(11))
    z[[2, 7]] = z.max() + gap
    n = 4000
    noise = torch.from_numpy(uniforms(1, 2, np.arange(n), np.zeros(n, np.int64), 3))
    params = SamplingParams(temperature=temperature, banned_ids=(2, 7))
    ids, log_probs = draw(z.expand(n, -1), noise, params)
    allowed = z.clone()
    allowed[[2, 7]] = -torch.inf
    counts = torch.bincount(ids, minlength=12)
    if temperature:
        assert chi_square(counts.numpy(), (allowed.double() / temperature).softmax(-1).numpy()) < CHI_SQUARE_LIMIT[11]
    else:
        assert ids.unique().tolist() == [int(allowed.argmax())]
    p = (z.double() / (temperature or 1.0)).log_softmax(-1)
    assert_close(log_probs, p[ids], MODEL_FP32, "log-probs before the ban")


def test_each_token_is_drawn_by_its_own_number() -> None:
    """With equal logits the id is the number times the vocabulary's size."""
    config = tiny_configs()["llama"]
    sampler = sampler_of(config)
    weights = {n: torch.zeros_like(w) if "lm_head" in n else w for n, w in tiny_model(config).state_dict().items()}
    sampler.refill(weights.items())
    params = SamplingParams(samples=3, max_new_tokens=9, seed=4, step=21)
    for c in sampler.sample(some_prompts(), params):
        row, sample = np.array([c.row]), np.array([c.sample])
        numbers = [uniforms(4, 21, row, sample, position)[0] for position in range(9)]
        assert list(c.ids) == [int(u * VOCAB) for u in numbers]


def nucleus_by_sorting(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """The definition, for weights without ties: sort, keep k, keep until the mass is reached."""
    order = weights.argsort(-1, descending=True)
    kept = weights.gather(1, order)[:, : top_k or None]
    before = kept.cumsum(-1) - kept
    kept = torch.where(before < top_p * kept.sum(-1, keepdim=True), kept, 0.0)
    return torch.zeros_like(weights).scatter(1, order[:, : kept.shape[1]], kept)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.05), (0, 0.5), (0, 0.999), (50, 1.0), (50, 0.9), (1, 1.0), (0, 1e-9)]
)
@pytest.mark.parametrize("columns", [131, 5000])
def test_cut_equals_its_definition_by_sorting(columns: int, top_k: int, top_p: float) -> None:
    weights = torch.randn(7, columns, generator=torch.Generator().manual_seed(2), dtype=torch.float64).mul(2).exp()
    assert torch.equal(cut(weights, top_k, top_p), nucleus_by_sorting(weights, top_k, top_p))


def test_tied_tokens_stay_or_go_together() -> None:
    weights = torch.tensor([[1.0, 4.0, 2.0, 2.0, 0.5]])
    assert cut(weights, 2, 1.0).tolist() == [[0.0, 4.0, 2.0, 2.0, 0.0]]


@pytest.mark.parametrize("columns", [1, 255, 256, 257, 3000])
def test_inverse_cdf_equals_its_definition_and_never_takes_weight_zero(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    weights = torch.rand(400, columns, generator=generator)
    weights *= torch.rand(400, columns, generator=generator) < 0.3
    weights[torch.arange(400), torch.randint(0, columns, (400,), generator=generator)] = 1e-3
    noise = torch.rand(400, generator=generator, dtype=torch.float64)
    noise[:3] = torch.tensor([0.0, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    found = inverse_cdf(weights, noise)
    assert (weights.gather(1, found[:, None]) > 0).all()
    running = weights.double().cumsum(-1)
    expected = (running <= (noise * running[:, -1])[:, None]).sum(-1)
    assert (found == expected)[3:].all()
    positive = weights > 0
    assert torch.equal(found[0], positive[0].int().argmax())
    assert torch.equal(found[1], columns - 1 - positive[1].flip(0).int().argmax())


def test_waves_hold_every_row_once_within_the_budget() -> None:
    lengths = {3: 10, 5: 40, 8: 10, 9: 1}
    for budget in (1, 60, 200, 10**6):
        waves = plan_static_batches(lengths, 6, 5, budget)
        rows = [(wave.prompts[owner], sample) for wave in waves for owner, sample in wave.rows]
        assert sorted(rows) == [(i, sample) for i in sorted(lengths) for sample in range(6)]
        for wave in waves:
            assert len(wave.rows) == 1 or len(wave.rows) * (max(lengths[i] for i in wave.prompts) + 5) <= budget


def test_refill_names_everything_that_is_wrong_after_reading_all() -> None:
    config = tiny_configs()["qwen2"]
    sampler = sampler_of(config)
    weights = dict(tiny_model(config).state_dict())
    del weights["model.norm.weight"]
    weights["model.layers.0.self_attn.k_proj.bias"] = torch.zeros(3)
    read = []

    def stream():
        for item in [("transformer.wte", torch.zeros(2)), *weights.items()]:
            read.append(item[0])
            yield item

    with pytest.raises(
        CheckpointError, match=r"(?s)transformer.wte: not a.*k_proj.bias: shape \[3\], expected.*norm.*missing"
    ):
        sampler.refill(stream())
    assert len(read) == len(weights) + 1
    with pytest.raises(CheckpointError, match="refill"):
        sampler.sample(some_prompts(), SamplingParams())


def test_refill_holds_one_tensor_at_a_time() -> None:
    config = tiny_configs()["llama"]
    sampler = sampler_of(config)
    made: list[weakref.ref[Tensor]] = []

    def stream():
        for name, w in tiny_model(config).state_dict().items():
            assert all(ref() is None for ref in made)
            fresh = w.clone()
            made.append(weakref.ref(fresh))
            yield name, fresh
            del fresh

    sampler.refill(stream())
    assert len(made) == len(tiny_model(config).state_dict())


def test_refill_of_a_tied_model_takes_the_table_and_ignores_a_listed_head() -> None:
    config = tiny_configs()["qwen3_tied"]
    sampler = sampler_of(config)
    weights = {name: w for name, w in tiny_model(config).state_dict().items() if name != "lm_head.weight"}
    params = SamplingParams(samples=2, max_new_tokens=5)
    expected = sampler.sample(some_prompts(), params)
    for head in ({}, {"lm_head.weight": torch.full((VOCAB, 64), 9.0)}):
        sampler.refill({**weights, **head}.items())
        assert sampler.sample(some_prompts(), params) == expected
    sampler.refill([("lm_head.weight", weights.pop("model.embed_tokens.weight")), *weights.items()])
    assert sampler.sample(some_prompts(), params) == expected, "a checkpoint may list the head alone"


def test_parameters_are_held_once_in_the_compute_dtype() -> None:
    sampler = sampler_of(tiny_configs()["llama_tied"], torch.bfloat16)
    assert {p.dtype for p in sampler.model.parameters()} == {torch.bfloat16}
    assert sampler.model.lm_head.weight is sampler.model.model.embed_tokens.weight
    done = sampler.sample(some_prompts(), SamplingParams(samples=2, max_new_tokens=4))
    assert all(math.isfinite(x) for c in done for x in c.log_probs)


@pytest.mark.parametrize("name", ["llama_dynamic", "llama_longrope"])
def test_rope_by_length_is_refused_beyond_its_trained_positions(name: str) -> None:
    sampler, prompts = sampler_of(tiny_configs()[name]), some_prompts((50,))
    assert len(sampler.sample(prompts, SamplingParams(max_new_tokens=MAX_POSITIONS - 50))) == 1
    with pytest.raises(ModelError, match=f"65 with max_new_tokens=15; beyond {MAX_POSITIONS} positions"):
        sampler.sample(prompts, SamplingParams(max_new_tokens=MAX_POSITIONS - 49))


def test_prompts_that_cannot_be_continued_are_refused() -> None:
    sampler = sampler_of(tiny_configs()["llama"])
    with pytest.raises(DataError, match="row 4 has no tokens"):
        sampler.sample([Prompt(4, [])], SamplingParams())
    for bad in (VOCAB, -1):
        with pytest.raises(DataError, match=f"row 2 has the id {bad}; this model has ids 0 to {VOCAB - 1}"):
            sampler.sample([Prompt(2, [1, bad])], SamplingParams())


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 0},
        {"samples": 10**8},
        {"max_new_tokens": 0},
        {"max_new_tokens": 10**11},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": 1e-42},
        {"temperature": 1e39},
        {"top_p": 0.0},
        {"top_k": -1},
    ],
)
def test_params_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]  # the point of the test


def test_pipeline_ranks_sample_as_tensor_parallel_ones() -> None:
    spec = spec_from_config(tiny_configs()["llama"].to_dict())
    assert sampling_layout(spec, Layout(tp=2, pp=2, cp=2, dp=3)) == Layout(tp=4, dp=6)
    assert sampling_layout(spec, Layout.parse("pp=2,dp=3,copy_engines=false")) == Layout(tp=2, dp=3, copy_engines=False)
    odd = spec_from_config(tiny_configs()["llama"].to_dict() | {"num_attention_heads": 4, "num_key_value_heads": 4})
    with pytest.raises(
        LayoutError, match=r"layout tp=4,pp=2: the sampler runs pipeline ranks as tp=8; .*use one of tp=1, 2, 4"
    ):
        sampling_layout(odd, Layout(tp=4, pp=2))
