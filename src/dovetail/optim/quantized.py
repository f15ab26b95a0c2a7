"""AdamW with moments of 8 bits, by torchao, in blocks of a local shard.

https://arxiv.org/abs/2110.02861

Checkpoints have the moments' values, for any layout, and each rank's scales, so that the same
shards get the same bits again.
"""

import hashlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.kernels.reference import wide
from dovetail.optim.adamw import MOMENTS, Groups, Stored
from dovetail.optim.elementwise import STEP, Elementwise, Layout
from dovetail.optim.matrices import LocalShard
from dovetail.recipe.optimizers import require_torchao

BLOCK = 256  # elements of a scale; torchao's default
TINY = 1e-12


def adamw8bit() -> Any:
    """Return torchao's class. ConfigError without torchao."""
    require_torchao()
    return importlib.import_module("torchao.optim").AdamW8bit


class QuantizedAdamW(Elementwise):
    """torchao's AdamW8bit over the shards of a model."""

    def __init__(
        self, groups: Groups, shards: Sequence[LocalShard], block_size: int = BLOCK, **options: Any
    ) -> None:
        slices = []
        for shard in shards:
            _check_copies(shard, block_size)
            regions = shard.regions
            slices += [(each.checkpoint_name, each.checkpoint_slice) for each in regions]
        names = repr(slices).encode()
        self._digest = hashlib.blake2b(names, digest_size=8).hexdigest()
        self._params = [shard.local for shard in shards]
        make = partial(adamw8bit(), block_size=block_size, **options)
        dtypes = dict.fromkeys(MOMENTS, torch.float32)
        layout = Layout(dtypes, {STEP: torch.zeros(())})
        super().__init__(groups, make, ("lr", "weight_decay"), layout)

    def step(self, closure: Any = None) -> Any:
        """Update all parameters.

        torchao compiles that, which takes longer than it saves on a CPU.
        """
        on_host = not self._params or self._params[0].device.type == "cpu"
        with torch.compiler.set_stance("force_eager") if on_host else nullcontext():
            super().step()

    def _zeros(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        assert self.inner is not None
        make: Any = self.inner
        return {name: make._new_buffer(parameter, name == MOMENTS[0]) for name in MOMENTS}

    def stored(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        values = {}
        for name, x in super().stored(parameter).items():
            value = _dequantized(x)
            values[name] = value.to("cpu", parameter.dtype, copy=True)
        return values

    def resident(self) -> Iterator[Tensor]:
        moments: Iterator[Any] = super().resident()
        for x in moments:
            if type(x) is Tensor:
                yield x
            else:
                names, _ = x.__tensor_flatten__()
                for name in names:
                    yield getattr(x, name)

    def others(self) -> dict[str, Tensor]:
        """Return the scales, under a name for exactly these shards."""
        named = {}
        for name in MOMENTS:
            scales = [state.scale for _, state in self._quantized(name)]
            if scales:
                named[self._key(name)] = torch.cat(scales).cpu()
        return named

    def restored(self, stored: Stored, others: Mapping[str, Tensor]) -> None:
        """Quantize the values; the scales restore the codes, which differ by more than rounding."""
        for parameter, tensors in stored.items():
            for name, values in tensors.items():
                values = values.to(parameter.device, wide(values.dtype))
                self.state[parameter][name].copy_(values)
        for name in MOMENTS:
            scales = others.get(self._key(name))
            if scales is None:
                continue
            start = 0
            for parameter, state in self._quantized(name):
                scale = state.scale
                end = start + scale.numel()
                scale.copy_(scales[start:end])
                start = end
                values = stored[parameter][name]
                values = values.to(scale.device, torch.float32)
                divisor = scale[:, None].clamp(min=TINY)
                scaled = values.view(len(scale), -1) / divisor
                steps = state.qmap
                between = (steps[1:] + steps[:-1]) / 2
                codes = torch.bucketize(scaled, between)
                state.codes.copy_(codes.view(state.codes.shape))

    def _key(self, name: str) -> str:
        return f"{name}_scale/{self._digest}"

    def _quantized(self, name: str) -> Iterator[tuple[nn.Parameter, Any]]:
        """Yield parameters and quantized moments: those of 4096 elements or more in whole blocks."""
        for parameter in self._params:
            state = self.state.get(parameter, {})
            x = state.get(name)
            if x is not None and type(x) is not Tensor:
                yield parameter, x


def _check_copies(shard: LocalShard, block_size: int) -> None:
    """Raise ConfigError where a block has rows that other ranks hold too, and other rows."""
    local = shard.local
    copied = any(region.copies > 1 for region in shard.regions)
    if copied and local.dim() > 1 and local[0].numel() % block_size:
        raise ConfigError(
            f"optim.name=adamw8bit: {shard.name} has key-value heads that several ranks hold, in "
            "rows "
            f"that blocks of {block_size} do not divide, so their copies would differ; "
            "lower layout.tp, or set optim.name=adamw"
        )


def _dequantized(x: Any) -> Tensor:
    return x if type(x) is Tensor else x.dequantize()
