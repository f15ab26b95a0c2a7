"""The embedded sampler for a model and a layout."""

import torch

from dovetail.arch.registry import spec_from_config, validate_layout
from dovetail.arch.spec import ArchSpec
from dovetail.build.engine import check_layout
from dovetail.errors import LayoutError
from dovetail.kernels.registry import kernels_for
from dovetail.layout import Layout
from dovetail.mesh import Mesh
from dovetail.rollout.native import NativeSampler
from dovetail.weights.pretrained import Pretrained


def sampling_spec(source: Pretrained) -> ArchSpec:
    """What the sampler runs: our decoder, whichever engine trains. Raises ModelError for a family that it does not know."""
    return spec_from_config(source.config)


def sampling_layout(spec: ArchSpec, layout: Layout) -> Layout:
    """How the sampler uses the ranks of a layout whose dp is known: a token at a time, so it cuts by tp alone.

    Pipeline ranks join tp, which keeps a rank's share of the model; cp ranks are replicas.
    """
    check_layout(spec, layout)
    assert layout.dp is not None
    folded = Layout(tp=layout.tp * layout.pp, dp=layout.dp * layout.cp)
    try:
        validate_layout(spec, folded)
    except LayoutError as error:
        raise LayoutError(f"layout {layout}: the sampler runs pipeline ranks as tp={folded.tp}; {error}") from error
    return folded


def make_sampler(spec: ArchSpec, mesh: Mesh, dtype: torch.dtype) -> NativeSampler:
    """An empty sampler under a mesh of `sampling_layout`: `load` or `refill` comes before `sample`."""
    check_layout(spec, mesh.layout)
    return NativeSampler(spec, mesh, kernels_for(mesh.device), dtype)
