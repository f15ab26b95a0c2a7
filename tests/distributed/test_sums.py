"""FSDP takes the sums of weight gradients as they are: no micro-batch's is copied, and each weight has one sum a step."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen3MoeConfig

from dovetail.batch.packed import PackedBatch
from dovetail.engine.fsdp import ReshardPolicy
from dovetail.engine.native import Engine
from dovetail.factory.engine import EngineOptions, from_pretrained
from dovetail.kernels.reference import add_weight_grad_
from dovetail.kernels.registry import KernelSet
from dovetail.nn.layers import GradAccumulator, Linear
from dovetail.nn.products import Products
from dovetail.parallel.layout import Layout
from tests.helpers.harness import run
from tests.helpers.parity_configs import VOCAB, tiny_model
from tests.helpers.parity_reference import objective
from tests.helpers.probe import PROBE, gradients
from tests.helpers.tolerances import HALF_SHARE, SUM_ORDER, worst_error

BUDGET = 16  # tokens of a micro-batch
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "tied": lambda: Qwen2Config(**SMALL, tie_word_embeddings=True),
    "experts": lambda: Qwen3MoeConfig(
        **SMALL,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        tie_word_embeddings=False,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        tiny_model(config()).save_pretrained(folder / name)
    return folder


def batch_of(dtype: torch.dtype) -> PackedBatch:
    """So many tokens that each of two replicas has several micro-batches."""
    draw = torch.Generator().manual_seed(0)
    batch = PackedBatch.pack(
        [torch.randint(VOCAB, (n,), generator=draw) for n in (12, 7, 16, 9, 14, 11, 3, 15)]
    )
    w0, w1 = torch.randn(2, len(batch), generator=draw).to(dtype)
    return batch.with_fields(w0=w0, w1=w1)


def engine_of(path: Path, layout: Layout, dtype: torch.dtype, budget: int | None) -> Engine:
    options = EngineOptions(optim=PROBE, tokens_per_batch=budget)
    made = from_pretrained(path, layout=layout, dtype=dtype, device="cpu", options=options)
    assert isinstance(made, Engine)
    return made


class Sums:
    """The kernel, which notes what it adds to."""

    def __init__(self) -> None:
        self.starts = 0
        self.dtypes: set[torch.dtype] = set()
        self.adds = 0

    def __call__(self, total: Tensor, dz: Tensor, x: Tensor, *, first: bool = False) -> None:
        self.starts, self.adds = self.starts + first, self.adds + 1
        self.dtypes.add(total.dtype)
        add_weight_grad_(total, dz, x, first=first)


def counted(path: Path, layout: Layout) -> tuple[int, int, int, int, set[torch.dtype]]:
    """Products of a model, micro-batches of a step, sums that it started, gradients that it added, and their types."""
    engine, sums = engine_of(path, layout, torch.bfloat16, BUDGET), Sums()
    for part in engine.model.modules():
        if isinstance(part, Linear):
            part.products = Products(replace(KernelSet(), add_weight_grad_=sums))
    batch = batch_of(torch.float32)
    engine.train_step(batch, objective)
    products = sum(isinstance(part, Linear) for part in engine.model.modules())
    return products, len(list(engine.micro_batches(batch))), sums.starts, sums.adds, sums.dtypes


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2)], ids=str)
def test_each_weight_has_one_sum_a_step(folder: Path, layout: Layout) -> None:
    for products, micros, starts, adds, dtypes in run(
        layout.num_ranks, counted, folder / "tied", layout
    ):
        assert micros > 1
        assert (starts, adds, dtypes) == (products, products * micros, {torch.float32})


def compared(path: Path, layout: Layout) -> dict[str, float]:
    """How far gradients are from those of one micro-batch and of autograd, in float64 and in bfloat16."""
    batch, found = batch_of(torch.float64), {}
    whole = engine_of(path, layout, torch.float64, None)
    whole.train_step(batch, objective)
    exact = gradients(whole)[0]
    for name, dtype in (("float64", torch.float64), ("bfloat16", torch.bfloat16)):
        for kind in ("added", "autograd"):
            engine = engine_of(path, layout, dtype, BUDGET)
            assert engine.optimizer.steps == 0  # so that it adds
            if kind == "autograd":
                for part in engine.model.modules():
                    if isinstance(part, GradAccumulator):
                        part.wgrad_queue = None
            engine.train_step(
                batch_of(torch.float64 if dtype == torch.float64 else torch.float32), objective
            )
            flat = {key: value.to(torch.float64) for key, value in gradients(engine)[0].items()}
            found[f"{name} {kind}"] = worst_error(flat, exact)[0]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_sums_are_as_near_as_those_of_autograd(folder: Path, name: str) -> None:
    for found in run(2, compared, folder / name, Layout(dp=2)):
        assert max(found["float64 added"], found["float64 autograd"]) <= SUM_ORDER
        assert found["bfloat16 added"] <= HALF_SHARE * found["bfloat16 autograd"]


def resident(path: Path, layout: Layout) -> dict[str, float]:
    """How far each way of keeping things whole between micro-batches is from the one of a host, and what is left gathered."""
    found: dict[str, float] = {}
    exact: dict[str, Tensor] = {}
    for residency in (
        ReshardPolicy(False, True),
        ReshardPolicy(True, True),
        ReshardPolicy(False, False),
    ):
        engine = engine_of(path, layout, torch.float64, BUDGET)
        engine.reshard_policy = residency
        before = engine.score(batch_of(torch.float64)).logprob
        engine.train_step(batch_of(torch.float64), objective)
        assert torch.equal(
            before, engine.score(batch_of(torch.float64)).logprob
        )  # at learning rate 0
        assert all(isinstance(parameter, DTensor) for parameter in engine.model.parameters())
        flat = gradients(engine)[0]
        exact = exact or flat
        found[str(residency)] = worst_error(flat, exact)[0]
    return found


@pytest.mark.parametrize(
    "layout", [pytest.param(Layout(dp=2), marks=pytest.mark.soak), Layout(dp=2, ep=2)], ids=str
)
def test_what_stays_whole_changes_no_gradient(folder: Path, layout: Layout) -> None:
    for found in run(2, resident, folder / "experts", layout):
        assert len(found) == 3
        assert max(found.values()) <= SUM_ORDER


def gathers(path: Path, layout: Layout, *, again: bool, tiles: int) -> tuple[int, int, int]:
    """Groups of parameters, and how often a step of one micro-batch gathers one where parameters may stay, and where not."""
    options = EngineOptions(
        optim=PROBE, recompute="selective" if again else "none", mlp_tile_tokens=tiles
    )
    engine = from_pretrained(
        path, layout=layout, dtype=torch.float64, device="cpu", options=options
    )
    assert isinstance(engine, Engine)
    groups, found, batch = (
        sum(isinstance(part, FSDPModule) for part in engine.model.modules()),
        [0, 0],
        batch_of(torch.float64),
    )
    original = DefaultAllGather.__call__
    for i, gathered in enumerate((True, False)):
        engine.reshard_policy = ReshardPolicy(gathered, True)

        def counting(*given: Any, i: int = i, **named: Any) -> Any:
            found[i] += 1
            return original(*given, **named)

        with mock.patch.object(DefaultAllGather, "__call__", counting):
            engine.train_step(batch, objective)
        assert all(isinstance(parameter, DTensor) for parameter in engine.model.parameters())
    return groups, found[0], found[1]


@pytest.mark.parametrize(("again", "tiles"), [(False, 0), (True, 0), (False, 16)])
def test_one_micro_batch_gathers_once_where_blocks_spare_no_memory(
    folder: Path, again: bool, tiles: int
) -> None:
    for groups, may, may_not in run(
        2, gathers, folder / "tied", Layout(dp=2), again=again, tiles=tiles
    ):
        assert may_not > groups
        assert may == (may_not if again or tiles else groups)


@pytest.mark.parametrize(
    ("billions", "gib", "expected"),
    [
        (7.6, 140, ReshardPolicy(True, True)),
        (7.6, 80, ReshardPolicy(False, False)),
        (14.8, 140, ReshardPolicy(False, False)),
        (8.0, 94, ReshardPolicy(False, True)),
        (70.0, None, ReshardPolicy(False, True)),
    ],
)
def test_what_a_device_may_keep_whole(
    billions: float, gib: int | None, expected: ReshardPolicy
) -> None:
    """At most a third of it: weights in bfloat16 and sums in float32."""
    memory = None if gib is None else gib << 30
    assert ReshardPolicy.within(int(billions * 1e9), 2, 4, memory) == expected
