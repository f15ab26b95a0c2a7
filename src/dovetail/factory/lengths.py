"""Limits of row lengths."""

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.errors import ConfigError
from dovetail.factory.sampler import Backend

KEYS = ("max_position_embeddings", "n_positions")
SCALED = ("linear", "dynamic")  # rope types whose factor is not part of max_position_embeddings


def longest_row(tokens_per_batch: int, multiples: Sequence[int]) -> int:
    """The most tokens that fit a micro-batch when padded to any of `multiples`."""
    return min(tokens_per_batch // multiple * multiple for multiple in multiples)


def max_positions(config: Mapping[str, Any], backend: Backend | None = None) -> int | None:
    """The longest sequence by config.json, with rope scaling; None if unknown.

    backend: of the sampler, None in training. With cached keys `longrope` (and natively `dynamic`) keeps to the original.
    """
    text = {**config, **(config.get("text_config") or {})}
    most = next((text[key] for key in KEYS if isinstance(text.get(key), int)), None)
    given = text.get("rope_scaling") or text.get("rope_parameters")
    rope = given if isinstance(given, Mapping) else {}
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    original = text.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or most
    if kind == "longrope" and backend is not None and isinstance(original, int):
        return original
    if most is None or not isinstance(factor, int | float) or not 1 <= factor < most:
        return most
    if kind == "yarn":
        return max(most, int(original * factor)) if isinstance(original, int) else most
    scales = kind in SCALED and not (kind == "dynamic" and backend == "native")
    return int(most * factor) if scales and "gemma3" not in str(text.get("model_type")) else most


def check_positions(
    config: Mapping[str, Any], backend: Backend, prompts: Sequence[int], new_tokens: int, key: str
) -> None:
    """ConfigError for completions that pass the last position. prompts: lengths."""
    most, longest = max_positions(config, backend), max(prompts)
    if most is None or longest + new_tokens <= most:
        return
    edit = f"lower {key} to at most {most - longest}" if longest < most else f"shorten the prompts below {most} tokens"
    raise ConfigError(
        f"{key} is {new_tokens:,} and the longest prompt has {longest:,} tokens, {longest + new_tokens:,} together, but the "
        f"model has {most:,} positions (max_position_embeddings and rope scaling in its config.json); {edit}"
    )
