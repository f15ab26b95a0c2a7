"""The embedded sampler on one rank: greedy generation and scores against transformers, draws, stops, refilling."""

import json
import math
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from dovetail.arch.registry import spec_from_config
from dovetail.errors import CheckpointError, ConfigError, DataError, LayoutError, ModelError
from dovetail.factory.layouts import sampling_layout
from dovetail.factory.tokenizer import stop_ids
from dovetail.kernels import cuda
from dovetail.kernels.registry import KernelSet
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.base import SamplingParams, TokenPrompt
from dovetail.sampler.native import NativeSampler, capture_for
from dovetail.sampler.sampling import uniforms
from dovetail.sampler.transformers import plan_static_batches
from dovetail.sampler.turn import Turn
from dovetail.weights.hf_directory import Pretrained
from tests.helpers.parity_configs import MAX_POSITIONS, VOCAB, moe_configs, tiny_configs, tiny_model
from tests.helpers.prompts import LENGTHS, some_prompts
from tests.helpers.tolerances import MODEL_FP32, SUM_ORDER, assert_close


def sampler_of(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float32, **options
) -> NativeSampler:
    sampler = NativeSampler(
        spec_from_config(config.to_dict()), Mesh.solo(), KernelSet(), dtype, **options
    )
    sampler.refill(tiny_model(config).state_dict().items())
    return sampler


@torch.no_grad()
def full_scores(
    config: PreTrainedConfig, prompt: TokenPrompt, done: Turn, temperature: float
) -> Tensor:
    """transformers' log-probs of a completion, from one pass over prompt and completion without a cache."""
    ids = torch.tensor([[*prompt.ids, *done.ids]])
    log_probs = (
        tiny_model(config)(ids, use_cache=False).logits[0] / (temperature or 1.0)
    ).log_softmax(-1)
    return log_probs[len(prompt.ids) - 1 : -1].gather(1, torch.tensor(done.ids)[:, None])[:, 0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.soak] * (i % 2))
        for i, name in enumerate(tiny_configs())
    ],
)
def test_greedy_and_log_probs_equal_transformers(name: str) -> None:
    config = tiny_configs()[name]
    model = tiny_model(config)
    prompts = some_prompts()
    greedy = sampler_of(config).sample(prompts, SamplingParams(max_new_tokens=7, temperature=0))
    for prompt, done in zip(prompts, greedy, strict=True):
        ids = torch.tensor([prompt.ids])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=7,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(done.ids) == expected[0, len(prompt.ids) :].tolist()
        assert_close(
            torch.tensor(done.log_probs), full_scores(config, prompt, done, 0.0), MODEL_FP32
        )


