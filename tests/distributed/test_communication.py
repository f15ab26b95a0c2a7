"""What ranks send is what docs/parallelism.md says: the formulas of its tables against all bytes of a real step.

FSDP2's collectives and the executor's messages are counted where they meet torch.distributed, as are parallel/collectives.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dovetail.arch.spec import ArchSpec, AttentionSpec, RopeSpec
from dovetail.batch.packed import PackedBatch
from dovetail.engine.fsdp import shard_over_data
from dovetail.engine.native import Engine
from dovetail.factory.engine import make_decoder
from dovetail.nn import context_parallel
from dovetail.nn.activation_checkpoint import Recompute
from dovetail.nn.decoder import Head
from dovetail.parallel.axes import Axis
from dovetail.parallel.collectives import gather_mirrored
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.rl.algorithms.ppo import ValueLoss
from dovetail.rl.algorithms.sft import SFTLoss
from dovetail.rl.losses import PolicyLoss, weight_fields
from dovetail.weights.hf_directory import CheckpointSource
from tests.helpers.harness import run
from tests.helpers.traffic import Step, counted, expected

LENGTH = 64  # of each sequence, and of each micro-batch
UNNAMED = (
    "fsdp all_reduce",
    "world all_reduce",
    "world all_gather",
    "pp all_gather",
)  # a step's sums and norm: few numbers


@dataclass(frozen=True)
class Case:
    """A model of 8 heads and its layout."""

    layout: Layout
    kv_heads: int = 4
    depth: int = 1
    micros: int = 1
    recompute: Recompute = "none"
    head: Head = "lm"
    tied: bool = False
    separable: bool = True

    @property
    def spec(self) -> ArchSpec:
        attention = AttentionSpec(num_heads=8, num_kv_heads=self.kv_heads, head_dim=4)
        return ArchSpec(
            family="llama",
            vocab_size=64,
            width=16,
            depth=self.depth,
            ffn_width=32,
            norm_eps=1e-6,
            mixers=(attention,) * self.depth,
            rope=RopeSpec(rotary_dim=4, max_positions=128),
            tie_embeddings=self.tied,
        )

    @property
    def loss(self) -> Any:
        if self.head != "lm":
            return ValueLoss()
        return SFTLoss() if self.separable else PolicyLoss(ratio="sequence")


def measure(case: Case) -> tuple[dict[str, Fraction], Step]:
    """Bytes that this rank sends in one step, and what it did; in bfloat16 with float32 masters."""
    spec, layout = case.spec, case.layout
    mesh = Mesh.build(layout)
    model = make_decoder(spec, mesh, torch.float32, case.head, case.recompute)
    shard_over_data(model, mesh, torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    origin = CheckpointSource(lambda _: None, (), {})
    engine = Engine(model, mesh, origin, tokens_per_batch=LENGTH, dtype=torch.bfloat16)
    batch = PackedBatch.pack([[1] * LENGTH] * (case.micros * mesh["dp"].size))
    zeros = dict.fromkeys(
        ("advantage", "old_logprob", "old_value", "return"), torch.zeros(len(batch))
    )
    batch = batch.with_fields(**zeros, **weight_fields(batch, "token"))
    with counted(mesh) as sent:
        engine.train_step(batch, case.loss)
    micros = [micro for _, micro in engine.micro_batches(batch)]
    step = Step(
        spec,
        layout,
        tokens=LENGTH,
        micros=len(micros),
        counted=len(micros[0].counted),
        all_counted=len(micros[0].all_counted),
        rank=mesh["pp"].rank,
        values=case.head != "lm",
        separable=case.separable,
        recompute=case.recompute != "none",
    )
    return {key: size for key, size in sent.items() if size and not key.startswith(UNNAMED)}, step


def measure_all(cases: Sequence[Case]) -> list[tuple[dict[str, Fraction], Step]]:
    return [measure(case) for case in cases]


CASES = (
    Case(Layout(tp=2)),
    Case(Layout(tp=2), depth=2, tied=True, recompute="full"),
    Case(Layout(tp=2), recompute="selective", separable=False),
    Case(Layout(tp=2), head="value_without_bias"),
    Case(Layout(cp=2, cp_mode="gather"), recompute="full"),
    Case(Layout(cp=2, cp_mode="gather"), kv_heads=1, depth=2, micros=2),
    Case(Layout(cp=2, cp_mode="ulysses"), separable=False),
    Case(Layout(cp=2, cp_mode="ulysses"), kv_heads=1, depth=2, recompute="selective"),
    Case(Layout(dp=2), depth=2, micros=2),
    Case(Layout(dp=2), tied=True),
    Case(Layout(pp=2), depth=3, micros=3, tied=True),
    Case(Layout(pp=2, schedule="zero_bubble"), depth=2, micros=3),
    Case(Layout(pp=2, virtual_stages=2, schedule="interleaved"), depth=5, micros=3),
    Case(Layout(tp=4)),
    Case(Layout(tp=4), kv_heads=2, depth=2),
    Case(Layout(cp=4, cp_mode="gather"), kv_heads=2, depth=2),
    Case(Layout(cp=4, cp_mode="ulysses")),
    Case(Layout(cp=4, cp_mode="ulysses"), kv_heads=2),
    Case(Layout(cp=4, cp_mode="product"), depth=2),
    Case(Layout(cp=4, cp_mode="product"), kv_heads=1),
    Case(Layout(tp=2, cp=2, cp_mode="gather"), kv_heads=1),
    Case(Layout(tp=2, cp=2, cp_mode="ulysses"), kv_heads=1, separable=False),
    Case(Layout(tp=2, dp=2), depth=2, micros=2),
    Case(Layout(pp=2, dp=2), depth=3, micros=3),
    Case(Layout(tp=2, pp=2), depth=2, micros=2, tied=True),
    Case(Layout(tp=4, cp=2, cp_mode="ulysses"), kv_heads=2),
    Case(Layout(tp=2, cp=4, cp_mode="product"), kv_heads=8, depth=2),
    Case(Layout(tp=2, pp=2, cp=2), depth=2, micros=4),
)


def copies(found: dict[str, Fraction]) -> Fraction:
    """What goes between holders of the same heads: on which of the fsdp ranks is a matter of its rows."""
    return sum((found.pop(key) for key in list(found) if key.startswith("copies ")), Fraction())


def differences(results: Sequence[tuple[dict[str, Fraction], Step]]) -> list[str]:
    """Where ranks do not send what the docs say."""
    wrong, of_copies = [], Fraction()
    for rank, (sent, step) in enumerate(results):
        said = expected(step)
        of_copies += copies(sent) - copies(said)
        keys = sorted(key for key in sent.keys() | said.keys() if sent.get(key) != said.get(key))
        wrong += [f"rank {rank} {key}: {sent.get(key)} bytes, not {said.get(key)}" for key in keys]
    return wrong + [f"copies: {of_copies} bytes too many"] * (of_copies != 0)


@pytest.mark.parametrize(
    ("world", "stride"), [(4, 2), *(pytest.param(n, 1, marks=pytest.mark.soak) for n in (2, 4, 8))]
)
def test_every_byte_of_a_step(world: int, stride: int) -> None:
    """Or of every other case: each axis, alone and with another."""
    cases = [case for case in CASES if case.layout.num_ranks == world][::-stride]
    ranks = run(world, measure_all, cases)
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        assert not differences(results), f"{case}: {differences(results)}"


def mutated(case: Case) -> tuple[dict[str, Fraction], Step]:
    """`measure` of a model that gathers one head a second time."""

    def wasteful(x: Tensor, axis: Axis) -> Tensor:
        gather_mirrored(x[:, :1], axis)
        return gather_mirrored(x, axis)

    with mock.patch.object(context_parallel, "gather_mirrored", wasteful):
        return measure(case)


def test_a_byte_too_many_is_noticed() -> None:
    case = Case(Layout(cp=2, cp_mode="gather"))
    assert "gather all_gather forward" in differences(run(2, mutated, case))[0]
