"""Stands for quack-kernels on a CPU: the functions that `kernels/quack.py` calls, by their parameter names, dense ones alone."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.kernels import quack
from dovetail.kernels.quack import INTERFACE
from dovetail.kernels.registry import KernelSet

Concat = tuple[str, ...]


class StandIn(ModuleType):
    """The module `quack.gemm_interface`, and what was asked of it."""

    def __init__(self) -> None:
        super().__init__(INTERFACE)
        self.calls: Counter[str] = Counter()
        self.gemm_tuned = SimpleNamespace(fn=self._write)  # as the package decorates it

    def gemm_act(
        self,
        A: Tensor,
        B: Tensor,
        *,
        activation: str,
        concat_layout: Concat,
        dynamic_scheduler: bool,
        tuned: bool,
        postact_out: Tensor | None = None,
        store_preact: bool = True,
        **grouped: None,
    ) -> tuple[Tensor | None, Tensor]:
        self.calls["gate_up" if store_preact else "gated"] += 1
        assert not any(grouped.values())
        assert (
            activation == "swiglu" and concat_layout == ("B",) and dynamic_scheduler and not tuned
        )
        both = A @ in_pairs(B)
        gated = F.silu(both[:, ::2]) * both[:, 1::2]
        return both if store_preact else None, gated if postact_out is None else postact_out.copy_(
            gated
        )

    def gemm_dact(
        self,
        A: Tensor,
        B: Tensor,
        PreAct: Tensor,
        *,
        activation: str,
        dynamic_scheduler: bool,
        tuned: bool,
        **grouped: Any,
    ) -> tuple[Tensor, Tensor]:
        self.calls["gate_up gradient"] += 1
        assert activation == "swiglu" and dynamic_scheduler and not tuned and A.is_contiguous()
        assert not any(grouped.values()) and grouped.keys() == {
            "colvec_scale",
            "colvec_reduce",
            "cu_seqlens_m",
            "config",
        }
        gate, up, dy = PreAct[:, ::2], PreAct[:, 1::2], A @ B
        share = gate.sigmoid()
        d_gate = dy * up * share * (1 + gate * (1 - share))
        return torch.stack((d_gate, dy * gate * share), -1).flatten(1), gate * share * up

    def _write(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        cu_seqlens_m: None = None,
        concat_layout: Concat | None = None,
        add_to_output: bool = False,
        config: None = None,
        dynamic_scheduler: bool,
    ) -> None:
        assert cu_seqlens_m is None and config is None and dynamic_scheduler
        self.calls["sum" if add_to_output else "product"] += 1
        y = a @ (in_pairs(b) if concat_layout == ("B",) else b)
        y = gates_first(y) if concat_layout == ("out",) else y
        out.copy_(out + y if add_to_output else y)

    def gemm_add_inplace(
        self,
        A: Tensor,
        B: Tensor,
        out: Tensor,
        *,
        concat_layout: Concat | None,
        dynamic_scheduler: bool,
        tuned: bool,
    ) -> None:
        assert not tuned and concat_layout in (None, ("C", "out"))
        concat = concat_layout and ("out",)
        self._write(
            A, B, out, concat_layout=concat, add_to_output=True, dynamic_scheduler=dynamic_scheduler
        )


def in_pairs(x: Tensor) -> Tensor:
    """Along the dimension in which x does not lie dense: gates and then ups -> one beside the other."""
    dim = int(x.stride(0) == 1)
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


def gates_first(x: Tensor) -> Tensor:
    """Rows in pairs -> gates, then ups."""
    return torch.cat((x[::2], x[1::2]))


def everywhere() -> KernelSet:
    """The reference, with products that gate inside whatever the dtype and the widths."""
    products = ModuleType("quack")
    vars(products).update(vars(quack), takes=lambda *_: True)
    return KernelSet(gated=products)


@contextmanager
def installed() -> Iterator[StandIn]:
    """The package is there, and is this one."""
    with pytest.MonkeyPatch.context() as patch:
        module = StandIn()
        patch.setitem(sys.modules, INTERFACE, module)
        yield module
