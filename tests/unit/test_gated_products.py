"""A gated MLP whose products gate inside: the gradients of the plain one, what it keeps, and when the plain one is taken."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dovetail.arch.registry import spec_from_config
from dovetail.factory.engine import make_decoder
from dovetail.kernels import cuda, quack
from dovetail.kernels.registry import KernelSet, kernels_for
from dovetail.nn.activation_checkpoint import Recompute
from dovetail.nn.layers import GradAccumulator, WgradQueue
from dovetail.nn.mlp import GatedMLP
from dovetail.nn.tiling import Tiled
from dovetail.parallel.axes import Axis
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.native import NativeSampler
from tests.helpers.blocks import Blocks
from tests.helpers.parity_configs import tiny_configs
from tests.helpers.quack_stand_in import StandIn, everywhere, in_pairs, installed
from tests.helpers.tolerances import SUM_ORDER, assert_all_close

MICROS = (13, 1, 8)  # tokens
WIDTH, FFN = 64, 96
WEIGHTS = ("gate_up_proj", "down_proj")


@pytest.fixture(autouse=True)
def package() -> Iterator[StandIn]:
    with installed() as module:
        yield module


def accumulating(model: nn.Module) -> WgradQueue:
    queue = WgradQueue()
    for part in model.modules():
        if isinstance(part, GradAccumulator):
            part.wgrad_queue = queue
    return queue


def make(kernels: KernelSet, *, biased: bool = False, adds: bool = True) -> GatedMLP:
    spec = spec_from_config(tiny_configs()["llama_biases" if biased else "llama"].to_dict())
    mlp = GatedMLP(replace(spec, width=WIDTH, ffn_width=FFN), Mesh.solo(), kernels).to(
        torch.float64
    )
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw, dtype=torch.float64) / 8)
    if adds:
        accumulating(mlp)
    return mlp


def drawn(tokens: int, seed: int) -> Tensor:
    return torch.randn(
        tokens, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def played(
    run: nn.Module, mlp: GatedMLP, *, learns: bool = True, again: bool = False
) -> dict[str, Tensor]:
    """Outputs and gradients: all forward passes, then all backward passes, latest first."""
    alive = []
    for i, n in enumerate(MICROS):
        x = drawn(n, i).requires_grad_(learns)
        alive.append((x, checkpoint(run, x, use_reentrant=False) if again else run(x)))
    for i, (_, y) in reversed(list(enumerate(alive))):
        y.backward(drawn(len(y), 10 + i))
    found = {name: p.grad for name, p in mlp.named_parameters() if p.grad is not None}
    for i, (x, y) in enumerate(alive):
        found |= {f"y{i}": y.detach()} | ({} if x.grad is None else {f"x{i}": x.grad})
    return found


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_those_of_the_plain_one(package: StandIn, again: bool) -> None:
    plain, gating = make(KernelSet()), make(everywhere())
    expected = played(plain, plain)
    assert not package.calls
    assert_all_close(played(gating, gating, again=again), expected, SUM_ORDER)
    n = len(MICROS)
    assert package.calls == {
        "gate_up": n * (1 + again),
        "gate_up gradient": n,
        "product": n + 2,  # dx, and the first gradient of each weight
        "sum": 2 * (n - 1),
    }


@pytest.mark.parametrize(
    ("frozen", "learns"),
    [f for f in product([(), *((w,) for w in WEIGHTS), WEIGHTS], [True, False]) if any(f)],
)
def test_what_is_frozen_gets_none(package: StandIn, frozen: tuple[str, ...], learns: bool) -> None:
    plain, gating = make(KernelSet()), make(everywhere())
    for mlp in (plain, gating):
        for name in frozen:
            mlp.get_parameter(f"{name}.weight").requires_grad_(False)
    if frozen == WEIGHTS and not learns:
        assert not gating(drawn(5, 0)).requires_grad
        return
    found, expected = played(gating, gating, learns=learns), played(plain, plain, learns=learns)
    assert_all_close(found, expected, SUM_ORDER)
    assert bool(package.calls) == (learns or "gate_up_proj" not in frozen)


def test_deferred_weight_gradients_come_in_their_order() -> None:
    plain, gating = make(KernelSet()), make(everywhere())
    queue = accumulating(gating)
    queue.bucket = "later"
    found = played(gating, gating)
    assert not [name for name in found if "weight" in name]
    rows = [(work.args[0].shape[0], len(work.args[1])) for work in queue.deferred["later"]]  # type: ignore[attr-defined]
    assert rows == [(width, n) for n in reversed(MICROS) for width in (WIDTH, 2 * FFN)]
    queue.flush("later")
    assert not queue.deferred
    found |= {name: p.grad for name, p in gating.named_parameters() if p.grad is not None}
    assert_all_close(found, played(plain, plain), SUM_ORDER)


def test_its_input_and_the_pairs_are_all_that_is_kept() -> None:
    mlp, x, seen = make(everywhere()), drawn(7, 0).requires_grad_(), []

    def pack(kept: Tensor) -> Tensor:
        seen.append(tuple(kept.shape))
        return kept

    with saved_tensors_hooks(pack, lambda kept: kept):
        mlp(x)
    assert seen == [(7, WIDTH), (7, 2 * FFN)]


def test_without_gradients_no_pairs_are_made(package: StandIn) -> None:
    plain, gating = make(KernelSet()), make(everywhere(), adds=False)
    with torch.no_grad():
        found, expected = gating(drawn(7, 0)), plain(drawn(7, 0))
    assert_all_close({"y": found}, {"y": expected}, SUM_ORDER)
    assert package.calls == {"gated": 1}


@pytest.mark.parametrize("kept_out", ["adds", "biases", "dtype"])
def test_the_plain_one_is_taken(package: StandIn, kept_out: str) -> None:
    """Where autograd is to have the weights' gradients, where there are biases, where the package has no product."""
    kernels = KernelSet(gated=quack) if kept_out == "dtype" else everywhere()
    mlp = make(kernels, adds=kept_out != "adds", biased=kept_out == "biases")
    plain = make(KernelSet(), biased=kept_out == "biases")
    assert_all_close(played(mlp, mlp), played(plain, plain), SUM_ORDER)
    assert not package.calls


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipeline_s_products_are_plain(monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    """What travels between stages holds some of a GPU, and products that count on all of it wait for the rest."""
    monkeypatch.setattr("dovetail.factory.engine.kernels_for", lambda _device: everywhere())
    solo, layout = Mesh.solo(), Layout(pp=stages)
    mesh = replace(solo, layout=layout, axes={**solo.axes, "pp": Axis("pp", stages, 0)})
    decoder = make_decoder(spec_from_config(tiny_configs()["llama"].to_dict()), mesh, torch.float32)
    mlps = [part for part in decoder.modules() if isinstance(part, GatedMLP)]
    assert mlps and all((mlp.gate_up_proj.products.gated is None) == (stages > 1) for mlp in mlps)


@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "taken"),
    [
        (1, 64, torch.bfloat16, True),
        (0, 64, torch.bfloat16, False),
        (3, 60, torch.bfloat16, False),
        (3, 64, torch.float16, False),
    ],
)
def test_what_the_package_takes(tokens: int, width: int, dtype: torch.dtype, taken: bool) -> None:
    x, joint, down = (
        torch.zeros(*shape, dtype=dtype) for shape in ((tokens, width), (96, width), (width, 48))
    )
    assert quack.takes(x, joint, down) == taken
    assert not quack.takes(x, joint, down.to(torch.float32))
    assert not quack.takes(x, joint, down[:, :-4])
    assert not quack.takes(x, joint.flatten()[4 : 4 + 8 * width].view(8, width), down), (
        "no multiple of 16 bytes"
    )


