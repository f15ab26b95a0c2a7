"""Our packed attention under a name of its own in transformers' registries: what a model is told to call.

Sequence boundaries, ranks and kernels come as an argument of the model's forward pass, `context`, which transformers
hands through to every attention layer. Nothing is inferred from positions, and no mask is ever made.
"""

from typing import Any

import transformers
from torch import Tensor, nn

from dovetail.errors import ModelError
from dovetail.nn.beside import Beside
from dovetail.nn.context import BatchAttention

NAME = "dovetail"
# Arguments of attention that change nothing here: ours, its window, and what says how to call rather than what to compute.
KNOWN = frozenset(
    ("context", "sliding_window", "dropout", "is_causal", "position_ids", "cache_position", "use_cache", "return_dict")
)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
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
    given = {"attention_mask": attention_mask, **options}
    strange = [name for name, value in given.items() if not (name in KNOWN or value is None or value is False)]
    if strange:
        raise ModelError(
            f"{type(module).__name__} calls attention with {', '.join(strange)}, which packed attention does not compute"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [t, heads, C]
    width = q.shape[-1]
    if scaling is not None and scaling != width**-0.5:
        q = q * (scaling * width**0.5)
    found = context.attend(q, k, v, options.get("sliding_window"), Beside())
    return found.contiguous()[None], None  # some models view it: transformers' own functions return no other


def no_mask(*_: object, **__: object) -> None:
    """What a token sees is the context's: registered, so that it is a decision and not a default."""


def register() -> None:
    """Make the name known to transformers. Models that are not told to use it do not notice."""
    if NAME not in transformers.AttentionInterface():
        transformers.AttentionInterface.register(NAME, attention)
        transformers.AttentionMaskInterface.register(NAME, no_mask)
