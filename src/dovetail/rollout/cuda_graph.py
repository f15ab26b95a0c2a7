"""Decode steps as CUDA graphs: one launch a step."""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

Step = Callable[[], Any]
Capture = Callable[[Step], Step]


class GraphPool:
    """A memory pool shared by graphs. Torch captures into no pool whose graphs are all gone, so the next begins
    another."""

    def __init__(self, new_handle: Callable[[], Any]) -> None:
        self._new_handle, self._handle = new_handle, None
        self._graphs: WeakSet[Any] = WeakSet()

    def acquire(self, graph: object) -> Any:
        """The pool to capture `graph` into."""
        if not self._graphs:
            self._handle = self._new_handle()
        self._graphs.add(graph)
        return self._handle


class CapturedStep:
    """A function over fixed memory that never synchronizes: run once (which compiles kernels), captured once, then
    replayed. Results are valid until any function of the pool runs again."""

    def __init__(self, fn: Step, pool: GraphPool) -> None:
        self._fn, self._pool = fn, pool
        self._warm = False
        self._captured: tuple[torch.cuda.CUDAGraph, Any] | None = None

    def __call__(self) -> Any:
        if not self._warm:
            self._warm = True
            return self._fn()
        if self._captured is None:
            graph = torch.cuda.CUDAGraph()
            # thread_local: a checkpoint's writer may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool.acquire(self), capture_error_mode="thread_local"):
                result = self._fn()
            self._captured = graph, result
        graph, result = self._captured
        graph.replay()
        return result


def cuda_capture() -> Capture:
    """All graphs share one pool: they never run at once."""
    return partial(CapturedStep, pool=GraphPool(torch.cuda.graph_pool_handle))
