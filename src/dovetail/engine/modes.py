"""Engines compute in modes of their own, whatever those are in which a script calls them: no_grad, inference_mode, autocast."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from dovetail.mesh import Mesh

P = ParamSpec("P")
T = TypeVar("T")


class OnMesh(Protocol):
    """Whoever computes on a mesh."""

    mesh: Mesh


E = TypeVar("E", bound=OnMesh)


def in_own_modes(call: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """A call with gradients where it asks for them, and in its engine's dtype.

    What inference mode makes, such as parameters that are gathered in it, can never be trained; autocast computes in a dtype
    that nobody told the engine.
    """

    @wraps(call)
    def run(engine: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(mode=False), torch.autocast(engine.mesh.device.type, enabled=False):
            return call(engine, *args, **kwargs)

    return run
