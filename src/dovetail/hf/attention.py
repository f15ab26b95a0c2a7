"""Attention of transformers' layers over packed sequences."""

from typing import Any

from torch import Tensor, nn

from dovetail.errors import ModelError
from dovetail.nn.attention import BatchAttention

# computed, or without effect
KNOWN = frozenset(
    (
        "context",
        "sliding_window",
        "dropout",
        "is_causal",
        "position_ids",
        "cache_position",
        "use_cache",
        "return_dict",
    )
)


class Window(int):
    """A window's width as a mask: some models pass it in no other way."""

    def __getattr__(self, name: str) -> Any:
        raise ModelError(
            f"the model changes its attention masks ({name}), which packed attention does not "
            "compute"
        )


def window_mask(*_: object, local_size: int | None = None, **__: object) -> Window | None:
    """Return the mask of a layer, in place of transformers' function."""
    return None if local_size is None else Window(local_size)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Window | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention [1, t, H, Cv] and None, in place of transformers' function.

    query [1, H, t, C], key [1, G, t, C], value [1, G, t, Cv]. ModelError.
    """
    context: BatchAttention | None = options.get("context")
    name = type(module).__name__
    if context is None:
        raise ModelError(
            f"{name} does not hand arguments on to attention, so packed sequences would mix"
        )
    window = attention_mask if isinstance(attention_mask, Window) else None
    mask = None if window else attention_mask
    passed = {"attention_mask": mask, **options}
    unknown = []
    for option, value_passed in passed.items():
        if option not in KNOWN and value_passed is not None and value_passed is not False:
            unknown.append(option)
    if unknown:
        raise ModelError(
            f"{name} calls attention with {', '.join(unknown)}, which packed attention does not "
            "compute"
        )
    q = query[0].transpose(0, 1)
    k = key[0].transpose(0, 1)
    v = value[0].transpose(0, 1)
    width = q.shape[-1]
    if scaling is not None and scaling != width**-0.5:
        q = q * (scaling * width**0.5)
    out = context.attend(q, k, v, options.get("sliding_window") or window)
    return out.contiguous()[None], None  # some models view it
