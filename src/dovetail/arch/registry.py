"""From `model_type` to the family that reads it, and which tensor-parallel degrees a model allows."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dovetail.arch.llama import llama_spec
from dovetail.arch.mistral import mistral_spec
from dovetail.arch.qwen2 import qwen2_spec
from dovetail.arch.qwen3 import qwen3_spec
from dovetail.arch.spec import ArchSpec
from dovetail.errors import LayoutError, ModelError
from dovetail.layout import Layout

FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], ArchSpec]] = MappingProxyType(
    {"llama": llama_spec, "mistral": mistral_spec, "qwen2": qwen2_spec, "qwen3": qwen3_spec}
)


def spec_from_config(config: Mapping[str, Any]) -> ArchSpec:
    """The spec of a raw config.json. Raises ModelError for a family or an option that is not computed."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(f"config.json: model_type is {family!r}; known families: {', '.join(FAMILIES)}")
    return FAMILIES[family](config)


def validate_layout(spec: ArchSpec, layout: Layout) -> None:
    """Refuse a tp that cannot divide this model. The vocabulary is padded, so it need not divide."""
    if reasons := _misfits(spec, layout.tp):
        fitting = [str(tp) for tp in range(1, spec.attention.num_heads + 1) if not _misfits(spec, tp)]
        raise LayoutError(
            f"layout {layout}: tp={layout.tp} does not fit this {spec.family} model: {'; '.join(reasons)}; "
            f"use one of tp={', '.join(fitting)}"
        )


def _misfits(spec: ArchSpec, tp: int) -> list[str]:
    heads, kv_heads = spec.attention.num_heads, spec.attention.num_kv_heads
    reasons = []
    if heads % tp:
        reasons.append(f"{heads} attention heads are not a multiple of {tp}")
    if kv_heads % tp and tp % kv_heads:
        reasons.append(f"{kv_heads} key-value heads are neither a multiple nor a divisor of {tp}")
    if spec.ffn_width % tp:
        reasons.append(f"intermediate_size {spec.ffn_width} is not a multiple of {tp}")
    return reasons
