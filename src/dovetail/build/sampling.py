"""The embedded sampler for a model and a mesh."""

import torch

from dovetail.arch.spec import ArchSpec
from dovetail.build.engine import check_layout
from dovetail.kernels.registry import kernels_for
from dovetail.mesh import Mesh
from dovetail.rollout.native import NativeSampler


def make_sampler(spec: ArchSpec, mesh: Mesh, dtype: torch.dtype) -> NativeSampler:
    """An empty sampler under its own mesh: `load` or `refill` comes before `sample`."""
    check_layout(spec, mesh.layout)
    return NativeSampler(spec, mesh, kernels_for(mesh.device), dtype)
