"""The sampler for a model and a layout."""

from collections.abc import Sequence

import torch

from dovetail.arch.registry import FAMILIES, spec_from_config
from dovetail.checkpoint.reader import open_checkpoint
from dovetail.errors import ModelError, OptionError
from dovetail.factory.layouts import Backend, check_layout, sampling_layout
from dovetail.hf.transformers_model import known_config
from dovetail.kernels.registry import kernels_for
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.native import NativeSampler, SamplerOptions
from dovetail.sampler.transformers import TransformersSampler
from dovetail.weights.hf_directory import Pretrained


def backend_layout(source: Pretrained, layout: Layout, backend: Backend) -> Layout:
    """dp must be known."""
    if backend == "transformers":
        if source.spec.missing_features:
            check_layout(source.spec, layout)  # refuses tp
        return Layout(dp=layout.num_ranks)
    named = source.config.get("model_type")
    if named not in FAMILIES:
        known_config(source.config)  # raises if transformers does not know it either
        edit = "set rollout.backend=transformers (generate: --engine transformers)"
        raise ModelError(f"the native sampler runs {', '.join(FAMILIES)}, not {named}; {edit}")
    try:
        return sampling_layout(spec_from_config(source.config), layout)
    except OptionError as error:
        raise ModelError(f"{error}; rollout.backend=transformers may sample it") from error


def make_sampler(
    source: Pretrained,
    mesh: Mesh,
    dtype: torch.dtype,
    backend: Backend = "native",
    options: SamplerOptions | None = None,
) -> NativeSampler | TransformersSampler:
    """Without weights; `load` or `refill` it."""
    if backend == "transformers":
        return TransformersSampler(source.config, mesh, dtype)
    sampler = NativeSampler(
        spec_from_config(source.config), mesh, kernels_for(mesh.device), dtype, options=options
    )
    if sampler.spec.moe is not None:
        sampler.use_checkpoint_names(open_checkpoint(source.path, mesh))
    return sampler


def longest_row(tokens_per_batch: int, multiples: Sequence[int]) -> int:
    return min(tokens_per_batch // multiple * multiple for multiple in multiples)
