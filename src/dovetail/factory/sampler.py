"""The sampler for a model and a layout."""

from typing import Literal

import torch

from dovetail.arch.registry import FAMILIES, spec_from_config, validate_layout
from dovetail.arch.spec import ArchSpec
from dovetail.arch.transformers_spec import TransformersSpec
from dovetail.checkpoint.reader import open_checkpoint
from dovetail.errors import LayoutError, ModelError, OptionError
from dovetail.factory.layouts import check_layout
from dovetail.hf.transformers_model import known_config
from dovetail.kernels.registry import kernels_for
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.rollout.native import NativeSampler, SamplerOptions
from dovetail.rollout.transformers import TransformersSampler
from dovetail.weights.hf_directory import Pretrained

Backend = Literal["native", "transformers"]


def backend_layout(source: Pretrained, layout: Layout, backend: Backend) -> Layout:
    """How a backend uses the ranks of a layout whose dp is known: transformers has the whole model on every rank."""
    if backend == "transformers":
        if isinstance(source.spec, TransformersSpec) and source.spec.lacking:
            check_layout(source.spec, layout)  # tp was asked for, and would be replicas
        return Layout(dp=layout.num_ranks, copy_engines=layout.copy_engines)
    named = source.config.get("model_type")
    if named not in FAMILIES:
        known_config(source.config)  # nobody is sent to transformers that does not know the family either
        raise ModelError(
            f"the native sampler runs {', '.join(FAMILIES)}, not {named}; set rollout.backend=transformers (generate: "
            "--engine transformers)"
        )
    try:
        return sampling_layout(spec_from_config(source.config), layout)
    except OptionError as error:
        raise ModelError(f"{error}; rollout.backend=transformers may sample it") from error


def sampling_layout(spec: ArchSpec, layout: Layout) -> Layout:
    """How the embedded sampler uses the ranks of a layout: a token at a time, so it cuts by tp alone.

    Pipeline ranks join tp, which keeps a rank's share of the model; cp ranks are replicas.
    """
    check_layout(spec, layout)
    assert layout.dp is not None
    folded = Layout(tp=layout.tp * layout.pp, dp=layout.dp * layout.cp, copy_engines=layout.copy_engines)
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
    """An empty sampler under a mesh of `backend_layout`: `load` or `refill` comes before `sample`. options: the native one's."""
    if backend == "transformers":
        return TransformersSampler(source.config, mesh, dtype)
    sampler = NativeSampler(spec_from_config(source.config), mesh, kernels_for(mesh.device), dtype, options=options)
    if sampler.spec.moe is not None:
        sampler.name_as(open_checkpoint(source.path, mesh))
    return sampler
