"""Packed attention in transformers' registries. Sequence boundaries come as the argument `context` of the forward pass;
no mask is made."""

from typing import Any

import transformers
from torch import Tensor, nn

from dovetail.errors import ModelError
from dovetail.nn.attention import BatchAttention

NAME = "dovetail"
# Arguments that it computes or may ignore.
KNOWN = frozenset(
    ("context", "sliding_window", "dropout", "is_causal", "position_ids", "cache_position", "use_cache", "return_dict")
)


class Window(int):
    """A sliding window's width as its mask: some models pass it in no other way."""

    def __getattr__(self, name: str) -> Any:
        raise ModelError(f"the model changes its attention masks ({name}), which packed attention does not compute")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Window | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, H, t, C], key [1, G, t, C], value [1, G, t, Cv] -> [1, t, H, Cv], None. Unknown options are refused."""
    context: BatchAttention | None = options.get("context")
    name = type(module).__name__
    if context is None:
        raise ModelError(
            f"{name} does not hand arguments of the forward pass on to attention, so packed sequences would not be kept apart"
        )
    window = attention_mask if isinstance(attention_mask, Window) else None
    passed = {"attention_mask": None if window else attention_mask, **options}
    unknown = [option for option, x in passed.items() if not (option in KNOWN or x is None or x is False)]
    if unknown:
        raise ModelError(f"{name} calls attention with {', '.join(unknown)}, which packed attention does not compute")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [t, heads, C]
    width = q.shape[-1]
    if scaling is not None and scaling != width**-0.5:
        q = q * (scaling * width**0.5)
    out = context.attend(q, k, v, options.get("sliding_window") or window)
    return out.contiguous()[None], None  # some models view it


def mask(*_: object, local_size: int | None = None, **__: object) -> Window | None:
    return None if local_size is None else Window(local_size)


def register() -> None:
    if NAME not in transformers.AttentionInterface():
        transformers.AttentionInterface.register(NAME, attention)
        transformers.AttentionMaskInterface.register(NAME, mask)
