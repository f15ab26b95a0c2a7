"""A step recorded as a CUDA graph: the host says one word a step, where it would launch every kernel."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import torch

T = TypeVar("T")


class GraphCapturer(Protocol):
    """Makes of a function without arguments one that does the same, faster from some call on."""

    def __call__(self, fn: Callable[[], T], /) -> Callable[[], T]: ...


class GraphPool:
    """Memory that records share as long as one of them is there. Torch takes no record into a pool whose records are all
    gone, so the next one then begins another.
    """

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin, self._handle = begin, None
        self._records: WeakSet[Any] = WeakSet()

    def take(self, record: object) -> Any:
        """What a new record is to be made in."""
        if not self._records:
            self._handle = self._begin()
        self._records.add(record)
        return self._handle


class CapturedStep(Generic[T]):
    """A function that works on the same memory at every call, and never asks the device for anything.

    The first call runs it, which compiles its kernels and makes handles; the second records it; every call from then on
    replays the record. What it returns lies in the record's memory until any function of the same pool runs again.
    """

    def __init__(self, fn: Callable[[], T], pool: GraphPool) -> None:
        self._fn, self._pool = fn, pool
        self._seen = False
        self._record: tuple[torch.cuda.CUDAGraph, T] | None = None

    def __call__(self) -> T:
        if not self._seen:
            self._seen = True
            return self._fn()
        if self._record is None:
            graph = torch.cuda.CUDAGraph()
            # other threads, such as one that writes a checkpoint, may go on with theirs
            with torch.cuda.graph(graph, pool=self._pool.take(self), capture_error_mode="thread_local"):
                result = self._fn()
            self._record = graph, result
        graph, result = self._record
        graph.replay()
        return result


def cuda_capturer() -> GraphCapturer:
    """Records of one memory pool: they run one after the other, never at once."""
    pool = GraphPool(torch.cuda.graph_pool_handle)

    def recorder(fn: Callable[[], T], /) -> Callable[[], T]:
        return CapturedStep(fn, pool)

    return recorder
