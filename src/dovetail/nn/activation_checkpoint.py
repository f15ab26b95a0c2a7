"""What a block's backward pass computes again, what it finds kept instead, and where that waits: on the device or the host.

    none        nothing is computed again
    light       all but matrix products and attention: norms, rotations, activations
    selective   all but attention
    full        everything; only the block's input is kept

A product that the block then wrote to, as some of transformers' models do, is computed again.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from dovetail.memory import PinnedArena, host_room

Recompute = Literal["none", "light", "selective", "full"]
ATTENTION = ("attention", "varlen_attn")  # one of them is in the name of every kernel
PRODUCTS = (
    *("aten.mm.default", "aten.mm.dtype", "aten.addmm.default", "aten.bmm.default", "aten._grouped_mm.default"),
    *(f"dovetail.{name}.default" for name in ("gated_product_into", "grouped_product")),
)


def is_attention(operation: str) -> bool:
    """Whether an operation is an attention kernel, by its name."""
    return any(word in operation for word in ATTENTION)


def is_kept(recompute: Recompute, operation: str) -> bool:
    """Whether backward finds what an operation returned, and does not compute it again."""
    return is_attention(operation) or (recompute == "light" and operation in PRODUCTS)


def runner(recompute: Recompute, host: "PinnedPool | None" = None) -> Callable[..., Any]:
    """(block, its arguments) -> its output: how the blocks of one forward pass run, one after another.

    host: where what they keep waits for the backward pass; default: on the device.
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return lambda block, *arguments: block(*arguments)
    if host is not None:
        return ActivationOffload(host, recompute)
    return partial(checkpoint, **options(recompute))


def options(recompute: Recompute) -> dict[str, Any]:
    """Arguments of torch's `checkpoint`. Nothing in a block is random."""
    found: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    return found if recompute == "full" else found | {"context_fn": partial(keeping, recompute)}


def keeping(
    recompute: Recompute,
    put: Callable[[Tensor], Any] = lambda x: x,
    get: Callable[[Any], Tensor] = lambda x: x,
) -> tuple["_Keep", "_Reuse"]:
    """The contexts of a forward pass and of its repetition. What attention returns goes to the second by `put` and `get`;
    products stay where they are, since the last one of a block is kept in vain.
    """
    kept: deque[tuple[str, Any]] = deque()
    return _Keep(recompute, kept, put), _Reuse(recompute, kept, get)


class _Mode(TorchDispatchMode):
    """Sees every operation of a block below autograd."""

    def __init__(self, recompute: Recompute, kept: deque[tuple[str, Any]], carry: Callable[[Any], Any]) -> None:
        super().__init__()
        self.recompute, self.kept, self.carry = recompute, kept, carry

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Keep(_Mode):
    """Puts away what some operations return."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if is_kept(self.recompute, name := str(func)):
            if is_attention(name):
                self.kept.append((name, tree_map_only(Tensor, lambda x: self.carry(x.detach()), found)))
            else:
                self.kept.append((name, Product(found.detach())))
        elif func._schema.is_mutable:
            places = written(func, args, kwargs or {})
            for _, one in self.kept:
                if isinstance(one, Product) and one.place in places:
                    one.x = None
        return found


class _Reuse(_Mode):
    """Finds it again, in the same order."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not is_kept(self.recompute, name := str(func)):
            return func(*args, **(kwargs or {}))
        before, found = self.kept.popleft()
        assert name == before, f"recomputation runs {name}, where the forward pass ran {before}"
        if isinstance(found, Product):
            return func(*args, **(kwargs or {})) if found.x is None else found.x.detach()
        return tree_map_only((Tensor, OffloadedTensor), lambda x: self.carry(x).detach(), found)


class Product:
    """What a product returned; None once the block has written to it. (What attention returns autograd saves, and so it
    raises where a block writes to that.)
    """

    def __init__(self, x: Tensor) -> None:
        self.x: Tensor | None = x
        self.place = place_of(x)


