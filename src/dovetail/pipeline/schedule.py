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
            for_input = self.of("input", stage)
            return for_input + self.of("weight", stage)
        by_kind = {"forward": self.forward, "input": self.input, "weight": self.weight}
        times = by_kind[kind]
        return times[stage] if isinstance(times, tuple) else times


UNIT = Costs()

# change of the number of live micro-batches
LIVES: Mapping[Kind, int] = MappingProxyType(
    {"forward": 1, "input": 0, "weight": -1, "backward": -1}
)


def num_stages(plan: Plan) -> int:
    last = max(action.stage for actions in plan for action in actions)
    return last + 1


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
    stages = range(rank, ranks * virtual, ranks)
    forwards: list[Action] = []
    backwards: list[Action] = []
    for first in range(0, micros, ranks):
        group = range(first, first + ranks)
        for stage in stages:
            forwards += [Action("forward", stage, micro) for micro in group]
        for stage in reversed(stages):
            backwards += [Action("backward", stage, micro) for micro in group]
    ahead = ranks - 1 - rank  # the later ranks
    if virtual > 1:  # and the rounds before the last stage, twice the ranks: messages take time
        ahead = 2 * ahead + (virtual - 1) * ranks
    if schedule in ("forward", "gpipe"):
        ahead = len(forwards)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    if schedule != "forward":
        paired = max(len(forwards) - ahead, 0)
        order += backwards[paired:]
    return tuple(action for action in order if action.micro < micros)


def _zero_bubble(ranks: int, micros: int, costs: Costs) -> Plan:
    """A free rank starts its most urgent ready action; 1f1b where that is no slower."""
    plan: list[list[Action]] = [[] for _ in range(ranks)]
    ended = {kind: [0] * ranks for kind in ("forward", "input", "weight")}  # micro-batches

    def most_urgent(rank: int) -> Kind | None:
        forwards = ended["forward"][rank]
        inputs = ended["input"][rank]
        weights = ended["weight"][rank]
        has_gradient = rank == ranks - 1 or inputs < ended["input"][rank + 1]
        if inputs < forwards and has_gradient:
            return "input"
        has_input = rank == 0 or forwards < ended["forward"][rank - 1]
        has_memory = forwards - weights < ranks
        if forwards < micros and has_memory and has_input:
            return "forward"
        return "weight" if weights < inputs else None

    now = 0.0
    free = set(range(ranks))
    running = list[tuple[float, int, Kind]]()
    while True:
        for rank in sorted(free):
            kind = most_urgent(rank)
            if kind is None:
                continue
            micro = ended[kind][rank]
            plan[rank].append(Action(kind, rank, micro))
            end = now + costs.of(kind, rank)
            heapq.heappush(running, (end, rank, kind))
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
    split_time = simulate(split, costs).total
    alternate_time = simulate(alternate, costs).total
    return split if split_time < alternate_time else alternate


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
        offered = len(self.busy) * self.total
        return 1.0 - sum(self.busy) / offered


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
        begun = len(finish[rank])
        for kind, stage, micro in plan[rank][begun:]:
            need = _need(kind, stage, micro, stages)
            if need and need not in ended:
                waiting[need] = rank
                break
            if need:
                now = max(now, ended[need])
            start[rank].append(now)
            now += times[kind][stage]
            finish[rank].append(now)
            if kind != "weight":
                done = ("forward" if kind == "forward" else "input", stage, micro)
                ended[done] = now
                if done in waiting:
                    ready.append(waiting.pop(done))
    stuck = []
    for rank, actions in enumerate(plan):
        done_actions = len(finish[rank])
        if done_actions < len(actions):
            stuck.append(f"rank {rank} at {actions[done_actions]}")
    if stuck:
        raise PlanError(f"the plan deadlocks: {'; '.join(stuck)}")
    busy = [sum(times[action.kind][action.stage] for action in actions) for actions in plan]
    total = max(ends[-1] for ends in finish)
    return Timeline(
        tuple(map(tuple, start)),
        tuple(map(tuple, finish)),
        total,
        tuple(busy),
        tuple(map(_most_live, plan)),
    )


def _need(kind: Kind, stage: int, micro: int, stages: int) -> Need | None:
    if kind == "forward":
        return ("forward", stage - 1, micro) if stage else None
    if kind == "weight":
        return ("input", stage, micro)
    if stage + 1 < stages:
        return ("input", stage + 1, micro)
    return ("forward", stage, micro)


def _most_live(actions: tuple[Action, ...]) -> int:
    changes = [LIVES[action.kind] for action in actions]
    if -1 not in changes:
        return 0
    return max(accumulate(changes))
