"""Each layer has its own mixer: here grouped-query attention between layers of latent attention."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.arch.spec import ArchSpec, AttentionSpec, LatentSpec, RopeSpec
from dovetail.batch.micro import MicroBatch
from dovetail.batch.packed import PackedBatch
from dovetail.kernels.registry import KernelSet
from dovetail.nn.attention import Attention
from dovetail.nn.mla import LatentAttention
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.base import SamplingParams
from dovetail.sampler.kv_cache import PagedCache, numbers_per_token
from dovetail.sampler.native import NativeSampler, SamplerOptions
from tests.helpers.parity_configs import VOCAB
from tests.helpers.prompts import some_prompts
from tests.helpers.tolerances import SUM_ORDER, assert_close

GROUPED = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True, window=5)
LATENT = AttentionSpec(
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    latent=LatentSpec(q_rank=None, kv_rank=12, nope_dim=10, rope_dim=6, v_dim=14),
)
SPEC = ArchSpec(
    family="mixed",
    vocab_size=VOCAB,
    width=24,
    depth=3,
    ffn_width=32,
    norm_eps=1e-5,
    mixers=(LATENT, GROUPED, LATENT),
    rope=RopeSpec(rotary_dim=6, max_positions=64),
)


@pytest.fixture
def sampler() -> NativeSampler:
    """With random weights."""
    options = SamplerOptions(page_size=4)
    sampler = NativeSampler(SPEC, Mesh.solo(), KernelSet(), torch.float64, options=options)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in sampler.model.parameters():
            parameter.normal_(std=0.3, generator=draw)
    sampler.filled = True
    return sampler


def test_a_layer_has_the_mixer_of_its_own_spec(sampler: NativeSampler) -> None:
    blocks: list[Any] = list(sampler.model.model.layers.values())
    mixers = [block.self_attn for block in blocks]
    assert list(map(type, mixers)) == [LatentAttention, Attention, LatentAttention]
    assert [mixer.window for mixer in mixers] == [None, 5, None]


def test_a_cache_has_the_state_that_each_layer_asks_for() -> None:
    cache = PagedCache(SPEC, Mesh.solo(), torch.float64, pages=3, page_size=4)
    shapes = [tuple(keys.shape) for keys, _ in cache.layers]
    assert shapes == [(3, 4, 4, 16), (3, 2, 4, 8), (3, 4, 4, 16)]
    assert numbers_per_token(SPEC, Mesh.solo()) == 2 * (64 + 16 + 64)
    for layer, entries in enumerate(cache.layers):
        entries[0][1] = layer + 1.0
    cache.copy_pages([(1, 2)])
    for layer, (keys, values) in enumerate(cache.layers):
        assert bool((keys[2] == layer + 1.0).all())
        assert not bool(values.any())


def test_samples_of_mixed_layers_have_the_log_probs_of_a_score(sampler: NativeSampler) -> None:
    params = SamplingParams(samples=2, max_new_tokens=9, seed=3)
    prompts = some_prompts()
    for i, done in enumerate(sampler.sample(prompts, params)):
        prompt = prompts[i // params.samples]
        batch = PackedBatch.pack([[*prompt.ids, *done.ids]])
        with torch.no_grad():
            stats = sampler.model(MicroBatch.of(batch))
        scored = stats.logprob[-len(done.ids) :]
        assert_close(torch.tensor(done.log_probs, dtype=torch.float64), scored, SUM_ORDER)


def test_operations_and_weights_are_those_of_each_layer() -> None:
    alike = [replace(SPEC, mixers=(mixer,) * 3) for mixer in SPEC.mixers]
    for layer, spec in enumerate(alike):
        assert SPEC.layer_params[layer] == spec.layer_params[layer]
    attention = [spec.flops(11) - 2 * 11 * spec.linear_params for spec in alike]
    assert SPEC.flops(11) - 2 * 11 * SPEC.linear_params == sum(attention) / 3
