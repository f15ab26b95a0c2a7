"""MLPs by tiles of tokens: gradients are those of the whole, memory is not."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dovetail.errors import ModelError
from dovetail.nn.tiling import Tiled, tile_mlps
from tests.helpers.head_memory import Storages
from tests.helpers.tiled import make, tokens
from tests.helpers.tolerances import EXACT, SUM_ORDER, assert_close

FAMILIES = ("llama_biases", "apertus")  # gated, plain


def gradients(run: nn.Module, mlp: nn.Module, x: Tensor, up: Tensor) -> dict[str, Tensor]:
    y = run(x)
    y.backward(up)
    found = {name: p.grad for name, p in mlp.named_parameters() if p.grad is not None}
    if x.grad is not None:
        found["x"] = x.grad
    mlp.zero_grad()
    x.grad = None
    return {"y": y.detach(), **found}


@pytest.mark.parametrize(("family", "n"), list(product(FAMILIES, (0, 1, 3, 4, 5, 13))))
def test_edge_case_45_gradients_are_those_of_the_whole(family: str, n: int) -> None:
    mlp = make(family)
    x, up = tokens(n, mlp)
    whole, tiled = (gradients(run, mlp, x, up) for run in (mlp, Tiled(mlp, 4)))
    assert whole.keys() == tiled.keys()
    for name in whole:
        assert_close(tiled[name], whole[name], SUM_ORDER, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_edge_case_45_frozen_weights_and_an_input_without_gradient(family: str) -> None:
    mlp = make(family)
    x, up = tokens(9, mlp)
    for frozen in [["down_proj.weight"], [name for name, _ in mlp.named_parameters()]]:
        for name, parameter in mlp.named_parameters():
            parameter.requires_grad_(name not in frozen)
        whole, tiled = (gradients(run, mlp, x, up) for run in (mlp, Tiled(mlp, 4)))
        assert whole.keys() == tiled.keys() and "x" in whole and not set(frozen) & set(whole)
        for name in whole:
            assert_close(tiled[name], whole[name], SUM_ORDER, name)
    mlp.requires_grad_()
    whole, tiled = (gradients(run, mlp, x.detach(), up) for run in (mlp, Tiled(mlp, 4)))
    assert whole.keys() == tiled.keys() and "x" not in whole
    for name in whole:
        assert_close(tiled[name], whole[name], SUM_ORDER, name)


def test_names_stay() -> None:
    mlp = make("apertus")
    assert Tiled(mlp, 4).state_dict().keys() == mlp.state_dict().keys()


def test_half_precision_is_summed_in_the_wide_dtype() -> None:
    """The gradient is the rounding of an exact sum: one rounding, however many tiles."""
    mlp = make("llama_biases", torch.bfloat16)
    x, up = tokens(64, mlp)
    parts = [
        gradients(mlp, mlp, a.detach(), b) for a, b in zip(x.split(4), up.split(4), strict=True)
    ]
    tiled = gradients(Tiled(mlp, 4), mlp, x, up)
    for name in dict(mlp.named_parameters()):
        narrow, wide = torch.zeros_like(parts[0][name]), torch.zeros(parts[0][name].shape)
        for part in parts:
            narrow += part[name]
            wide += part[name]
        assert_close(tiled[name], wide.to(torch.bfloat16), EXACT, name)
        assert not torch.equal(tiled[name], narrow)


@contextmanager
def counted(mlp: nn.Module) -> Iterator[list[int]]:
    seen: list[int] = []
    handle = mlp.register_forward_hook(lambda _module, args, _y: seen.append(len(args[0])))
    yield seen
    handle.remove()


@pytest.mark.parametrize("recompute", [False, True])
def test_an_mlp_runs_twice_at_most(recompute: bool) -> None:
    """Also where the block around it is computed again."""
    mlp = make("llama_biases")
    norm, tiled = nn.LayerNorm(64, dtype=torch.float64), Tiled(mlp, 4)

    def block(x: Tensor) -> Tensor:
        return x + tiled(norm(x))

    x, up = tokens(10, mlp)
    with counted(mlp) as seen:
        (checkpoint(block, x, use_reentrant=False) if recompute else block(x)).backward(up)
    assert sum(seen) == 20 and max(seen) == 4
    found = x.grad
    x.grad = None
    (x + mlp(norm(x))).backward(up)
    assert found is not None and x.grad is not None
    assert_close(found, x.grad, SUM_ORDER)


def test_memory_falls() -> None:
    """What backward needs is the input alone, and the peak is that of a tile beside input, output and gradients."""
    mlp = make("llama_biases", torch.float32)
    x, up = tokens(512, mlp)
    saved: dict[str, int] = {}
    peak: dict[str, int] = {}
    for name, run in (("whole", mlp), ("tiled", Tiled(mlp, 16))):
        kept: dict[int, int] = {}
        with saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):  # noqa: B023
            y = run(x)
        saved[name] = sum(kept.values()) - sum(kept.get(p.data_ptr(), 0) for p in mlp.parameters())
        del y
        with Storages(x, up, *mlp.parameters()) as storages:
            run(x).backward(up)
        peak[name] = storages.peak
        mlp.zero_grad()
        x.grad = None
    weights = sum(p.nbytes for p in mlp.parameters())
    assert saved["tiled"] == x.nbytes < 0.2 * saved["whole"]
    assert peak["tiled"] < 3 * x.nbytes + 3 * weights < 0.6 * peak["whole"], (peak, weights)


def test_a_model_without_dense_mlps_is_refused() -> None:
    with pytest.raises(ModelError, match="mlp_tile_tokens=8, but the model has no MLP"):
        tile_mlps(nn.Sequential(nn.Linear(2, 2)), 8)
