"""Matrix products that gate their results and gather their rows, by quack (the package quack-kernels, which the extra `fa4`
brings along), on Hopper and Blackwell.

A joint product of gate and up returns its columns in pairs, gate and up of one feature side by side; its weight and that
weight's gradient stay as the checkpoint has them, gates first. Products are grouped where `starts` are given, int32 [E + 1]:
expert e's rows are those from starts[e] to starts[e + 1]. `source` names the row of x that each row of the product takes.

Dense products and those of weight gradients hand their tiles out as SMs become free: collectives beside them hold some, and
what was dealt to these ahead would wait until they end. Nothing of the package is imported before `usable` asks. The operations
have names and shapes, so that a checkpoint can keep what they return.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from dovetail.kernels import extras
from dovetail.kernels.extras import HOPPER

INTERFACE = "quack.gemm_interface"
CONFIGS = "quack.gemm_config"
EPILOGUE = "dovetail.kernels.quack_epilogue"  # ours, whose import needs the package
ALIGNMENT = 16  # bytes
MULTIPLE = 8  # bf16 numbers in as many
Tiles = tuple[int, int, bool]  # rows, columns, and whether two groups of warps take turns
# Of a long inner dimension: 3.17 ms and, in a head, 12.1, where the package's choice takes 3.56 and 13.3.
WIDE: Tiles = (128, 256, False)
SCALED: Tiles = (128, 128, True)  # of results that are scaled and summed as well: 1.53 ms for 2.68
GATES_FIRST = "B"  # of a weight [K, 2F] whose columns are gates, then ups


def usable(device: torch.device) -> bool:
    """Whether the package is there, whole, and has kernels for this device."""
    return extras.usable(INTERFACE, "quack-kernels", device)


def takes(x: Tensor, *weights: Tensor) -> bool:
    """Whether dense products of x with these weights are of a kind that the package computes."""
    given = (x, *weights)
    widths = (n for one in (x[:0], *weights) for n in one.shape)
    whole = all(one.dtype == torch.bfloat16 and one.data_ptr() % ALIGNMENT == 0 for one in given)
    return whole and all(one.numel() for one in given) and not any(n % MULTIPLE for n in widths)


@torch.library.custom_op("dovetail::gated_product_into", mutates_args=("gated",))
def gated_product_into(
    x: Tensor, weight: Tensor, gated: Tensor, starts: Tensor | None = None, source: Tensor | None = None
) -> Tensor:
    """x [n, D], weight [2F, D] (or of each expert) -> gates and ups in pairs [n, 2F]; silu(gate) up goes into `gated` [n, F].

    A checkpoint that keeps what this returns does not keep `gated`, and leaves it unwritten where it would repeat this: its
    reader has to be an operation that is kept as well.
    """
    both: Tensor = _package().gemm_act(
        x,
        weight.mT,
        activation="swiglu",
        postact_out=gated,
        cu_seqlens_m=starts,
        A_idx=source,
        concat_layout=(GATES_FIRST,),
        dynamic_scheduler=starts is None,
        tuned=False,
    )[0]
    return both


@gated_product_into.register_fake
def _both_shape(x: Tensor, weight: Tensor, gated: Tensor, *_: Tensor | None) -> Tensor:
    return x.new_empty(len(gated), weight.shape[-2])


def gated(x: Tensor, weight: Tensor, starts: Tensor | None = None, source: Tensor | None = None) -> Tensor:
    """x [n, D], weight [2F, D] (or of each expert) -> silu(gate) up [n, F] alone."""
    y: Tensor = _package().gemm_act(
        x,
        weight.mT,
        activation="swiglu",
        cu_seqlens_m=starts,
        A_idx=source,
        store_preact=False,
        concat_layout=(GATES_FIRST,),
        dynamic_scheduler=starts is None,
        tuned=False,
    )[1]
    return y


def gated_gradient(
    dy: Tensor, weight: Tensor, both: Tensor, starts: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a product of silu(gate) up with `weight` [D, F] (or of each expert) asks of its input, scaled by row.

    dy [n, D], both [n, 2F] in pairs, scale float32 [n] -> the gradient of `both`, in pairs; scale silu(gate) up [n, F], which
    the weight's gradient needs; and, where there is a scale, its gradient, float32 [n].
    """
    found = _package().gemm_dact(
        dy,
        weight,
        both,
        activation="swiglu",
        colvec_scale=scale,
        colvec_reduce=scale is not None,
        cu_seqlens_m=starts,
        dynamic_scheduler=starts is None,
        tuned=False,
        config=None if scale is None else _tiles(dy.device, SCALED),
    )
    return found[0], found[1], found[2] if scale is not None else None


