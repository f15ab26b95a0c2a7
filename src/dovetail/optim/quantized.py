"""AdamW with moments of 8 bits, by torchao (https://arxiv.org/abs/2110.02861), in blocks of a local shard.

Checkpoints have the moments' values, for any layout, and each rank's scales: the same shards get the same bits again.
"""

import hashlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.kernels.reference import wide
from dovetail.optim.adamw import MOMENTS, Groups, Stored
from dovetail.optim.elementwise import STEP, Elementwise, Layout
from dovetail.optim.muon import Held
from dovetail.recipe.optimizers import require_torchao

BLOCK = 256  # elements of a scale; torchao's default
TINY = 1e-12


def adamw8bit() -> Any:
    require_torchao()
    return importlib.import_module("torchao.optim").AdamW8bit


class QuantizedAdamW(Elementwise):
    def __init__(
        self, groups: Groups, held: Sequence[Held], block_size: int = BLOCK, **options: Any
    ) -> None:
        for each in held:
            if (
                each.local.dim() > 1
                and each.local[0].numel() % block_size
                and any(r.copies > 1 for r in each.regions)
            ):
                raise ConfigError(
                    f"optim.name=adamw8bit: {each.name} has key-value heads that several ranks hold, in rows that blocks of "
                    f"{block_size} do not divide, so their copies would differ; lower layout.tp, or set optim.name=adamw"
                )
        names = repr(
            [(r.checkpoint_name, r.checkpoint_slice) for each in held for r in each.regions]
        )
        self._shards = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
        self._params = [each.local for each in held]
        cls = adamw8bit()
        layout = Layout(dict.fromkeys(MOMENTS, torch.float32), {STEP: torch.zeros(())})
        super().__init__(
            groups,
            lambda g: cls(g, block_size=block_size, **options),
            ("lr", "weight_decay"),
            layout,
        )

    def step(self, closure: Any = None) -> Any:
        """torchao compiles its update, which takes longer than it saves on a CPU."""
        on_host = not self._params or self._params[0].device.type == "cpu"
        with torch.compiler.set_stance("force_eager") if on_host else nullcontext():
            super().step()

    def _zeros(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        assert self.inner is not None
        make: Any = self.inner
        return {name: make._new_buffer(parameter, name == MOMENTS[0]) for name in MOMENTS}

    def stored(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        held = super().stored(parameter)
        return {name: _plain(x).to("cpu", parameter.dtype, copy=True) for name, x in held.items()}

    def resident(self) -> Iterator[Tensor]:
        held: Iterator[Any] = super().resident()
        for x in held:
            yield from (
                (x,)
                if type(x) is Tensor
                else (getattr(x, name) for name in x.__tensor_flatten__()[0])
            )

    def others(self) -> dict[str, Tensor]:
        """Scales, under a name for exactly these shards."""
        scales = {name: [state.scale for _, state in self._quantized(name)] for name in MOMENTS}
        return {self._key(name): torch.cat(own).cpu() for name, own in scales.items() if own}

    def restored(self, stored: Stored, others: Mapping[str, Tensor]) -> None:
        """The scales restore the codes: neighboring codes differ by more than rounding."""
        for parameter, tensors in stored.items():
            for name, values in tensors.items():
                self.state[parameter][name].copy_(values.to(parameter.device, wide(values.dtype)))
        for name in MOMENTS:
            scales = others.get(self._key(name))
            at = 0
            for parameter, state in self._quantized(name) if scales is not None else ():
                assert scales is not None
                state.scale.copy_(scales[at : at + state.scale.numel()])
                at += state.scale.numel()
                values = (
                    stored[parameter][name]
                    .to(state.scale.device, torch.float32)
                    .view(len(state.scale), -1)
                )
                between = (state.qmap[1:] + state.qmap[:-1]) / 2
                codes = torch.bucketize(values / state.scale[:, None].clamp(min=TINY), between)
                state.codes.copy_(codes.view(state.codes.shape))

    def _key(self, name: str) -> str:
        return f"{name}_scale/{self._shards}"

    def _quantized(self, name: str) -> Iterator[tuple[nn.Parameter, Any]]:
        """Moments of fewer than 4096 elements, or not of whole blocks, are not quantized."""
        for parameter in self._params:
            if (x := self.state.get(parameter, {}).get(name)) is not None and type(x) is not Tensor:
                yield parameter, x


def _plain(x: Any) -> Tensor:
    values: Tensor = x if type(x) is Tensor else x.dequantize()
    return values
