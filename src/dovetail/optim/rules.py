"""Update rules by name or class."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import FunctionType
from typing import Any, Literal, get_args

import torch

from dovetail.errors import ConfigError, users_line
from dovetail.optim.adamw import CPUOffloadAdamW, Groups, SkippableAdamW, UpdateRule
from dovetail.optim.elementwise import Elementwise, Layout, try_out
from dovetail.optim.groups import ParamGroup
from dovetail.optim.muon import Held, Muon, MuonOptions
from dovetail.optim.quantized import QuantizedAdamW, adamw8bit
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.optimizers import refuse_name

Schedule = Literal["constant", "linear", "cosine", "wsd"]
OURS = ("params", "lr", "weight_decay")
MUON = tuple(field.name for field in fields(MuonOptions))
OPTIONS: Mapping[str, Sequence[str]] = {"adamw": (), "adamw8bit": ("block_size",), "muon": MUON}
Class = Callable[..., torch.optim.Optimizer]


def make_rule(
    settings: Any, groups: Groups, held: Sequence[Held] = (), mesh: Mesh | None = None
) -> UpdateRule:
    """settings: `OptimSettings`. Collective."""
    name = settings.name
    options = settings.options
    adam = {"betas": settings.betas, "eps": settings.eps}
    params = [parameter for group in groups for parameter in group["params"]]
    if name == "adamw":  # a pipeline stage may be frozen
        return (CPUOffloadAdamW if settings.on_host and params else SkippableAdamW)(
            groups, **adam, fused=True
        )
    if name == "muon":
        return Muon(groups, held, mesh or Mesh.solo(), MuonOptions(**options), settings.lr, **adam)
    if name == "adamw8bit":
        return QuantizedAdamW(groups, held, **adam, **options)
    first = params[0] if params else torch.zeros(())
    return Elementwise(
        groups, *_made(name, options), _tried(name, options, first.device, first.dtype)
    )


def try_rule(
    name: str | Class, options: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    """ConfigError without torchao, or for an update that is not elementwise."""
    if name == "adamw8bit":
        adamw8bit()
    elif name not in OPTIONS:
        _tried(name, options, device, dtype)


def checked(given: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Name and options of `OptimSettings`; classes also get unusual betas and eps. ConfigError."""
    if given["schedule"] not in get_args(Schedule):
        raise ConfigError(
            f"schedule={given['schedule']!r}; expected one of {', '.join(get_args(Schedule))}"
        )
    for key in ("lr", "weight_decay", "min_lr_ratio"):
        if not 0 <= given[key] < math.inf:
            raise ConfigError(f"{key}={given[key]!r}; expected 0 or more")
    if isinstance(given["frozen"], str) or not all(
        isinstance(group, ParamGroup) for group in given["groups"]
    ):
        raise ConfigError(
            'expected groups=(dt.ParamGroup("*norm.weight", lr=1e-5),) and frozen=("lm_head.*",)'
        )
    if given["clip_norm"] is not None and not given["clip_norm"] > 0:
        raise ConfigError(
            f"clip_norm={given['clip_norm']!r}; expected more than 0, or None for no limit"
        )
    name, options = _checked_rule(given["name"], given, usual)
    return {"name": name, "options": options}


def _checked_rule(
    name: str | Class, given: Mapping[str, Any], usual: Mapping[str, Any]
) -> tuple[str | Class, dict[str, Any]]:
    if isinstance(name, str):
        try:
            name = refuse_name(name)
        except ValueError as error:
            raise ConfigError(f"optim.name: {error}") from None
    options = dict(given["options"])
    shown = _shown(name)
    takes = _takes(name)
    if name != "adamw" and given["on_host"]:
        raise ConfigError(
            f"offload_optimizer moves the moments of adamw alone, not of {shown}; drop one of them"
        )
    if twice := [key for key in options if key in OURS]:
        raise ConfigError(
            f"optim.options has {twice[0]}; set optim.{twice[0]}, which schedules and groups change"
        )
    if unknown := [key for key in options if takes is not None and key not in takes]:
        known = ", ".join(key for key in takes or () if key not in OURS)
        takes_it = f"which {shown} does not take; it takes {known or 'no options'}"
        raise ConfigError(f"optim.options has {', '.join(unknown)}, {takes_it}")
    if name == "muon":
        muon = MuonOptions(**options)
        _check(muon.check)
        if muon.adamw_lr is not None and not given["lr"]:
            raise ConfigError(
                "optim.options.adamw_lr is given, but is a multiple of optim.lr=0; raise optim.lr"
            )
        return name, vars(muon)
    if name in OPTIONS:
        return name, options
    changed = {key: given[key] for key in ("betas", "eps") if given[key] != usual[key]}
    decays = [
        x for x in (given["weight_decay"], *(group.weight_decay for group in given["groups"])) if x
    ]
    decay = {"weight_decay": decays[0]} if decays else {}
    for key in (*changed, *decay):
        if takes is not None and key not in takes:
            raise ConfigError(
                f"optim.{key} is {(changed | decay)[key]}, but {shown} has no {key}; leave it out"
            )
    options = changed | options
    if isinstance(name, str):
        _check(partial(_class(name), [torch.nn.Parameter(torch.zeros(1, 1))], **options))
    return name, options


def _check(make: Callable[[], object]) -> None:
    try:
        make()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optim.options: {error}") from error


def _tried(
    name: str | Class, options: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> Layout:
    try:
        return try_out(*_made(name, options), device, dtype)
    except Exception as error:
        place = users_line(error)
        said = (
            str(error)
            if isinstance(error, ValueError) and not place
            else f"{type(error).__name__}: {error}"
        )
        said += f" ({place})" if place else ""
        raise ConfigError(
            f"optim.name {_shown(name)} was tried on a small matrix: {said}"
        ) from error


def _made(name: str | Class, options: Mapping[str, Any]) -> tuple[Class, list[str]]:
    takes = _takes(name)
    accepted = inspect.signature(_class(name)).parameters
    unset = [
        key
        for key in OURS[1:]
        if key in accepted and accepted[key].default is inspect.Parameter.empty
    ]
    make = partial(_class(name), **options, **dict.fromkeys(unset, 0.0))  # groups have their own
    return make, [key for key in OURS[1:] if takes is None or key in takes]


def _takes(name: str | Class) -> Sequence[str] | None:
    """Keyword arguments; None: any."""
    if isinstance(name, str) and name in OPTIONS:
        return OPTIONS[name]
    accepted = inspect.signature(_class(name)).parameters
    takes_all = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()
    )
    return None if takes_all else [*accepted]


def _class(name: str | Class) -> Class:
    classes = {cls.lower(): getattr(torch.optim, cls) for cls in torch.optim.__all__}
    return classes[name] if isinstance(name, str) else name


def _shown(name: str | Class) -> str:
    return (
        name
        if isinstance(name, str)
        else name.__name__
        if isinstance(name, type | FunctionType)
        else repr(name)
    )
