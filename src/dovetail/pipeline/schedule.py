"""Pipeline schedules as plain data. No torch here."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "input", "weight"]


class Action(NamedTuple):
    """backward: both gradients; or input, then weight. Rank r of P holds stages r, r + P, ..."""

    kind: Kind
    stage: int
    micro: int


Plan = tuple[tuple[Action, ...], ...]  # by pipeline rank
Need = tuple[str, int, int]  # (kind, stage, micro) that ended; "input" also of backward


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch, by stage. The last forward includes the head's backward."""

    forward: float | tuple[float, ...] = 1.0
    input: float | tuple[float, ...] = 1.0
    weight: float | tuple[float, ...] = 1.0

    def of(self, kind: Kind, stage: int) -> float:
        if kind == "backward":
            return self.of("input", stage) + self.of("weight", stage)
        times = {"forward": self.forward, "input": self.input, "weight": self.weight}[kind]
        return times[stage] if isinstance(times, tuple) else times


UNIT = Costs()

# change of the number of live micro-batches
LIVES: Mapping[Kind, int] = MappingProxyType(
    {"forward": 1, "input": 0, "weight": -1, "backward": -1}
)


def num_stages(plan: Plan) -> int:
    return 1 + max(action.stage for actions in plan for action in actions)


def make_plan(schedule: str, ranks: int, virtual: int, micros: int, costs: Costs = UNIT) -> Plan:
    """forward: scoring. zero_bubble: weight gradients, placed by `costs`, fill bubbles. Messages are read in the order sent."""
    if schedule == "zero_bubble":
        assert virtual == 1, "zero_bubble has one stage a rank"
        return _zero_bubble(ranks, micros, costs)
    assert schedule in ("forward", "gpipe", "1f1b", "interleaved"), schedule
    return tuple(_alternate(schedule, rank, ranks, virtual, micros) for rank in range(ranks))


def _alternate(
    schedule: str, rank: int, ranks: int, virtual: int, micros: int
) -> tuple[Action, ...]:
    """Warmup forwards, then backward and forward in turn, then other backwards; micro-batches in groups of `ranks`."""
    groups = [range(first, first + ranks) for first in range(0, micros, ranks)]
    stages = range(rank, ranks * virtual, ranks)
    forwards = [
        Action("forward", stage, micro) for group in groups for stage in stages for micro in group
    ]
    backwards = [
        Action("backward", stage, micro)
        for group in groups
        for stage in reversed(stages)
        for micro in group
    ]
    ahead = ranks - 1 - rank  # the later ranks
    if virtual > 1:  # and the rounds before the last stage, twice the ranks: messages take time
        ahead = 2 * ahead + (virtual - 1) * ranks
    if schedule in ("forward", "gpipe"):
        ahead = len(forwards)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    if schedule != "forward":
        order += backwards[max(len(forwards) - ahead, 0) :]
    return tuple(action for action in order if action.micro < micros)


def _zero_bubble(ranks: int, micros: int, costs: Costs) -> Plan:
    """A free rank starts its most urgent ready action; 1f1b where that is no slower."""
    plan: list[list[Action]] = [[] for _ in range(ranks)]
    ended = {kind: [0] * ranks for kind in ("forward", "input", "weight")}  # micro-batches

    def most_urgent(rank: int) -> Kind | None:
        forwards = ended["forward"][rank]
        inputs = ended["input"][rank]
        weights = ended["weight"][rank]
        if inputs < forwards and (rank == ranks - 1 or inputs < ended["input"][rank + 1]):
            return "input"
        if (
            forwards < micros
            and forwards - weights < ranks
            and (rank == 0 or forwards < ended["forward"][rank - 1])
        ):
            return "forward"
        return "weight" if weights < inputs else None

    now = 0.0
    free = set(range(ranks))
    running = list[tuple[float, int, Kind]]()
    while True:
        for rank in sorted(free):
            if kind := most_urgent(rank):
                plan[rank].append(Action(kind, rank, ended[kind][rank]))
                heapq.heappush(running, (now + costs.of(kind, rank), rank, kind))
                free.remove(rank)
        if not running:
            break
        now = running[0][0]
        while running and running[0][0] == now:
            _, rank, kind = heapq.heappop(running)
            free.add(rank)
            ended[kind][rank] += 1
    split = tuple(map(tuple, plan))
    alternate = make_plan("1f1b", ranks, 1, micros)
    return split if simulate(split, costs).total < simulate(alternate, costs).total else alternate


class PlanError(AssertionError):
    pass


@dataclass(frozen=True)
class Timeline:
    start: tuple[tuple[float, ...], ...]
    finish: tuple[tuple[float, ...], ...]
    total: float
    busy: tuple[float, ...]
    live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        return 1.0 - sum(self.busy) / (len(self.busy) * self.total)


def simulate(plan: Plan, costs: Costs = UNIT) -> Timeline:
    """Transfers take no time."""
    stages = num_stages(plan)
    times = {kind: [costs.of(kind, stage) for stage in range(stages)] for kind in LIVES}
    start: list[list[float]] = [[] for _ in plan]
    finish: list[list[float]] = [[] for _ in plan]
    ended: dict[Need, float] = {}
    waiting: dict[Need, int] = {}  # the rank that continues
    ready = list(range(len(plan)))
    while ready:
        rank = ready.pop()
        now = finish[rank][-1] if finish[rank] else 0.0
        for index in range(len(finish[rank]), len(plan[rank])):
            kind, stage, micro = plan[rank][index]
            need = _need(kind, stage, micro, stages)
            if need and need not in ended:
                waiting[need] = rank
                break
            now = max(now, ended[need]) if need else now
            start[rank].append(now)
            now += times[kind][stage]
            finish[rank].append(now)
            if kind != "weight":
                done = ("forward" if kind == "forward" else "input", stage, micro)
                ended[done] = now
                if done in waiting:
                    ready.append(waiting.pop(done))
    left = [actions[len(ends) :] for actions, ends in zip(plan, finish, strict=True)]
    if any(left):
        stuck = "; ".join(
            f"rank {rank} at {actions[0]}" for rank, actions in enumerate(left) if actions
        )
        raise PlanError(f"the plan deadlocks: {stuck}")
    busy = tuple(sum(times[kind][stage] for kind, stage, _ in actions) for actions in plan)
    total = max(ends[-1] for ends in finish)
    return Timeline(
        tuple(map(tuple, start)),
        tuple(map(tuple, finish)),
        total,
        busy,
        tuple(map(_most_live, plan)),
    )


def _need(kind: Kind, stage: int, micro: int, stages: int) -> Need | None:
    if kind == "forward":
        return ("forward", stage - 1, micro) if stage else None
    if kind == "weight":
        return ("input", stage, micro)
    return ("input", stage + 1, micro) if stage + 1 < stages else ("forward", stage, micro)


def _most_live(actions: tuple[Action, ...]) -> int:
    changes = [LIVES[action.kind] for action in actions]
    return max(accumulate(changes)) if -1 in changes else 0
