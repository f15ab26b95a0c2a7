"""Gated and grouped matrix products by quack (quack-kernels, extra `fa4`), on Hopper and Blackwell.

pairs: columns of a gate-up product, gate and up of each feature; weights have gates first. starts, int32 [E + 1]: of the
experts' rows. source: a row's row of x. The dynamic scheduler avoids SMs that NCCL occupies.
"""

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dovetail.kernels import cuda

INTERFACE = "quack.gemm_interface"
CONFIGS = "quack.gemm_config"
EPILOGUE = "dovetail.kernels.quack_epilogue"  # importing it needs the package
ALIGNMENT = 16  # bytes
MULTIPLE = 8  # bf16 numbers in ALIGNMENT
Tiles = tuple[int, int, bool]  # rows, columns, pingpong
WIDE: Tiles = (128, 256, False)  # for a long inner dimension: 3.17 ms, by default 3.56
SCALED: Tiles = (128, 128, True)  # of scaled and reduced results: 1.53 ms, by default 2.68
GATES_FIRST = "B"  # gates, then ups


def takes(x: Tensor, *weights: Tensor) -> bool:
    widths = (n for operand in (x[:0], *weights) for n in operand.shape)
    aligned = (
        y.dtype == torch.bfloat16 and y.numel() and y.data_ptr() % ALIGNMENT == 0
        for y in (x, *weights)
    )
    return all(aligned) and not any(n % MULTIPLE for n in widths)


@torch.library.custom_op("dovetail::gated_product_into", mutates_args=("gated",))
def gated_product_into(
    x: Tensor,
    weight: Tensor,
    gated: Tensor,
    starts: Tensor | None = None,
    source: Tensor | None = None,
) -> Tensor:
    """x [n, D], weight [2F, D] (or by expert) -> pairs [n, 2F]; writes silu(gate) up to `gated` [n, F].

    Activation checkpointing that keeps the result must keep what reads `gated`.
    """
    pairs: Tensor = _swiglu_product(x, weight, starts, source, postact_out=gated)[0]
    return pairs


@gated_product_into.register_fake
def _pairs_shape(x: Tensor, weight: Tensor, gated: Tensor, *_: Tensor | None) -> Tensor:
    return x.new_empty(len(gated), weight.shape[-2])


def gated(
    x: Tensor, weight: Tensor, starts: Tensor | None = None, source: Tensor | None = None
) -> Tensor:
    return _swiglu_product(x, weight, starts, source, store_preact=False)[1]


def _swiglu_product(
    x: Tensor, weight: Tensor, starts: Tensor | None, source: Tensor | None, **options: Any
) -> Any:
    return _package().gemm_act(
        x,
        weight.mT,
        activation="swiglu",
        cu_seqlens_m=starts,
        A_idx=source,
        concat_layout=(GATES_FIRST,),
        dynamic_scheduler=starts is None,
        tuned=False,
        **options,
    )


def gated_gradient(
    dy: Tensor,
    weight: Tensor,
    pairs: Tensor,
    starts: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradient of scale (silu(gate) up) weight.T [n, D], weight [D, F] (or by expert).

    -> d_pairs; scale silu(gate) up [n, F]; the scale's gradient, float32 [n].
    """
    d_pairs, gated, *d_scale = _package().gemm_dact(
        dy,
        weight,
        pairs,
        activation="swiglu",
        colvec_scale=scale,
        colvec_reduce=scale is not None,
        cu_seqlens_m=starts,
        dynamic_scheduler=starts is None,
        tuned=False,
        config=None if scale is None else _config(dy.device, SCALED),
    )
    return d_pairs, gated, d_scale[0] if scale is not None else None


@torch.library.custom_op("dovetail::grouped_product", mutates_args=())
def grouped_product(x: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """x [n, D], weight [E, F, D] -> x weight[e].T [n, F] by expert."""
    y: Tensor = _package().gemm(x, weight.mT, cu_seqlens_m=starts, tuned=False)
    return y


@grouped_product.register_fake
def _product_shape(x: Tensor, weight: Tensor, _starts: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


def input_gradient(d_pairs: Tensor, weight: Tensor, starts: Tensor | None = None) -> Tensor:
    dx = d_pairs.new_empty(len(d_pairs), weight.shape[-1])
    dense = starts is None
    config = _config(dx.device, WIDE) if dense else None
    options = {"concat_layout": (GATES_FIRST,), "config": config, "dynamic_scheduler": dense}
    _write(dx, d_pairs, weight, cu_seqlens_m=starts, **options)
    return dx


def product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    _write(out, a, b, config=_config(out.device, WIDE), dynamic_scheduler=True)


def add_weight_grad_(
    total: Tensor, dz: Tensor, x: Tensor, *, first: bool = False, pairs: bool = False
) -> None:
    """pairs: of a gate-up product, total [2F, D], dz [n, 2F]."""
    if first or total.dtype == torch.float32:  # the epilogue adds in the sum's dtype
        concat: tuple[str, ...] | None = ("out",) if pairs else None
        _write(
            total, dz.T, x, concat_layout=concat, add_to_output=not first, dynamic_scheduler=True
        )
    else:
        concat = ("C", "out") if pairs else None
        _package().gemm_add_inplace(
            dz.T, x, total, concat_layout=concat, dynamic_scheduler=True, tuned=False
        )


add_joint_grad_ = partial(add_weight_grad_, pairs=True)


def add_grouped_grad_(
    total: Tensor,
    dz: Tensor,
    x: Tensor,
    *,
    starts: Tensor,
    first: bool = False,
    pairs: bool = False,
) -> None:
    """total[e] += dz.T x over expert e's rows."""
    options = {
        "cu_seqlens_k": starts,
        "concat_layout": ("out",) if pairs else None,
        "dynamic_scheduler": True,
    }
    _write(total, dz.T, x, add_to_output=not first, **options)


add_grouped_joint_grad_ = partial(add_grouped_grad_, pairs=True)


def _write(out: Tensor, a: Tensor, b: Tensor, **options: Any) -> None:
    _package().gemm_tuned.fn(a, b, out, **options)


def _config(device: torch.device, tiles: Tiles) -> Any:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != cuda.HOPPER:
        return None
    rows, columns, pingpong = tiles
    make = importlib.import_module(CONFIGS).GemmConfig
    options = {"is_dynamic_persistent": False, "device_capacity": cuda.HOPPER}
    return make(tile_m=rows, tile_n=columns, pingpong=pingpong, **options)


def _package() -> Any:
    return importlib.import_module(INTERFACE)
