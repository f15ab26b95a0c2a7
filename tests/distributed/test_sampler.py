"""The embedded sampler over ranks: every layout draws the same samples, and every rank returns all of them."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dovetail.arch.registry import spec_from_config
from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import PackedBatch, Sequence
from dovetail.errors import CheckpointError
from dovetail.factory.engine import from_pretrained
from dovetail.kernels.registry import KernelSet
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.sampler import model_runner
from dovetail.sampler.base import SamplingParams, TokenPrompt
from dovetail.sampler.native import NativeSampler
from dovetail.sampler.sampling import draw
from dovetail.sampler.turn import Turn
from tests.helpers.harness import distributed, run
from tests.helpers.parity_configs import VOCAB, moe_configs, save_tiny, tiny_configs, tiny_model
from tests.helpers.tolerances import MODEL_FP32, OP_FP64, SUM_ORDER, assert_close

MODELS = ("llama_biases", "qwen2_window", "qwen3_tied", "llama_one_kv_head")
PARAMS = SamplingParams(
    samples=3, max_new_tokens=7, temperature=1.4, stop_ids=tuple(range(0, VOCAB, 11)), seed=9
)


def mesh_of(layout: str) -> Mesh:
    return Mesh.build(Layout.parse(layout)) if dist.is_initialized() else Mesh.solo()


def sampler_of(name: str, mesh: Mesh, max_tokens: int | None = None) -> NativeSampler:
    config = (tiny_configs() | moe_configs())[name]
    sampler = NativeSampler(
        spec_from_config(config.to_dict()), mesh, KernelSet(), torch.float64, max_tokens=max_tokens
    )
    sampler.refill(tiny_model(config).state_dict().items())
    return sampler


def prompts_of(lengths: tuple[int, ...]) -> list[TokenPrompt]:
    generator = torch.Generator().manual_seed(1)
    return [
        TokenPrompt(5 * i, torch.randint(0, VOCAB, (n,), generator=generator).tolist())
        for i, n in enumerate(lengths)
    ]


def sample_all(
    layout: str, lengths: tuple[int, ...], max_tokens: int, names: tuple[str, ...] = MODELS
) -> dict[str, list[Turn]]:
    """Completions of every model; the mesh is built once."""
    mesh, prompts = mesh_of(layout), prompts_of(lengths)
    return {
        name: sampler_of(name, mesh, max_tokens=max_tokens).sample(prompts, PARAMS)
        for name in names
    }


@functools.cache
def alone(lengths: tuple[int, ...], names: tuple[str, ...] = MODELS) -> dict[str, list[Turn]]:
    return sample_all("tp=1", lengths, 10_000, names)


def assert_same(actual: list[Turn], expected: list[Turn]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert (a.row, a.sample, a.ids, a.finish) == (b.row, b.sample, b.ids, b.finish)
        assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), SUM_ORDER)


@pytest.mark.parametrize(
    ("layout", "max_tokens", "names"),
    [
        ("tp=1,dp=2", 60, MODELS[::2]),
        ("tp=2", 200, MODELS[1::2]),
        *(
            pytest.param(layout, max_tokens, MODELS, marks=pytest.mark.soak)
            for layout, max_tokens in (
                ("tp=1,dp=2", 60),
                ("tp=2", 200),
                ("tp=4", 10_000),
                ("tp=2,dp=2", 500),
                ("tp=8", 10_000),
            )
        ),
    ],
    ids=lambda value: f"{len(value)} models" if isinstance(value, tuple) else value,
)
def test_every_layout_draws_the_same_samples_on_every_rank(
    layout: str, max_tokens: int, names: tuple[str, ...]
) -> None:
    lengths = (9, 3, 14, 1, 6)
    expected = alone(lengths, names)
    for found in run(
        Layout.parse(layout).num_ranks, sample_all, layout, lengths, max_tokens, names
    ):
        for name in names:
            assert_same(found[name], expected[name])
            assert {c.finish for c in found[name]} == {"stop", "length"}


@pytest.mark.parametrize("lengths", [(4,), ()])
def test_replicas_without_prompts_take_part(lengths: tuple[int, ...]) -> None:
    for found in run(4, sample_all, "tp=2,dp=2", lengths, 10_000, MODELS[1:2]):
        for name, completions in found.items():
            assert_same(completions, alone(lengths, MODELS[1:2])[name])


def score_samples(layout: str, names: tuple[str, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probs of samples, and what a forward pass over the same ids, as in training, gives for them."""
    mesh, prompts, params = (
        mesh_of(layout),
        prompts_of((9, 3, 14)),
        replace(PARAMS, top_k=30, top_p=0.9),
    )
    pairs = []
    for name in names:
        config = tiny_configs()[name]
        sampler = NativeSampler(
            spec_from_config(config.to_dict()), mesh, KernelSet(), torch.float32
        )
        sampler.refill(tiny_model(config).state_dict().items())
        done = sampler.sample(prompts, params)
        rows = []
        for i, c in enumerate(done):
            prompt = prompts[i // params.samples].ids
            mask = [False] * len(prompt) + [True] * len(c.ids)
            rows.append(Sequence([*prompt, *c.ids], mask, {"temperature": params.temperature}))
        with torch.no_grad():
            stats = sampler.model(MicroBatch.of(PackedBatch.pack(rows), mesh.token_multiple))
        pairs.append((torch.tensor([x for c in done for x in c.log_probs]), stats.logprob))
    return pairs


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("tp=1", MODELS),
        ("tp=2,dp=2", MODELS[2:3]),
        pytest.param("tp=2,dp=2", MODELS, marks=pytest.mark.soak),
    ],
)
def test_log_probs_are_those_of_scoring(layout: str, names: tuple[str, ...]) -> None:
    for found in run(Layout.parse(layout).num_ranks, score_samples, layout, names):
        for log_probs, scored in found:
            assert_close(log_probs, scored, MODEL_FP32)