def place_of(x: Tensor) -> int:
    """A number for its memory, whatever view it is of that."""
    return x.untyped_storage()._cdata


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """The places that an operation writes to."""
    arguments = func._schema.arguments
    given = {**{argument.name: x for argument, x in zip(arguments, args, strict=False)}, **kwargs}
    changed = [given.get(each.name) for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return {place_of(x) for x in tree_leaves(changed) if isinstance(x, Tensor)}


class OffloadedTensor:
    """A tensor that backward asks for once: on the device still, or again; on the host; or on its way.

    host: its place there; None where it stays on the device.
    """

    def __init__(self, x: Tensor, host: Tensor | None, block: int) -> None:
        self.here: Tensor | None = x
        self.host, self.block = host, block
        self.copied: Any = None  # the event after the latest copy


class PinnedPool:
    """A stream for copies to and from the host, and the arenas that one pass after another takes and gives back.

    room: how many bytes of the host may be taken still, asked whenever an arena would grow; None: any number. Default:
        what the kernel has; of tensors that are on the host anyway, any number.
    ranks: on this host. All may take memory at the same moment: no arena grows by more than its share of the room.
    """

    def __init__(self, device: torch.device, *, room: Callable[[], int | None] | None = None, ranks: int = 1) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        self.side = None if device.type == "cpu" else self.module.Stream(device)
        self.room = room or (host_room if self.side is not None else lambda: None)
        self.sharers = ranks
        self.free: list[PinnedArena] = []
        self.stayed = 0  # bytes, of all passes, that there was no room for

    def arena(self) -> PinnedArena:
        return self.free.pop() if self.free else PinnedArena(pinned=self.side is not None)

    def place(self, arena: PinnedArena, x: Tensor) -> Tensor | None:
        """Memory of an arena, in the strides of a copy of `x`; None where the host has no room for it."""
        if not arena.has(x.nbytes):
            room = self.room()
            if room is not None and not arena.grow(x.nbytes, room // self.sharers):
                self.stayed += x.nbytes
                return None
        strides = torch.empty_like(x, device="meta").stride()  # kernels look at them, and copies of equal ones are fast
        return arena.allocate(x.dtype, (x.numel(),)).as_strided(x.shape, strides)

    def copy(self, to: Tensor, source: Tensor) -> Any:
        """Copy beside the computation, after all that it was asked to do before; the event says when."""
        if self.side is None:
            to.copy_(source)
            return None
        self.side.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.side):
            to.copy_(source, non_blocking=True)
            return self.side.record_event()

    def wait(self, copied: Any) -> None:
        """Have the computation, not this process, wait for a copy. Memory may be freed or read after that."""
        if copied is not None:
            self.module.current_stream(self.device).wait_event(copied)


class ActivationOffload:
    """What the blocks of one forward pass keep: their inputs, and what attention returned. It leaves for the host while the
    block is computed, and comes back one block before backward needs it. The last block's is needed first, and stays; so does
    what the host has no room for. First come, first placed: that is of the last blocks, whose memory backward frees first.
    """

    def __init__(self, host: PinnedPool, recompute: Recompute) -> None:
        self.host, self.recompute = host, recompute
        self.arena = host.arena()
        self.blocks: list[list[OffloadedTensor]] = []
        self.missing = 0  # how many backward has not asked for yet

    def __call__(self, block: Callable[..., Tensor], *arguments: Any) -> Tensor:
        for one in self.blocks[-1] if self.blocks else ():
            self.host.wait(one.copied)
            one.here = None
        self.blocks.append([])
        given = options(self.recompute)
        if "context_fn" in given:
            given["context_fn"] = partial(keeping, self.recompute, self.put, self.get)
        with saved_tensors_hooks(self.put, self.get):  # of the checkpoint's inputs; inside it has hooks of its own
            found: Tensor = checkpoint(block, *arguments, **given)
        return found

    def put(self, x: Tensor) -> Tensor | OffloadedTensor:
        """Send a tensor on its way, if the host has room for it; states of generators and the like stay."""
        if not x.is_floating_point() or x.device.type != self.host.device.type:
            return x
        x = x.detach()
        one = OffloadedTensor(x, self.host.place(self.arena, x), len(self.blocks) - 1)
        if one.host is not None:
            one.copied = self.host.copy(one.host, x)
            self.blocks[-1].append(one)
        self.missing += 1
        return one

    def get(self, one: Tensor | OffloadedTensor) -> Tensor:
        """The tensor again, after which the one of the block before is on its way."""
        if isinstance(one, Tensor):
            return one
        for block in (one.block, one.block - 1):
            self._fetch(block)
        self.host.wait(one.copied)
        x, one.here = one.here, None
        assert x is not None
        self.missing -= 1
        if not self.missing:
            self.arena.reset()
            self.host.free.append(self.arena)
        return x

    def _fetch(self, block: int) -> None:
        """Have what a block kept come back, all of it at once."""
        if block < 0:
            return
        for one in self.blocks[block]:
            if one.here is None:
                assert one.host is not None
                one.here = torch.empty_like(one.host, device=self.host.device)
                one.copied = self.host.copy(one.here, one.host)
        self.blocks[block] = []
