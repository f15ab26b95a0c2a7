"""Our packed attention under a name of its own in transformers' registries: what a model is told to call.

Sequence boundaries, ranks and kernels come as an argument of the model's forward pass, `context`, which transformers
hands through to every attention layer. Nothing is inferred from positions, and no mask is ever made.
"""

from typing import Any

import transformers
from torch import Tensor, nn

from dovetail.errors import ModelError
from dovetail.nn.context_parallel import BatchAttention

NAME = "dovetail"
# Arguments of attention that change nothing here: ours, its window, and what says how to call rather than what to compute.
KNOWN = frozenset(
    ("context", "sliding_window", "dropout", "is_causal", "position_ids", "cache_position", "use_cache", "return_dict")
)


class Window(int):
    """The mask of a layer whose tokens see this many latest ones: some models say so in no other place."""

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
    """query [1, H, t, C], key [1, G, t, C], value [1, G, t, Cv] of this rank's tokens -> [1, t, H, Cv], and no weights.

    Soft caps, sinks, biases, chosen keys, masks of the model's own: whatever we do not know is refused, never left out.
    """
    context: BatchAttention | None = options.get("context")
    if context is None:
        raise ModelError(
            f"{type(module).__name__} does not hand arguments of the forward pass on to attention, so it cannot be told "
            "where packed sequences begin"
        )
    masked = attention_mask if isinstance(attention_mask, Window) else None
    given = {"attention_mask": None if masked else attention_mask, **options}
    strange = [name for name, value in given.items() if not (name in KNOWN or value is None or value is False)]
    if strange:
        raise ModelError(
            f"{type(module).__name__} calls attention with {', '.join(strange)}, which packed attention does not compute"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [t, heads, C]
    width = q.shape[-1]
    if scaling is not None and scaling != width**-0.5:
        q = q * (scaling * width**0.5)
    found = context.attend(q, k, v, options.get("sliding_window") or masked)
    return found.contiguous()[None], None  # some models view it: transformers' own functions return no other


def mask(*_: object, local_size: int | None = None, **__: object) -> Window | None:
    """What a token sees is the context's: no mask is made, only the width of a window is handed on."""
    return None if local_size is None else Window(local_size)


def register() -> None:
    """Make the name known to transformers. Models that are not told to use it do not notice."""
    if NAME not in transformers.AttentionInterface():
        transformers.AttentionInterface.register(NAME, attention)
        transformers.AttentionMaskInterface.register(NAME, mask)
