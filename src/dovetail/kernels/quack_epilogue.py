"""The LM head's product with row statistics in its epilogue."""

import hashlib
import math
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, const_expr
from quack.compile_utils import make_fake_tensor
from quack.epilogue.frontend import EpiMod
from quack.epilogue.ops import ColVecLoad, ColVecReduce, ColVecSelect, OnlineLSEReduce
from quack.layout_utils import convert_layout_zero_stride
from torch import Tensor

NEG_INF = -math.inf
LOWEST = torch.finfo(torch.float32).min / 2  # as in the reference
SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
PACKAGE = "quack-kernels"
VERSION = "0.6.5"  # whose epilogue interface this implements
PLANES = 3  # m, s and u of `reference.vocab_stats`

if metadata.version(PACKAGE) != VERSION:
    raise ImportError(
        f"the head's products are made for {PACKAGE} {VERSION}, this is {metadata.version(PACKAGE)}"
    )


class RowStatistics(OnlineLSEReduce):
    """m, s and u by row and tile, float32 [3, rows, tiles]. quack compiles its methods."""

    reduce_planes = PLANES
    host_finalize = None

    def config_key(self) -> tuple[Any, ...]:
        """quack's cache key lacks these methods."""
        return (*super().config_key(), SOURCE)

    def sink_alloc_shape(
        self, lead: tuple[int, ...], n: int, _tile_m: int, tile_n: int, **_: Any
    ) -> tuple[int, ...]:
        return (PLANES, *lead, -(-n // tile_n))

    def host_fake_arg(self, key: tuple[Any, int], fctx: Any) -> Any:
        return make_fake_tensor(
            key[0], (PLANES, fctx.m, cute.sym_int()), leading_dim=1, divisibility=1
        )

    @cute.jit
    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        m, s, *rest = OnlineLSEReduce.begin(self, gemm, param, smem_tensor, ctx)
        return (m, s, cute.make_rmem_tensor(m.layout, Float32), *rest)

    @cute.jit
    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        m, s, u = self._end_loop_values(state, epi_coord)
        if const_expr(epi_coord[1] == 0):
            cute.filter_zeros(m).fill(NEG_INF)
            cute.filter_zeros(s).fill(0.0)
            cute.filter_zeros(u).fill(0.0)
        return (m, s, u, state[4][None, None, None, epi_coord[0], epi_coord[1]], state[5])

    @cute.jit
    def fn_sink_flush(self, gemm: Any, state: Any, frag: Any) -> None:
        m_part, s_part, u_part, coordinates, columns = state
        column = cute.composition(
            cute.make_layout(gemm.cta_tile_shape_mnk[:2], stride=(0, 1)), coordinates.layout
        )
        remaining = columns - coordinates[0][1]
        for i in cutlass.range(cute.size(frag), unroll_full=True):
            at = cute.crd2idx(i, column)
            frag[i] = frag[i] if at < remaining else NEG_INF
        by_row = m_part.layout
        z = convert_layout_zero_stride(frag, by_row)
        m, s, u = (convert_layout_zero_stride(x, by_row)[None, 0] for x in (m_part, s_part, u_part))
        for row in cutlass.range(cute.size(m), unroll_full=True):
            peak = m[row]
            for j in cutlass.range_constexpr(cute.size(z, mode=[1])):
                peak = cute.arch.fmax(peak, z[row, j])
            base = self._guard_neg_inf(peak)
            total = Float32(0.0)
            moment = Float32(0.0)
            for j in cutlass.range_constexpr(cute.size(z, mode=[1])):
                shifted = z[row, j] - base
                weight = cute.math.exp(shifted, fastmath=True)
                total = total + weight
                moment = moment + weight * cute.arch.fmax(shifted, Float32(LOWEST))
            m[row], s[row], u[row] = self._merge((m[row], s[row], u[row]), (peak, total, moment))

    @cute.jit
    def _merge(self, vals: Any, others: Any) -> Any:
        """Either order gives the same bits."""
        first = vals[0] >= others[0]
        m, s, u = (Float32(cutlass.select_(first, x, y)) for x, y in zip(vals, others, strict=True))
        low, low_s, low_u = (
            Float32(cutlass.select_(first, y, x)) for x, y in zip(vals, others, strict=True)
        )
        behind = Float32(cutlass.select_(low == Float32(NEG_INF), Float32(0.0), low - m))
        shrink = cute.math.exp(behind, fastmath=True)
        return (m, s + low_s * shrink, u + shrink * (low_u + low_s * behind))

    @cute.jit
    def _end_loop_values(self, state: Any, epi_coord: Any) -> Any:
        return tuple(x[None, None, None, epi_coord[0], epi_coord[1]] for x in state[:PLANES])

    @cute.jit
    def _end_loop_smem(self, state: Any) -> Any:
        return state[PLANES]

    @cute.jit
    def _finalize(self, vals: Any) -> Any:
        return vals[0]

    @cute.jit
    def end_loop_finish(
        self, gemm: Any, param: Any, staged: Any, tile_coord_mnkl: Any, varlen_manager: Any
    ) -> None:
        values, *rest = staged
        assert rest[2] == 1, "a row's columns are split over several warps"
        for plane in cutlass.range_constexpr(PLANES):
            target = cute.domain_offset((plane, 0, 0), param)
            one = ((values[plane],), *rest)
            ColVecReduce.end_loop_finish(self, gemm, target, one, tile_coord_mnkl, varlen_manager)


TARGETS = ColVecLoad("targets")


def _plain(acc: Any) -> dict[str, Any]:
    return {"D": acc, "planes": acc, "picked": acc}


def _tempered(acc: Any, inverse: Any) -> dict[str, Any]:
    return {"D": acc, "planes": acc * inverse, "picked": acc * inverse}


def _epilogue(function: Callable[..., dict[str, Any]], *columns: str) -> EpiMod:
    sinks = {"planes": RowStatistics("planes"), "picked": ColVecSelect("picked", idx_op=TARGETS)}
    return EpiMod(
        function, outs=sinks, ops={name: ColVecLoad(name) for name in columns}, extra_ops=(TARGETS,)
    )


PLAIN = _epilogue(_plain)
TEMPERED = _epilogue(_tempered, "inverse")


def product(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    inverse: Tensor | None,
    out: tuple[Tensor | None, ...],
    tile: Any,
) -> None:
    """out = (logits x weight.T [n, V] or None, planes [3, n, tiles], picked [n]: logits of local targets).

    inverse [n]: scales planes and picked.
    """
    z, planes, picked = out
    epilogue = {"planes": planes, "picked": picked, "targets": targets}
    if inverse is not None:
        epilogue["inverse"] = inverse[None]
    (PLAIN if inverse is None else TEMPERED).gemm(
        x,
        weight,
        z,
        epi_args=epilogue,
        tile_M=tile[0],
        tile_N=tile[1],
        pingpong=True,  # or the next tile overwrites the targets
        is_dynamic_persistent=True,
        tile_count_semaphore=torch.zeros(1, dtype=torch.int32, device=x.device),
    )
