"""Update rules by name or class, and checks of their settings."""

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
from dovetail.optim.elementwise import Elementwise, Layout, find_layout
from dovetail.optim.groups import ParamGroup
from dovetail.optim.matrices import LocalShard
from dovetail.optim.muon import Muon, MuonOptions
from dovetail.optim.quantized import QuantizedAdamW, adamw8bit
from dovetail.parallel.mesh import Mesh
from dovetail.recipe.optimizers import refuse_name

Schedule = Literal["constant", "linear", "cosine", "wsd"]
GROUP_KEYS = ("lr", "weight_decay")
OURS = ("params", *GROUP_KEYS)
MUON = tuple(field.name for field in fields(MuonOptions))
OPTIONS: Mapping[str, Sequence[str]] = {"adamw": (), "adamw8bit": ("block_size",), "muon": MUON}
Class = Callable[..., torch.optim.Optimizer]
Name = str | Class
Options = Mapping[str, Any]


def make_rule(
    settings: Any, groups: Groups, shards: Sequence[LocalShard] = (), mesh: Mesh | None = None
) -> UpdateRule:
    """Return the update rule of `settings`, an `OptimSettings`. Collective."""
    name = settings.name
    options = settings.options
    adam = {"betas": settings.betas, "eps": settings.eps}
    params = [parameter for group in groups for parameter in group["params"]]
    if name == "adamw":
        offload = settings.on_host and params  # a pipeline stage may be frozen
        cls = CPUOffloadAdamW if offload else SkippableAdamW
        return cls(groups, **adam, fused=True)
    if name == "muon":
        mesh = mesh or Mesh.solo()
        return Muon(groups, shards, mesh, MuonOptions(**options), settings.lr, **adam)
    if name == "adamw8bit":
        return QuantizedAdamW(groups, shards, **adam, **options)
    first = params[0] if params else torch.zeros(())
    layout = _find_layout(name, options, first.device, first.dtype)
    return Elementwise(groups, *_factory(name, options), layout)


def check_rule(name: Name, options: Options, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError without torchao, or for a class whose update is not elementwise."""
    if name == "adamw8bit":
        adamw8bit()
    elif name not in OPTIONS:
        _find_layout(name, options, device, dtype)


def check_settings(given: Options, usual: Options) -> dict[str, Any]:
    """Return name and options of `OptimSettings`; classes also get unusual betas and eps.

    ConfigError.
    """
    schedules = get_args(Schedule)
    if given["schedule"] not in schedules:
        raise ConfigError(f"schedule={given['schedule']!r}; expected one of {', '.join(schedules)}")
    for key in ("lr", "weight_decay", "min_lr_ratio"):
        if not 0 <= given[key] < math.inf:
            raise ConfigError(f"{key}={given[key]!r}; expected 0 or more")
    are_groups = all(isinstance(group, ParamGroup) for group in given["groups"])
    if isinstance(given["frozen"], str) or not are_groups:
        raise ConfigError(
            'expected groups=(dt.ParamGroup("*norm.weight", lr=1e-5),) and frozen=("lm_head.*",)'
        )
    clip_norm = given["clip_norm"]
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"clip_norm={clip_norm!r}; expected more than 0, or None for no limit")
    name = given["name"]
    if isinstance(name, str):
        try:
            name = refuse_name(name)
        except ValueError as error:
            raise ConfigError(f"optim.name: {error}") from None
    if name != "adamw" and given["on_host"]:
        raise ConfigError(
            f"offload_optimizer moves the moments of adamw alone, not of {_display_name(name)}; "
            "drop one of them"
        )
    return {"name": name, "options": _check_options(name, given, usual)}


def _check_options(name: Name, given: Options, usual: Options) -> dict[str, Any]:
    options = dict(given["options"])
    accepted = _accepted_keys(name)
    shown = _display_name(name)
    for key in options:
        if key in OURS:
            raise ConfigError(
                f"optim.options has {key}; set optim.{key}, which schedules and groups change"
            )
    if accepted is not None:
        unknown = [key for key in options if key not in accepted]
        known = [key for key in accepted if key not in OURS]
        if unknown:
            raise ConfigError(
                f"optim.options has {', '.join(unknown)}, which {shown} does not take; "
                f"it takes {', '.join(known) or 'no options'}"
            )
    if name == "muon":
        muon = MuonOptions(**options)
        _check(muon.check)
        if muon.adamw_lr is not None and not given["lr"]:
            raise ConfigError(
                "optim.options.adamw_lr is given, but is a multiple of optim.lr=0; raise optim.lr"
            )
        return vars(muon)
    if name in OPTIONS:
        return options
    changed = {key: given[key] for key in ("betas", "eps") if given[key] != usual[key]}
    decays = [given["weight_decay"], *(group.weight_decay for group in given["groups"])]
    needed = dict(changed)
    if any(decays):
        needed["weight_decay"] = next(filter(None, decays))
    for key, value in needed.items():
        if accepted is not None and key not in accepted:
            raise ConfigError(f"optim.{key} is {value}, but {shown} has no {key}; leave it out")
    options = changed | options
    if isinstance(name, str):
        parameter = torch.nn.Parameter(torch.zeros(1, 1))
        _check(partial(_class(name), [parameter], **options))
    return options


def _check(make: Callable[[], object]) -> None:
    try:
        make()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optim.options: {error}") from error


def _find_layout(name: Name, options: Options, device: torch.device, dtype: torch.dtype) -> Layout:
    try:
        return find_layout(*_factory(name, options), device, dtype)
    except Exception as error:
        reason = str(error)
        place = users_line(error)
        if place or not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        if place:
            reason += f" ({place})"
        raise ConfigError(
            f"optim.name {_display_name(name)} was tried on a small matrix: {reason}"
        ) from error


def _factory(name: Name, options: Options) -> tuple[Class, list[str]]:
    """Return what makes the optimizer from parameter groups, and the keys that its groups have."""
    accepted = _accepted_keys(name)
    cls = _class(name)
    unset = {}
    for key, parameter in inspect.signature(cls).parameters.items():
        if key in GROUP_KEYS and parameter.default is parameter.empty:
            unset[key] = 0.0  # groups have their own
    keys = [key for key in GROUP_KEYS if accepted is None or key in accepted]
    return partial(cls, **options, **unset), keys


def _accepted_keys(name: Name) -> Sequence[str] | None:
    """Return the keyword arguments of a rule; None: any."""
    if isinstance(name, str) and name in OPTIONS:
        return OPTIONS[name]
    parameters = inspect.signature(_class(name)).parameters
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return None
    return [*parameters]


def _class(name: Name) -> Class:
    if not isinstance(name, str):
        return name
    classes = {cls.lower(): getattr(torch.optim, cls) for cls in torch.optim.__all__}
    return classes[name]


def _display_name(name: Name) -> str:
    if isinstance(name, str):
        return name
    return name.__name__ if isinstance(name, type | FunctionType) else repr(name)