@torch.library.custom_op("dovetail::grouped_product", mutates_args=())
def grouped_product(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """x [n, D], weight [E, F, D] -> x weight[e].T [n, F] by expert."""
    y: Tensor = _package().gemm(x, weight.mT, cu_seqlens_m=starts, tuned=False)
    return y


@grouped_product.register_fake
def _product_shape(x: Tensor, weight: Tensor, _starts: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


def input_gradient(d_both: Tensor, weight: Tensor, starts: Tensor | None = None) -> Tensor:
    """A joint product's, [n, D]: d_both [n, 2F] in pairs, weight [2F, D] (or of each expert), gates first."""
    dx = d_both.new_empty(len(d_both), weight.shape[-1])
    tiles = _tiles(dx.device, WIDE) if starts is None else None
    dense = starts is None
    _write(dx, d_both, weight, cu_seqlens_m=starts, concat_layout=(GATES_FIRST,), config=tiles, dynamic_scheduler=dense)
    return dx


def product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [n, D] = a [n, K] b [K, D], for a long K."""
    _write(out, a, b, config=_tiles(out.device, WIDE), dynamic_scheduler=True)


def add_joint_grad_(total: Tensor, d_both: Tensor, x: Tensor, *, first: bool = False) -> None:
    """As `reference.add_weight_grad_` of a joint product: total [2F, D], gates first, += d_both.T x; d_both in pairs."""
    _add(total, d_both.T, x, first, ("C", "out"))


def add_weight_grad_(total: Tensor, dz: Tensor, x: Tensor, *, first: bool = False) -> None:
    """As `reference.add_weight_grad_`."""
    _add(total, dz.T, x, first)


def add_grouped_grad_(total: Tensor, dz: Tensor, x: Tensor, *, starts: Tensor, first: bool = False) -> None:
    """For every expert total[e] [D, F] += dz.T x over its rows, in the dtype of the sum: dz [n, D], x [n, F].

    The first one finds nothing in total; of an expert without rows it writes zeros.
    """
    _write(total, dz.T, x, cu_seqlens_k=starts, add_to_output=not first, dynamic_scheduler=True)


def add_grouped_joint_grad_(total: Tensor, d_both: Tensor, x: Tensor, *, starts: Tensor, first: bool = False) -> None:
    """The same of a joint product: total[e] [2F, D], gates first; d_both [n, 2F] in pairs, x [n, D]."""
    how = {"cu_seqlens_k": starts, "concat_layout": ("out",), "dynamic_scheduler": True}
    _write(total, d_both.T, x, add_to_output=not first, **how)


def _add(total: Tensor, a: Tensor, b: Tensor, first: bool, concat: tuple[str, str] | None = None) -> None:
    """total = a b, or total += a b. Each element is added to once, so equal inputs give equal bits."""
    if first or total.dtype == torch.float32:  # what memory itself adds, it adds in the dtype of the sum
        _write(total, a, b, concat_layout=concat and concat[1:], add_to_output=not first, dynamic_scheduler=True)
    else:
        _package().gemm_add_inplace(a, b, total, concat_layout=concat, dynamic_scheduler=True, tuned=False)


def _write(out: Tensor, a: Tensor, b: Tensor, **how: Any) -> None:
    """out = a b."""
    _package().gemm_tuned.fn(a, b, out, **how)


def _tiles(device: torch.device, tiles: Tiles) -> Any:
    """How a product is cut, where the package's own choice was measured to be slower; None: its own choice."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return None
    rows, columns, pingpong = tiles
    config = importlib.import_module(CONFIGS).GemmConfig
    return config(tile_m=rows, tile_n=columns, pingpong=pingpong, is_dynamic_persistent=False, device_capacity=HOPPER)


def _package() -> Any:
    return importlib.import_module(INTERFACE)
