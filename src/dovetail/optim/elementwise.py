"""Any torch optimizer whose update is elementwise, over local shards."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dovetail.errors import CheckpointError
from dovetail.optim.adamw import Groups, Stored, UpdateRule

STEP = "step"
TRIAL_SHAPE = (6, 8)
TRIAL_PARTS = (
    (slice(0, 2),),
    (slice(2, None),),
    (slice(None), slice(0, 3)),
    (slice(None), slice(3, None)),
)
TRIAL_STEPS = 3
TRIAL_ERROR = 1e-4  # of the largest change; mixing elements gives far more
TRIAL_GROUP: Mapping[str, float] = {"lr": 0.01, "weight_decay": 0.1}
State = MutableMapping[str, Any]  # of one parameter
Make = Callable[..., torch.optim.Optimizer]  # from parameter groups


class Layout(NamedTuple):
    """An optimizer's state after a step: name -> dtype; name -> value in the trial."""

    shaped: Mapping[str, torch.dtype]
    scalars: Mapping[str, Any]


class Elementwise(UpdateRule):
    """A torch optimizer inside. make: from parameter groups to it. keys: what its groups have."""

    def __init__(self, groups: Groups, make: Make, keys: Sequence[str], layout: Layout) -> None:
        self.param_groups = groups
        self._make = make
        self._keys = keys
        self._layout = layout
        self.state_names = tuple(layout.shaped)
        self._filled = [group for group in groups if group["params"]]
        self.inner = self._fresh()

    def _fresh(self) -> torch.optim.Optimizer | None:
        keys = ("params", *self._keys)
        groups = [{key: group[key] for key in keys} for group in self._filled]
        return self._make(groups) if groups else None

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]  # of the optimizer inside
        return {} if self.inner is None else self.inner.state

    def step(self, closure: Any = None) -> Any:
        """Update all parameters. The host waits."""
        if self.inner is None or bool(self.found_inf):
            return
        for group, inner in zip(self._filled, self.inner.param_groups, strict=True):
            for key in self._keys:
                if isinstance(inner[key], Tensor):
                    inner[key].fill_(group[key])
                else:
                    inner[key] = group[key]
        self.inner.step()

    def begin(self, steps: int = 0) -> None:
        """Give a state to parameters without one; before the first step, that step does."""
        if not steps:
            return
        for group in self._filled:
            for parameter in group["params"]:
                stored = self.stored(parameter)
                if len(stored) < len(self.state_names):
                    scalars = copy.deepcopy({**self._layout.scalars})
                    self.state[parameter] = scalars | self._zeros(parameter)

    def _zeros(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        dtypes = self._layout.shaped.items()
        return {name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in dtypes}

    def resume(self, steps: int) -> None:
        self.inner = self._fresh()
        self.begin(steps)
        if not steps:
            return
        for state in self.state.values():
            if STEP in state:
                state[STEP] = _like(steps, state[STEP])

    def others(self) -> dict[str, Tensor] | None:
        """Return the numbers of each group, which are equal for all its parameters."""
        if not self._scalars():
            return None
        values = {}
        for group, (state, *_) in self._states():
            for name in self._scalars():
                value = torch.as_tensor(state[name]).detach()
                values[_key(name, group)] = value.reshape(1).cpu()
        return values

    def restored(self, stored: Stored, others: Mapping[str, Tensor]) -> None:
        for group, states in self._states():
            for name in self._scalars():
                value = others.get(_key(name, group))
                if value is None:
                    raise CheckpointError(
                        f"the checkpoint has no {name} for the parameter group {group['number']}"
                    )
                for state in states:
                    state[name] = _like(value.item(), state[name])

    def _scalars(self) -> list[str]:
        return [name for name in self._layout.scalars if name != STEP]

    def _states(self) -> Iterator[tuple[Mapping[str, Any], list[State]]]:
        """Yield each group of which all parameters have their numbers, and their states."""
        for group in self._filled:
            states = [self.state[p] for p in group["params"] if p in self.state]
            names = {*self._layout.scalars}
            if states and all(state.keys() >= names for state in states):
                yield group, states


def _key(name: str, group: Mapping[str, Any]) -> str:
    kind = "decayed" if group["decayed"] else "other"
    return f"{name}/{group['number']}/{kind}"


def _like(value: float, old: Any) -> Any:
    if isinstance(old, Tensor):
        return torch.full_like(old, value)
    return type(old)(value)


def find_layout(
    make: Make, keys: Sequence[str], device: torch.device | str, dtype: torch.dtype
) -> Layout:
    """Return the layout of the state after steps on a small matrix.

    ValueError unless the update of a part of the matrix is that part of the update.
    """
    draw = torch.Generator().manual_seed(0)
    rows, columns = TRIAL_SHAPE
    row_scale = torch.logspace(-2, 2, rows)
    scale = row_scale[:, None] * torch.logspace(-1, 1, columns)
    start = torch.randn(TRIAL_SHAPE, generator=draw)
    grads = []
    for _ in range(TRIAL_STEPS):
        grad = torch.randn(TRIAL_SHAPE, generator=draw)
        grads.append(grad * scale)

    def train(part: tuple[slice, ...]) -> tuple[Tensor, State]:
        parameter = nn.Parameter(start[part].to(device, dtype, copy=True))
        group = {key: TRIAL_GROUP[key] for key in keys}
        optimizer = make([{"params": [parameter], **group}])
        for grad in grads:
            parameter.grad = grad[part].to(device, dtype, copy=True)
            optimizer.step()
        return parameter.detach(), optimizer.state[parameter]

    whole, state = train(())
    layout = _layout_of(state)
    largest = (whole - start.to(whole)).abs().max()
    if not largest > 0:
        raise ValueError("it changes nothing in its first steps")
    for part in TRIAL_PARTS:
        updated, _ = train(part)
        difference = (updated - whole[part]).abs().max()
        error = difference / largest
        if not error <= TRIAL_ERROR:
            raise ValueError(
                "its update of a part of a matrix is not that part of its update (they differ by "
                f"{float(error):.2g} of the largest change), so it cannot update the shards of a "
                "model; take an optimizer that is elementwise"
            )
    return layout


def _layout_of(state: State) -> Layout:
    shaped = {}
    scalars = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == TRIAL_SHAPE:
            shaped[name] = value.dtype
        elif isinstance(value, int | float | Tensor) and torch.as_tensor(value).numel() == 1:
            scalars[name] = value
        elif value is not None:
            raise ValueError(
                f"its state {name} is neither of the parameter's shape nor a number, "
                "as checkpoints need"
            )
    return Layout(shaped, scalars)