def test_tiles_add_theirs(package: StandIn) -> None:
    plain, gating = make(KernelSet()), make(everywhere())
    assert_all_close(played(Tiled(gating, 4), gating), played(plain, plain), SUM_ORDER)
    assert package.calls["gated"] == package.calls["gate_up"] == sum(-(-n // 4) for n in MICROS)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("recompute", ["none", "light", "selective", "full"])
def test_what_runs_again(package: StandIn, recompute: Recompute, offload: bool) -> None:
    """No product at the light level, and at none the one that a block ends with."""
    plain, gating = Blocks(), Blocks(everywhere())
    found = []
    for blocks, level in ((plain, "none"), (gating, "none"), (gating, recompute)):
        model = blocks.trunk(level, offload=offload and level != "none")  # type: ignore[arg-type]  # a Recompute
        accumulating(model)
        package.calls.clear()
        found.append(blocks.gradients(model, 2))
    (expected, _), (_, once), (grads, runs) = found
    assert_all_close(grads, expected, SUM_ORDER)
    again = recompute in ("selective", "full")
    assert runs["product"] == once["product"] + (
        3 * gating.depth if again else 0
    )  # qkv, o, and gate and up
    assert package.calls["gate_up"] == 2 * gating.depth * (1 + again)


def test_the_light_level_keeps_no_gated_values() -> None:
    x, weight = drawn(5, 0), drawn(2 * FFN, 1)
    gated = torch.full((5, FFN), float("nan"), dtype=torch.float64)
    both = torch.ops.dovetail.gated_product_into.default(x, weight, gated)
    assert isinstance(both, Tensor), "what it returns is what is kept"
    want = {"both": x @ in_pairs(weight.T), "gated": KernelSet().swiglu(x @ weight.T)}
    assert_all_close({"both": both, "gated": gated}, want, SUM_ORDER)


def test_a_sampler_s_products_are_plain() -> None:
    spec = spec_from_config(tiny_configs()["llama"].to_dict())
    sampler = NativeSampler(spec, Mesh.solo(), everywhere(), torch.float64)
    mlps = [part for part in sampler.model.modules() if isinstance(part, GatedMLP)]
    assert mlps and all(mlp.gate_up_proj.products.gated is None for mlp in mlps)


def test_who_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for there in ([quack.INTERFACE], [quack.INTERFACE, quack.EPILOGUE]):
        monkeypatch.setattr(cuda, "package_usable", lambda module, *_, there=there: module in there)
        found = kernels_for(torch.device("cuda"))
        assert found.describe()["gated"] == "quack"
        whole = quack.EPILOGUE in there and importlib.util.find_spec("triton") is not None
        assert (found.head is not None) == whole
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert kernels_for(torch.device("cuda")).gated is None
    assert "gated" not in kernels_for(torch.device("cpu")).describe()
