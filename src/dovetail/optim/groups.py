"""Patterns of parameter names: frozen parameters, and groups with their own learning rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from dovetail.errors import ConfigError, listing
from dovetail.parallel.consensus import of_all
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.placement import checkpoint_shapes
from dovetail.weights.shards import LocalParam, in_checkpoint_form, local_params


@dataclass(slots=True)
class ParamGroup:
    """Parameters whose checkpoint name matches `pattern`, as `model.layers.0.*`. The first match wins.

    None: as the first of `engine.param_groups`, which has all other parameters and does not decay
    norms and biases.
    """

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        is_number = name != "pattern" and value is not None
        if is_number and not 0 <= value < math.inf:
            raise ConfigError(f"{name}={value!r}; expected 0 or more")
        object.__setattr__(self, name, value)


def freeze(model: nn.Module, mesh: Mesh, patterns: Sequence[str]) -> None:
    """Let parameters that match require no gradient. Collective."""
    if not patterns:
        return
    chosen = match(model, mesh, patterns, "frozen")
    for param in local_params(model, mesh):
        if param.parameter is not None and param.name in chosen:
            param.parameter.requires_grad_(False)
    trains = any(param.requires_grad for param in model.parameters())
    if not any(of_all(trains, mesh)):
        raise ConfigError(f"frozen={[*patterns]} leaves nothing to train; name fewer parameters")


def match(model: nn.Module, mesh: Mesh, patterns: Sequence[str], what: str) -> dict[str, int]:
    """Return parameter -> number of its first matching pattern. Collective.

    ConfigError on every rank for a pattern without a match, or that splits a parameter.
    """
    if not patterns:
        return {}
    chosen: dict[str, int] = {}
    problems = []
    used: set[str] = set()
    for param in local_params(model, mesh):
        if param.parameter is None:
            continue
        names = _names(model, param)
        for number, pattern in enumerate(patterns):
            missed = [tied[0] for tied in names if not _matches(tied, pattern)]
            if len(missed) == len(names):
                continue
            used.add(pattern)
            if missed:
                problems.append(
                    f"{pattern!r} leaves out {missed[0]}, which is one parameter with what it "
                    "matches"
                )
            else:
                chosen.setdefault(param.name, number)
    all_problems: dict[str, None] = {}
    for their_problems, their_used in of_all([problems, sorted(used)], mesh):
        all_problems |= dict.fromkeys(their_problems)
        used |= {*their_used}
    problems = [*all_problems]
    problems += [f"{x!r} matches no parameter of the model" for x in patterns if x not in used]
    if problems:
        expected = "give patterns of checkpoint names, as 'model.layers.0.*'"
        raise ConfigError(f"{what}: {expected}:\n{listing(problems)}")
    return chosen


def _matches(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _names(model: nn.Module, param: LocalParam) -> list[tuple[str, ...]]:
    """Return the names of its checkpoint tensors, each with its tied names."""
    names = []
    for stored in in_checkpoint_form(model, [param]):
        shapes = checkpoint_shapes(stored.name, stored.placement, stored.shape)
        names += [(name, *param.tied) for name in shapes]
    return names
