"""No micro-batch has the host wait for the device: shown on the meta device, which has no numbers that it could wait for.

On meta tensors `.item()`, `.tolist()`, `bool`, `nonzero`, boolean masks and copies to the host raise, as all do that on a
GPU wait until everything before is computed. What goes the other way does not raise, so a dispatch mode looks for it:
a copy from pageable memory waits too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.engines import layout_of
from dovetail.arch.registry import spec_from_config, ulysses_degree
from dovetail.batch.loss import Loss, LossFn, TokenStats
from dovetail.batch.micro import ContextShard, MicroBatch
from dovetail.batch.packed import PackedBatch
from dovetail.batch.routing import Routes
from dovetail.engine.expert_routing import BalanceSettings, Routing
from dovetail.engine.stage import Sums, add_sums
from dovetail.kernels.registry import KernelSet
from dovetail.nn.activation_checkpoint import Recompute
from dovetail.nn.decoder import Decoder, Head
from dovetail.nn.layers import GradAccumulator, WgradQueue
from dovetail.nn.tiling import tile_mlps
from dovetail.parallel import collectives
from dovetail.parallel.axes import Axis, ContextAxes
from dovetail.parallel.mesh import Mesh
from dovetail.rl.algorithms.ppo import ValueLoss
from dovetail.rl.algorithms.sft import SFTLoss
from dovetail.rl.losses import PolicyLoss, weight_fields
from tests.helpers.parity_configs import VOCAB, moe_configs, tiny_configs

FAMILIES = ("llama_tied", "qwen2_window", "llama_dynamic", "qwen2_yarn", "apertus")
EXPERTS = ("deepseek_v2", "deepseek_v3", "mixtral", "qwen2_moe")
LOSSES: dict[str, tuple[Head, LossFn]] = {
    "sft": ("lm", SFTLoss()),
    "grpo": ("lm", PolicyLoss(clip_high=0.28, kl_coef=0.05)),
    "ppo": ("lm", PolicyLoss(dual_clip=3.0, entropy_coef=0.01, kl_coef=0.1, kl_estimator="k2")),
    "gspo": ("lm", PolicyLoss(ratio="sequence")),
    "value": ("value", ValueLoss()),
}


class NoCopiesFromTheHost(TorchDispatchMode):
    """Raises where memory of the host goes to the device and the host waits for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [
            x
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor) and x.device.type == "cpu" and x.dim()
        ]
        lands = [
            x for x in tree_leaves(result) if isinstance(x, Tensor) and x.device.type == "meta"
        ]
        waits = not kwargs.get("non_blocking") and not (
            func is torch.ops.aten.copy_.default and args[2:] == (True,)
        )
        assert not (given and lands and waits), (
            f"{func} takes {[tuple(x.shape) for x in given]} from the host"
        )
        return result


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The shapes of one launch that asks the host for nothing."""
    assert len(offsets) == len(weight)
    return x @ weight.sum(0)


SOLO = Mesh.solo()


def decoder(family: str, head: Head, recompute: Recompute = "none", mesh: Mesh = SOLO) -> Decoder:
    config = (tiny_configs() | moe_configs())[family]
    kernels = replace(KernelSet(), grouped_mm=grouped_mm)
    with torch.device("meta"):
        made = Decoder(spec_from_config(config.to_dict()), mesh, kernels, head, recompute)
    for part in made.modules():
        if isinstance(part, GradAccumulator):
            part.wgrad_queue = WgradQueue()
    return made


def micro_batches(model: Decoder, loss: LossFn) -> list[MicroBatch]:
    """Two of a step, on the device, as the engine makes them before its first forward pass."""
    names = ("advantage", "old_logprob", "reference_logprob", "return", "old_value")
    mesh, pairs = model.mesh, []
    share = ContextShard(mesh["cp"].rank, mesh["cp"].size, ulysses_degree(model.spec, mesh.layout))
    for lengths in ((9, 1, 30), (17,)):
        batch = PackedBatch.pack([[i % VOCAB for i in range(n)] for n in lengths])
        batch = batch.with_fields(**{name: torch.randn(len(batch)) for name in names})
        batch = batch.with_fields(
            **weight_fields(batch, "sequence"), temperature=torch.ones(len(batch))
        )
        with NoCopiesFromTheHost():
            micro = MicroBatch.of(batch, 8 * mesh.token_multiple, share).to("meta")
        pairs.append((torch.arange(len(batch), device="meta"), replace(micro, routes=Routes())))
    routing = Routing.of(model, mesh, BalanceSettings(aux_coef=0.1))
    if routing is not None:
        routing.settings = BalanceSettings()  # its count is asked for once a step, here
        with NoCopiesFromTheHost():
            pairs = list(routing.with_balance(pairs, loss, 1, torch.float32))
        for _, micro in pairs:
            assert micro.routes is not None and micro.routes.balance is not None
            micro.routes.balance = replace(
                micro.routes.balance, aux_coef=0.1, z_coef=0.1, weight=1.0
            )
    return [micro for _, micro in pairs]


def step(model: Decoder, loss: LossFn) -> Sums:
    micros, sums = micro_batches(model, loss), Sums()
    with NoCopiesFromTheHost():
        for micro in micros:
            value = model(micro, loss)
            assert isinstance(value, Loss)
            add_sums(sums, value)
            value.total.backward()
    return sums


@pytest.mark.parametrize(
    ("family", "loss"),
    [
        *product(("qwen3",), LOSSES),
        *(
            pytest.param("qwen3_moe", name, marks=[pytest.mark.soak] * (name != "grpo"))
            for name in LOSSES
        ),
        *((name, "sft") for name in (*FAMILIES[:3], *EXPERTS[1::2])),
        *(
            pytest.param(name, "sft", marks=pytest.mark.soak)
            for name in (*FAMILIES[3:], *EXPERTS[::2])
        ),
    ],
)
def test_a_micro_batch_never_waits(family: str, loss: str) -> None:
    head, fn = LOSSES[loss]
    model = decoder(family, head)
    sums = step(model, fn)
    assert all(x.device.type == "meta" for pair in sums.values() for x in pair)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        ("qwen3", "selective"),
        ("qwen3_moe", "full"),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (("qwen3", "full"), ("qwen3_moe", "selective"))
        ),
    ],
)
def test_neither_does_one_that_is_recomputed(family: str, recompute: Recompute) -> None:
    step(decoder(family, "lm", recompute), SFTLoss())


def test_nor_one_with_tiles() -> None:
    model = decoder("qwen3", "lm")
    tile_mlps(model, 8)
    step(model, SFTLoss())


@pytest.mark.parametrize("head", ["lm", "value"])
def test_nor_does_scoring(head: Head) -> None:
    model = decoder("qwen3_moe", head)
    micros = micro_batches(model, SFTLoss())
    with torch.no_grad(), NoCopiesFromTheHost():
        for micro in micros:
            found = model(micro)
            assert isinstance(found, TokenStats if head == "lm" else Tensor)


def one_of_many(text: str) -> Mesh:
    """The mesh of the last rank, with all axes and nobody at their other ends."""
    layout = layout_of(f"{text},dp=1")
    mesh = Mesh.abstract(layout, layout.num_ranks - 1)
    cp, tp = mesh["cp"], mesh["tp"]
    context = {
        u: ContextAxes(Axis("ulysses", u, cp.rank % u), Axis("gather", cp.size // u, cp.rank // u))
        for u in (1, 2, 4)
        if cp.size % u == 0
    }
    return replace(
        mesh, context=context, copies={n: Axis("copies", n, tp.rank % n) for n in (1, 2, 4)}
    )


@contextmanager
def nobody_else() -> Iterator[Mapping[str, mock.Mock]]:
    """Collectives over ranks that are not there: what comes has its shape, and no numbers."""
    with ExitStack() as patches:
        yield {
            name: patches.enter_context(mock.patch.object(owner, name))
            for owner, name in (
                (collectives, "_FLAT_GATHER"),
                (collectives, "_FLAT_SCATTER"),
                (dist, "all_to_all_single"),
                (dist, "all_reduce"),
            )
        }


@pytest.mark.parametrize(
    ("text", "family", "loss", "called"),
    [
        ("tp=2", "qwen3", "grpo", {"_FLAT_GATHER", "_FLAT_SCATTER"}),
        ("tp=4", "llama_tied", "gspo", {"_FLAT_GATHER", "_FLAT_SCATTER"}),
        ("tp=2", "deepseek_v3", "value", {"_FLAT_GATHER", "_FLAT_SCATTER", "all_reduce"}),
        ("cp=2,cp_mode=gather", "qwen3", "grpo", {"_FLAT_GATHER", "all_to_all_single"}),
        ("cp=2,cp_mode=ulysses", "qwen3", "gspo", {"all_to_all_single", "all_reduce"}),
        (
            "tp=2,cp=2",
            "qwen3_moe",
            "sft",
            {"_FLAT_GATHER", "_FLAT_SCATTER", "all_to_all_single", "all_reduce"},
        ),
    ],
)
def test_nor_one_that_other_ranks_take_part_in(
    text: str, family: str, loss: str, called: set[str]
) -> None:
    """Neither does anything lie on the host that other ranks are sent: meta tensors and others do not mix."""
    head, fn = LOSSES[loss]
    model = decoder(family, head, mesh=one_of_many(text))
    with nobody_else() as calls:
        step(model, fn)
    assert {name for name, call in calls.items() if call.called} == called
    assert all(
        x.device.type == "meta"
        for call in calls.values()
        for each in call.call_args_list
        for x in each.args
    )


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "bincount": lambda x: x.long().bincount(minlength=4),
    "unique": lambda x: x.unique(),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: x + torch.ones(len(x)).to(x.device),
    "new values": lambda x: x + torch.tensor([1.0] * len(x), device=x.device),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_noticed(name: str) -> None:
    """The tests above fail for a model that does this."""

    class Waiting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            WAITS[name](x)
            return x

    model = decoder("qwen3", "lm")
    model.model.norm.register_forward_hook(lambda _module, _inputs, x: Waiting()(x[:, 0]) and None)
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
        step(model, SFTLoss())