def favor_padding(layout: str) -> tuple[set[int], list[int]]:
    """All logits are equal, so every id is as likely; a padding row that counted would be drawn too."""
    mesh = mesh_of(layout)
    config = tiny_configs()["llama"]
    sampler = NativeSampler(spec_from_config(config.to_dict()), mesh, KernelSet(), torch.float32)
    weights = dict(tiny_model(config).state_dict())
    weights["lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])
    sampler.refill(weights.items())
    padding = sampler.model.lm_head.weight[sampler.model.lm_head.columns :]
    assert not padding.any()
    padding.fill_(9.0)
    done = sampler.sample(prompts_of((3, 8)), SamplingParams(samples=200, max_new_tokens=8))
    best = sampler.sample(prompts_of((3, 8)), SamplingParams(max_new_tokens=8, temperature=0))
    assert_close(torch.tensor(done[0].log_probs), -torch.full((8,), float(VOCAB)).log(), SUM_ORDER)
    return {token for c in done for token in c.ids}, [token for c in best for token in c.ids]


@pytest.mark.parametrize(
    "layout", ["tp=4", *(pytest.param(name, marks=pytest.mark.soak) for name in ("tp=2", "tp=8"))]
)
def test_padding_of_the_vocabulary_is_never_drawn(layout: str) -> None:
    for drawn, best in run(Layout.parse(layout).num_ranks, favor_padding, layout):
        assert drawn == set(range(VOCAB))
        assert set(best) <= drawn


@distributed(world=2)
def test_tp_ranks_take_the_draw_of_rank_0() -> None:
    mesh = mesh_of("tp=2")
    sampler = sampler_of("llama_biases", mesh)
    expected = sampler.sample(prompts_of((5, 2)), PARAMS)

    def rounds_apart(z, noise, params, banned):
        ids, log_probs = draw(z, noise, params, banned)
        return (ids, log_probs) if mesh["tp"].rank == 0 else ((ids + 1) % VOCAB, log_probs + 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "draw", rounds_apart)
        assert_same(sampler.sample(prompts_of((5, 2)), PARAMS), expected)


@distributed(world=4)
def test_a_misshapen_table_is_refused_by_ranks_that_hold_only_padding_of_it() -> None:
    mesh = mesh_of("tp=4")
    config = tiny_configs()["llama"]
    config.vocab_size = 5  # tp 4 holds 2, 2, 1 and 0 rows
    sampler = NativeSampler(spec_from_config(config.to_dict()), mesh, KernelSet(), torch.float32)
    weights = dict(tiny_model(config).state_dict())
    sampler.refill(weights.items())
    assert (
        max(token for c in sampler.sample([TokenPrompt(0, [4, 1])], PARAMS) for token in c.ids) < 5
    )
    weights["lm_head.weight"] = torch.zeros(6, 64)
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight: shape \[6, 64\], expected \[5, 64\]"
    ):
        sampler.refill(weights.items())


