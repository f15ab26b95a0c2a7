"""Activation checkpointing by what backward computes again, and offloading of the rest.

light       all but attention and products that the block does not change in place
selective   all but attention
full        everything
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from dovetail.memory import PinnedArena, free_pinned_bytes

Recompute = Literal["none", "light", "selective", "full"]
ATTENTION = ("attention", "varlen_attn")  # in the names of kernels
PRODUCTS = (
    "aten.mm.default",
    "aten.mm.dtype",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._grouped_mm.default",
    "dovetail.gated_product_into.default",
    "dovetail.grouped_product.default",
)


def is_attention(operation: str) -> bool:
    return any(word in operation for word in ATTENTION)


def is_kept(recompute: Recompute, operation: str) -> bool:
    return is_attention(operation) or (recompute == "light" and operation in PRODUCTS)


def runner(recompute: Recompute, host: "PinnedPool | None" = None) -> Callable[..., Any]:
    if recompute == "none" or not torch.is_grad_enabled():
        return lambda block, *arguments: block(*arguments)
    if host is not None:
        return ActivationOffload(host, recompute)
    return partial(checkpoint, **options(recompute))


def options(recompute: Recompute) -> dict[str, Any]:
    out: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute != "full":
        out["context_fn"] = partial(selective_contexts, recompute)
    return out


def selective_contexts(
    recompute: Recompute,
    put: Callable[[Tensor], Any] = lambda x: x,
    get: Callable[[Any], Tensor] = lambda x: x,
) -> tuple["_Keep", "_Reuse"]:
    """Modes of a forward pass and its repetition. put, get: move results of attention."""
    kept: deque[tuple[str, Any]] = deque()
    return _Keep(recompute, kept, put), _Reuse(recompute, kept, get)


class _Mode(TorchDispatchMode):
    def __init__(
        self, recompute: Recompute, kept: deque[tuple[str, Any]], transfer: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.kept = kept
        self.transfer = transfer

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Keep(_Mode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = str(func)
        if not is_kept(self.recompute, name):
            if func._schema.is_mutable:
                self._forget_products(_written_storages(func, args, kwargs))
        elif is_attention(name):
            moved = tree_map_only(Tensor, lambda x: self.transfer(x.detach()), out)
            self.kept.append((name, moved))
        else:
            self.kept.append((name, _Product(out.detach())))
        return out

    def _forget_products(self, changed: set[int]) -> None:
        for _, product in self.kept:
            if isinstance(product, _Product) and product.storage in changed:
                product.x = None


class _Reuse(_Mode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if not is_kept(self.recompute, name):
            return func(*args, **kwargs)
        before, kept = self.kept.popleft()
        assert name == before, f"recomputation runs {name}, where the forward pass ran {before}"
        if not isinstance(kept, _Product):
            kinds = (Tensor, OffloadedTensor)
            return tree_map_only(kinds, lambda x: self.transfer(x).detach(), kept)
        if kept.x is None:
            return func(*args, **kwargs)
        return kept.x.detach()


class _Product:
    """None once the block has changed it."""

    def __init__(self, x: Tensor) -> None:
        self.x: Tensor | None = x
        self.storage = x.untyped_storage()._cdata


def _written_storages(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    arguments = func._schema.arguments
    values = dict(kwargs)
    for argument, value in zip(arguments, args, strict=False):
        values[argument.name] = value
    writable = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    written = [values.get(name) for name in writable]
    return {x.untyped_storage()._cdata for x in tree_leaves(written) if isinstance(x, Tensor)}


class SavedTensor:
    """A handle to what `save_for_backward_early` saved, read once in a backward pass.

    A checkpoint repeats a forward pass until all that it saved is there again. What a function of
    autograd saves is there once its forward has run, so a function that saves its input runs again.
    Here `_SaveEarly` saves the input, where that is made, and the expensive function saves nothing:
    it takes this handle and reads the `saved_tensors` of `_SaveEarly`'s context, `node`.
    """

    node: FunctionCtx

    def get(self) -> Tensor:
        (x,) = self.node.saved_tensors  # type: ignore[attr-defined]  # torch's stubs do not know it
        return x


def save_for_backward_early(x: Tensor) -> tuple[Tensor, SavedTensor]:
    """x and a handle for a later backward: a checkpoint does not repeat a function that saves nothing."""
    saved = SavedTensor()
    return _SaveEarly.apply(x, saved), saved


class _SaveEarly(torch.autograd.Function):
    """forward: x, saved. backward: the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: SavedTensor) -> Tensor:
        ctx.save_for_backward(x)
        saved.node = ctx
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class OffloadedTensor:
    """host: None if it stays. copied: event of the last copy."""

    def __init__(self, x: Tensor, host: Tensor | None, block: int) -> None:
        self.device_tensor: Tensor | None = x
        self.host = host
        self.block = block
        self.copied: Any = None


