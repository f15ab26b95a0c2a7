"""The sampler for a model and a layout, and limits of lengths."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from dovetail.arch.registry import FAMILIES, spec_from_config, validate_layout
from dovetail.arch.spec import ArchSpec
from dovetail.arch.transformers_spec import TransformersSpec
from dovetail.checkpoint.reader import open_checkpoint
from dovetail.errors import ConfigError, LayoutError, ModelError, OptionError
from dovetail.factory.layouts import check_layout
from dovetail.hf.transformers_model import known_config
from dovetail.kernels.registry import kernels_for
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.rollout.native import NativeSampler, SamplerOptions
from dovetail.rollout.transformers import TransformersSampler
from dovetail.weights.hf_directory import Pretrained

Backend = Literal["native", "transformers"]
KEYS = ("max_position_embeddings", "n_positions")
SCALED = ("linear", "dynamic")  # rope types whose factor is not part of max_position_embeddings


def backend_layout(source: Pretrained, layout: Layout, backend: Backend) -> Layout:
    """transformers holds the whole model on every rank. dp must be known."""
    if backend == "transformers":
        if isinstance(source.spec, TransformersSpec) and source.spec.lacking:
            check_layout(source.spec, layout)  # tp was asked for, and would be replicas
        return Layout(dp=layout.num_ranks)
    named = source.config.get("model_type")
    if named not in FAMILIES:
        known_config(source.config)  # raises if transformers does not know it either
        raise ModelError(
            f"the native sampler runs {', '.join(FAMILIES)}, not {named}; set rollout.backend=transformers (generate: "
            "--engine transformers)"
        )
    try:
        return sampling_layout(spec_from_config(source.config), layout)
    except OptionError as error:
        raise ModelError(f"{error}; rollout.backend=transformers may sample it") from error


def sampling_layout(spec: ArchSpec, layout: Layout) -> Layout:
    """Pipeline ranks join tp, cp ranks are replicas."""
    check_layout(spec, layout)
    assert layout.dp is not None
    folded = Layout(tp=layout.tp * layout.pp, dp=layout.dp * layout.cp)
    try:
        validate_layout(spec, folded)
    except LayoutError as error:
        raise LayoutError(f"layout {layout}: the sampler runs pipeline ranks as tp={folded.tp}; {error}") from error
    return folded


def make_sampler(
    source: Pretrained,
    mesh: Mesh,
    dtype: torch.dtype,
    backend: Backend = "native",
    options: SamplerOptions | None = None,
) -> NativeSampler | TransformersSampler:
    """An empty sampler over a mesh of `backend_layout`; `load` or `refill` it."""
    if backend == "transformers":
        return TransformersSampler(source.config, mesh, dtype)
    sampler = NativeSampler(spec_from_config(source.config), mesh, kernels_for(mesh.device), dtype, options=options)
    if sampler.spec.moe is not None:
        sampler.use_checkpoint_names(open_checkpoint(source.path, mesh))
    return sampler


def longest_row(tokens_per_batch: int, multiples: Sequence[int]) -> int:
    """The most tokens that fit a micro-batch when padded to any of `multiples`."""
    return min(tokens_per_batch // multiple * multiple for multiple in multiples)


def max_positions(config: Mapping[str, Any], backend: Backend | None = None) -> int | None:
    """The longest sequence by config.json; None if unknown.

    backend: None in training. With a KV cache `longrope` (natively also `dynamic`) keeps its first frequencies.
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
