"""Kernels that are compiled before the first step, so that no later step waits for a compiler."""

import time
from collections.abc import Callable, Iterable

from dovetail.arch.registry import ulysses_degree
from dovetail.arch.spec import ArchSpec
from dovetail.engine.base import Engine
from dovetail.engine.native import NativeEngine
from dovetail.kernels import fa4

WORTH_A_LINE = 1.0  # seconds


def compile_kernels(engines: Iterable[Engine], say: Callable[[str], None]) -> None:
    """Compile FlashAttention-4's kernels for the engines that use it. A model of transformers compiles them as it runs."""
    begun = time.perf_counter()
    for engine in engines:
        assert isinstance(engine, NativeEngine)
        spec, layout = engine.model.spec, engine.mesh.layout
        if not isinstance(spec, ArchSpec) or engine.model.kernels.attention is not fa4.attention:
            continue
        a, shares = spec.attention, layout.tp * ulysses_degree(spec, layout)
        heads = (a.num_heads // shares, max(1, a.num_kv_heads // shares))
        dims = (a.latent.key_dim, a.latent.v_dim) if a.latent else (a.head_dim, a.head_dim)
        windowed = any(window is not None for window in a.windows)
        fa4.compile_kernels(heads, dims, windowed, engine.dtype, engine.mesh.device)
    if (seconds := time.perf_counter() - begun) > WORTH_A_LINE:
        say(f"attention kernels compiled in {seconds:.0f} s; later runs on this machine read them from the disk")
