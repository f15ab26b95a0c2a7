"""What NCCL asks of a collective and gloo does not, or says less plainly: checked around all that a test sends over gloo.

Tensors are dense in row-major order and of a type that NCCL knows; a message has at least one element; all ranks of a group
are in the same collective with the same dtype and sizes, and each sends what another expects; what is on its way is waited for,
and what is being sent stays as it is until then.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.parallel import collectives

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
DTYPES = frozenset((*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64))
_ALL_REDUCE = dist.all_reduce  # as it is: the checks themselves are not checked
COLLECTIVES = (
    *(
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
    ),
    *("all_to_all_single", "all_reduce"),
)
MESSAGES = ("isend", "irecv")


class RuleBroken(AssertionError):
    """Something that NCCL refuses, or hangs on, or gets wrong."""


class Handle(dist.Work):  # FSDP2 waits for what is one
    """A transfer under way, and a copy of what it reads."""

    def __init__(self, name: str, work: Any, read: Sequence[Tensor]) -> None:
        super().__init__()
        self.name, self.work, self.done = name, work, False
        self.read = [(x, x.clone()) for x in read]

    def wait(self, *_: Any) -> bool:
        self.work.wait()
        self._end()
        return True

    def is_completed(self) -> bool:
        if self.work.is_completed():
            self._end()
        return self.done

    def _end(self) -> None:
        if not self.done and not all(torch.equal(x, before) for x, before in self.read):
            raise RuleBroken(f"{self.name}: written to while it was sent")
        self.done = True


class Rules:
    """Goes around the functions of torch.distributed. `seen`: how often each was called."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.handles: list[Handle] = []

    def around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.seen[name] = self.seen.get(name, 0) + 1
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            for x in tensors:
                _check(name, x, message=name in MESSAGES)
            splits = [x for x in (*args, *kwargs.values()) if isinstance(x, list)]
            if name not in MESSAGES:
                _agree(name, tensors, splits, kwargs.get("group"))
            work = original(*args, **kwargs)
            if name not in MESSAGES and not kwargs.get("async_op"):
                return work
            self.handles.append(Handle(name, work, [] if name == "irecv" else tensors[-1:]))
            return self.handles[-1]

        return checked


def _check(name: str, x: Tensor, *, message: bool) -> None:
    what = f"{name} of {x.dtype} {list(x.shape)}"
    if not x.is_contiguous():
        raise RuleBroken(f"{what}: not contiguous, its strides are {x.stride()}")
    if x.dtype not in DTYPES:
        raise RuleBroken(f"{what}: NCCL does not know the type")
    if message and not x.numel():
        raise RuleBroken(f"{what}: an empty message")


def _agree(
    name: str,
    tensors: Sequence[Tensor],
    splits: Sequence[list[int]],
    group: dist.ProcessGroup | None,
) -> None:
    """All ranks are here with the same; of rows that each counts for each, both ends count alike."""
    what = f"{name} of {[(x.dtype, list(x.shape[1:] if splits else x.shape)) for x in tensors]}"
    digest = torch.tensor([zlib.crc32(what.encode()), bool(splits)])
    both = torch.stack((digest, -digest))
    _ALL_REDUCE(
        both, dist.ReduceOp.MAX, group
    )  # the largest, and the smallest: less work than to tell everything
    if splits or not torch.equal(both[0], -both[1]):
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (what, splits), group=group)
        if len({what for what, _ in everyone}) > 1:
            raise RuleBroken(f"ranks differ: {[what for what, _ in everyone]}")
        coming, going = zip(*(counts for _, counts in everyone), strict=True)
        if [list(row) for row in zip(*going, strict=True)] != list(coming):
            raise RuleBroken(f"{name}: ranks send {going} rows to each other and expect {coming}")


@contextmanager
def kept() -> Iterator[Rules]:
    """Raises `RuleBroken` where this rank breaks a rule; at the end, where it never waited for something."""
    rules = Rules()
    with ExitStack() as patches:
        for name in (*COLLECTIVES, *MESSAGES):
            if name in vars(dist):
                patches.enter_context(
                    mock.patch.object(dist, name, rules.around(name, vars(dist)[name]))
                )
        for name, flat in (
            ("_FLAT_GATHER", "all_gather_single"),
            ("_FLAT_SCATTER", "reduce_scatter_single"),
        ):
            patches.enter_context(
                mock.patch.object(collectives, name, rules.around(flat, vars(collectives)[name]))
            )
        yield rules
    left = [handle.name for handle in rules.handles if not handle.done]
    if left:
        raise RuleBroken(f"never waited for: {left}")