EXPERTS = ("deepseek_v2_greedy", "deepseek_v3", "mixtral_window", "qwen2_moe")
TRACED = replace(PARAMS, trace=True)


def sample_experts(
    layout: str, lengths: tuple[int, ...], names: tuple[str, ...] = EXPERTS
) -> dict[str, list[Turn]]:
    mesh, prompts = mesh_of(layout), prompts_of(lengths)
    return {name: sampler_of(name, mesh, max_tokens=500).sample(prompts, TRACED) for name in names}


@functools.cache
def experts_alone(lengths: tuple[int, ...], names: tuple[str, ...]) -> dict[str, list[Turn]]:
    return sample_experts("tp=1", lengths, names)


def assert_same_routes(actual: list[Turn], expected: list[Turn]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.routing is not None and b.routing is not None
        assert a.routing.layers == b.routing.layers
        assert torch.equal(a.routing.valid, b.routing.valid)
        assert torch.equal(a.routing.indices, b.routing.indices)


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("tp=2", EXPERTS[2:]),
        ("tp=2,dp=2", EXPERTS[1:2]),
        *(
            pytest.param(layout, EXPERTS, marks=pytest.mark.soak)
            for layout in ("tp=2", "tp=2,dp=2")
        ),
    ],
)
def test_experts_and_latent_attention_draw_the_same_and_tell_the_same_routes(
    layout: str, names: tuple[str, ...]
) -> None:
    """Keys and values are cached as heads see them: expanded from their latents, padded to one head dim."""
    lengths = (9, 3, 14, 1, 6)
    expected = experts_alone(lengths, names)
    for found in run(Layout.parse(layout).num_ranks, sample_experts, layout, lengths, names):
        for name in names:
            assert_same(found[name], expected[name])
            assert_same_routes(found[name], expected[name])


def score_routes(folder: str, found: dict[str, list[Turn]], prompts: list[TokenPrompt]) -> None:
    """What was drawn is what the engine scores, along the routes that it takes itself."""
    ids = {prompt.row: list(prompt.ids) for prompt in prompts}
    for name, completions in found.items():
        engine = from_pretrained(f"{folder}/{name}", dtype=torch.float64, device="cpu")
        rows = [Sequence([*ids[c.row], *c.ids], routing=c.routing) for c in completions]
        batch = PackedBatch.pack(rows, dtype=torch.float64)
        batch = batch.with_fields(
            temperature=torch.full((len(batch),), PARAMS.temperature, dtype=torch.float64)
        )
        assert batch.routing is not None
        for asked in (batch.with_routing(None), batch):
            stats, trace = engine.score_and_trace(asked)
            drawn = [
                batch.token_index([i])[len(ids[c.row]) - 1 : -1] for i, c in enumerate(completions)
            ]
            expected = torch.tensor(
                [x for c in completions for x in c.log_probs], dtype=torch.float64
            )
            assert_close(stats.logprob[torch.cat(drawn)], expected, OP_FP64)
            assert trace.agreement(batch.routing) == 1.0
        assert int(batch.routing.valid.sum()) == len(batch) - len(rows)


def test_routes_of_a_sampler_are_those_of_a_score(tmp_path: Path) -> None:
    for name in EXPERTS:
        save_tiny(moe_configs()[name], tmp_path / name)
    lengths = (9, 3, 1)
    run(1, score_routes, str(tmp_path), sample_experts("tp=1", lengths), prompts_of(lengths))