@pytest.mark.parametrize("name", ["llama_tied", "mistral_window", "qwen2_window", "qwen3_window"])
def test_log_probs_of_samples_equal_full_scoring_at_the_temperature(name: str) -> None:
    config = tiny_configs()[name]
    prompts = some_prompts()
    params = SamplingParams(
        samples=3, max_new_tokens=10, temperature=1.7, top_k=40, top_p=0.8, seed=5
    )
    done = sampler_of(config).sample(prompts, params)
    assert [(c.row, c.sample) for c in done] == [(p.row, s) for p in prompts for s in range(3)]
    for i, completion in enumerate(done):
        expected = full_scores(config, prompts[i // 3], completion, 1.7)
        assert_close(torch.tensor(completion.log_probs), expected, MODEL_FP32)


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_budget_and_order_of_prompts_change_no_sample(budget: int) -> None:
    config = tiny_configs()["qwen2_window"]
    prompts = some_prompts()
    params = SamplingParams(samples=4, max_new_tokens=8, temperature=1.3, stop_ids=tuple(range(20)))
    expected = {
        (c.row, c.sample): c for c in sampler_of(config, torch.float64).sample(prompts, params)
    }
    sampler = sampler_of(config, torch.float64, max_tokens=budget)
    for order in (prompts, prompts[::-1], prompts[2:4]):
        done = sampler.sample(order, params)
        assert [(c.row, c.sample) for c in done] == [(p.row, s) for p in order for s in range(4)]
        for c in done:
            same = expected[c.row, c.sample]
            assert (c.ids, c.finish) == (same.ids, same.finish)
            assert_close(torch.tensor(c.log_probs), torch.tensor(same.log_probs), SUM_ORDER)


def test_no_step_is_captured_that_synchronizes() -> None:
    """Longer heads than those of the kernels take the reference, which asks for lengths."""
    spec, mesh = (
        spec_from_config(tiny_configs()["llama"].to_dict()),
        Mesh.abstract(Layout(), 0, "cuda"),
    )
    kernels = KernelSet(decode_attention=lambda q, *_: q)
    long = replace(spec, mixers=(replace(spec.attention, head_dim=264),) * spec.depth)
    assert capture_for(spec, mesh, kernels, torch.float32) is not None
    assert capture_for(long, mesh, kernels, torch.float32) is None
    assert capture_for(spec, mesh, kernels, torch.float64) is None
    assert capture_for(spec, mesh, KernelSet(), torch.float32) is None
    experts = spec_from_config(moe_configs()["mixtral"].to_dict())
    assert (
        capture_for(experts, mesh, kernels, torch.bfloat16) is None
    )  # the reference reads where their rows end
    grouped = replace(kernels, grouped_mm=cuda.grouped_mm)
    for stays in (False, True):
        with mock.patch.object(cuda, "grouped_mm_without_sync", return_value=stays):
            assert (capture_for(experts, mesh, grouped, torch.bfloat16) is not None) == stays
            assert (
                capture_for(
                    experts, Mesh.abstract(Layout(dp=2, ep=2), 0, "cuda"), grouped, torch.bfloat16
                )
                is None
            )


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
    done = sampler.sample(
        some_prompts(), SamplingParams(samples=20, max_new_tokens=30, stop_ids=stops)
    )
    going = [sum(len(c.ids) > step for c in done) for step in range(1, 30)]
    assert len(sizes) == 1 + sum(n > 0 for n in going)
    assert sizes[1:] == [n for n in going if n]


def test_stop_ids_are_those_of_both_configs_and_the_tokenizer(tmp_path: Path) -> None:
    config = tiny_configs()["llama"].to_dict() | {"eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = SimpleNamespace(eos_token_id=3)
    assert stop_ids(Pretrained.open(tmp_path), None) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    assert stop_ids(Pretrained.open(tmp_path), None) == (5, 7, 9)
    assert stop_ids(Pretrained.open(tmp_path), tokenizer) == (3, 5, 7, 9)


def test_no_prompts_give_no_completions() -> None:
    assert sampler_of(tiny_configs()["llama"]).sample([], SamplingParams()) == []


def test_each_token_is_drawn_by_its_own_number() -> None:
    """With equal logits the id is the number times the vocabulary's size."""
    config = tiny_configs()["llama"]
    sampler = sampler_of(config)
    weights = {
        n: torch.zeros_like(w) if "lm_head" in n else w
        for n, w in tiny_model(config).state_dict().items()
    }
    sampler.refill(weights.items())
    params = SamplingParams(samples=3, max_new_tokens=9, seed=4, step=21)
    for c in sampler.sample(some_prompts(), params):
        row, sample = np.array([c.row]), np.array([c.sample])
        numbers = [uniforms(4, 21, row, sample, position)[0] for position in range(9)]
        assert list(c.ids) == [int(u * VOCAB) for u in numbers]


def test_static_batches_hold_every_row_once_within_the_budget() -> None:
    lengths = {3: 10, 5: 40, 8: 10, 9: 1}
    for budget in (1, 60, 200, 10**6):
        batches = plan_static_batches(lengths, 6, 5, budget)
        rows = [row for batch in batches for row in batch]
        assert sorted(rows) == [(i, sample) for i in sorted(lengths) for sample in range(6)]
        for batch in batches:
            assert len(batch) == 1 or len(batch) * (max(lengths[i] for i, _ in batch) + 5) <= budget


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
        CheckpointError,
        match=r"(?s)transformer.wte: not a.*k_proj.bias: shape \[3\], expected.*norm.*missing",
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
    weights = {
        name: w for name, w in tiny_model(config).state_dict().items() if name != "lm_head.weight"
    }
    params = SamplingParams(samples=2, max_new_tokens=5)
    expected = sampler.sample(some_prompts(), params)
    for head in ({}, {"lm_head.weight": torch.full((VOCAB, 64), 9.0)}):
        sampler.refill({**weights, **head}.items())
        assert sampler.sample(some_prompts(), params) == expected
    sampler.refill([("lm_head.weight", weights.pop("model.embed_tokens.weight")), *weights.items()])
    assert sampler.sample(some_prompts(), params) == expected, (
        "a checkpoint may list the head alone"
    )


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
    with pytest.raises(
        ModelError, match=f"65 with max_new_tokens=15; beyond {MAX_POSITIONS} positions"
    ):
        sampler.sample(prompts, SamplingParams(max_new_tokens=MAX_POSITIONS - 49))


def test_prompts_that_cannot_be_continued_are_refused() -> None:
    sampler = sampler_of(tiny_configs()["llama"])
    with pytest.raises(DataError, match="row 4 has no tokens"):
        sampler.sample([TokenPrompt(4, [])], SamplingParams())
    for bad in (VOCAB, -1):
        with pytest.raises(
            DataError, match=f"row 2 has the id {bad}; this model has ids 0 to {VOCAB - 1}"
        ):
            sampler.sample([TokenPrompt(2, [1, bad])], SamplingParams())


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
    assert sampling_layout(spec, Layout.parse("pp=2,dp=3")) == Layout(tp=2, dp=3)
    odd = spec_from_config(
        tiny_configs()["llama"].to_dict() | {"num_attention_heads": 4, "num_key_value_heads": 4}
    )
    with pytest.raises(
        LayoutError,
        match=r"layout tp=4,pp=2: the sampler runs pipeline ranks as tp=8; .*use one of tp=1, 2, 4",
    ):
        sampling_layout(odd, Layout(tp=4, pp=2))
