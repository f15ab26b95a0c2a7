"""Checks of layouts and lengths by a config alone. Imports no torch."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dovetail.arch.registry import FAMILIES, ulysses_degree, validate_layout
from dovetail.arch.spec import ArchSpec
from dovetail.arch.transformers_spec import AnySpec
from dovetail.errors import ConfigError, LayoutError
from dovetail.parallel.layout import Layout
from dovetail.pipeline.partition import check_pipeline

Backend = Literal["native", "transformers"]
KEYS = ("max_position_embeddings", "n_positions")
SCALED = ("linear", "dynamic")  # rope types that extend max_position_embeddings


def check_layout(spec: AnySpec, layout: Layout) -> Layout:
    if not spec.native and (layout.tp, layout.pp, layout.ep) != (1, 1, 1):
        known = f"model_type is {spec.family!r}; known families: {', '.join(FAMILIES)}; others, and those with "
        reason = f"{known}engine=transformers, are cut"
        if spec.missing_features:
            reason = f"{spec.missing_features}; --engine transformers may run it, but cuts"
        raise LayoutError(f"layout {layout}: {reason} by cp and dp alone; set tp=1, pp=1 and ep=1")
    if layout.cp_mode != "auto" and layout.cp == 1:
        raise LayoutError(
            f"layout: cp_mode={layout.cp_mode} says how to cut by cp; leave it out at cp=1"
        )
    check_pipeline(spec, layout)
    if spec.native:
        validate_layout(spec, layout)
    ulysses_degree(spec, layout)  # refuses a cp_mode that does not fit
    return layout


def sampling_layout(spec: ArchSpec, layout: Layout) -> Layout:
    """Pipeline ranks join tp, cp ranks are replicas."""
    check_layout(spec, layout)
    assert layout.dp is not None
    folded = Layout(tp=layout.tp * layout.pp, dp=layout.dp * layout.cp)
    try:
        validate_layout(spec, folded)
    except LayoutError as error:
        raise LayoutError(
            f"layout {layout}: the sampler runs pipeline ranks as tp={folded.tp}; {error}"
        ) from error
    return folded


def max_positions(config: Mapping[str, Any], backend: Backend | None = None) -> int | None:
    """backend: None in training. With a KV cache `longrope` (native: and `dynamic`) keeps its first frequencies."""
    text = {**config, **(config.get("text_config") or {})}
    most = next((text[key] for key in KEYS if isinstance(text.get(key), int)), None)
    given = text.get("rope_scaling") or text.get("rope_parameters")
    rope = given if isinstance(given, Mapping) else {}
    kind = rope.get("rope_type", rope.get("type"))
    factor = rope.get("factor")
    original = (
        text.get("original_max_position_embeddings")
        or rope.get("original_max_position_embeddings")
        or most
    )
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
    """Raises ConfigError unless prompt and completion fit. prompts: their lengths, if known."""
    most = max_positions(config, backend)
    longest = max(prompts, default=1)
    together = longest + new_tokens
    if most is None or together <= most:
        return
    edit = f"lower {key} to at most {most - longest}"
    if longest >= most:
        edit = f"shorten the prompts below {most} tokens"
    have = f"{key} is {new_tokens:,}"
    if prompts:
        have += f" and the longest prompt has {longest:,} tokens, {together:,} together"
    source = "max_position_embeddings and rope scaling in its config.json"
    raise ConfigError(f"{have}, but the model has {most:,} positions ({source}); {edit}")