class PinnedPool:
    """Pinned host memory and a stream for copies. available: bytes left. ranks: that share them."""

    def __init__(
        self,
        device: torch.device,
        *,
        available: Callable[[], int | None] | None = None,
        ranks: int = 1,
    ) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        self.side = None if device.type == "cpu" else self.module.Stream(device)
        self.available = available or (free_pinned_bytes if self.side is not None else lambda: None)
        self.ranks = ranks
        self.free: list[PinnedArena] = []
        self.not_offloaded = 0  # bytes

    def arena(self) -> PinnedArena:
        return self.free.pop() if self.free else PinnedArena(pinned=self.side is not None)

    def allocate(self, arena: PinnedArena, x: Tensor) -> Tensor | None:
        """None if the host has too little memory."""
        if not arena.has(x.nbytes):
            available = self.available()
            if available is not None and not arena.grow(x.nbytes, available // self.ranks):
                self.not_offloaded += x.nbytes
                return None
        strides = torch.empty_like(x, device="meta").stride()  # kernels depend on strides
        return arena.allocate(x.dtype, (x.numel(),)).as_strided(x.shape, strides)

    def copy(self, to: Tensor, source: Tensor) -> Any:
        """Queued after the work so far. Returns an event."""
        if self.side is None:
            to.copy_(source)
            return None
        self.side.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self.side):
            to.copy_(source, non_blocking=True)
            return self.side.record_event()

    def wait(self, copied: Any) -> None:
        if copied is not None:
            self.module.current_stream(self.device).wait_event(copied)


class ActivationOffload:
    """Offloads inputs of blocks and results of attention; fetches them one block ahead."""

    def __init__(self, host: PinnedPool, recompute: Recompute) -> None:
        self.host = host
        self.recompute = recompute
        self.arena = host.arena()
        self.blocks: list[list[OffloadedTensor]] = []
        self.unread = 0

    def __call__(self, block: Callable[..., Tensor], *arguments: Any) -> Tensor:
        for tensor in self.blocks[-1] if self.blocks else ():
            self.host.wait(tensor.copied)
            tensor.device_tensor = None
        self.blocks.append([])
        how = options(self.recompute)
        if "context_fn" in how:
            how["context_fn"] = partial(selective_contexts, self.recompute, self.put, self.get)
        with saved_tensors_hooks(self.put, self.get):  # of the checkpoint's inputs
            out: Tensor = checkpoint(block, *arguments, **how)
        return out

    def put(self, x: Tensor) -> Tensor | OffloadedTensor:
        """Integers stay."""
        if not x.is_floating_point() or x.device.type != self.host.device.type:
            return x
        x = x.detach()
        tensor = OffloadedTensor(x, self.host.allocate(self.arena, x), len(self.blocks) - 1)
        if tensor.host is not None:
            tensor.copied = self.host.copy(tensor.host, x)
            self.blocks[-1].append(tensor)
        self.unread += 1
        return tensor

    def get(self, tensor: Tensor | OffloadedTensor) -> Tensor:
        if isinstance(tensor, Tensor):
            return tensor
        for block in (tensor.block, tensor.block - 1) if tensor.block else (0,):
            for other in self.blocks[block]:
                if other.device_tensor is None:
                    assert other.host is not None
                    other.device_tensor = torch.empty_like(other.host, device=self.host.device)
                    other.copied = self.host.copy(other.device_tensor, other.host)
            self.blocks[block] = []
        self.host.wait(tensor.copied)
        x = tensor.device_tensor
        tensor.device_tensor = None
        assert x is not None
        self.unread -= 1
        if not self.unread:
            self.arena.reset()
            self.host.free.append(self.arena)
        return x
