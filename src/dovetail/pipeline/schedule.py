"""What every pipeline rank does, in which order: schedules as plain data, made and checked without torch or processes."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "input", "weight"]


class Action(NamedTuple):
    """One stage computes one micro-batch.

    backward: both gradients at once; input, then weight later: the same in two halves, of which only the first is
    waited for by the stage before. Stages count through the whole model: rank r of P holds r, r + P, r + 2 P, ...
    """

    kind: Kind
    stage: int
    micro: int


Plan = tuple[tuple[Action, ...], ...]  # what each pipeline rank does, in order
Need = tuple[str, int, int]  # a forward, or as "input" the gradient for the stage before, be it of input or backward


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch, in any unit: one for all stages, or one a stage. A backward takes input + weight.

    The head's backward runs inside the last stage's forward, so that is where its time belongs.
    """

    forward: float | tuple[float, ...] = 1.0
    input: float | tuple[float, ...] = 1.0
    weight: float | tuple[float, ...] = 1.0

    def of(self, kind: Kind, stage: int) -> float:
        """The time that a stage takes for one micro-batch."""
        if kind == "backward":
            return self.of("input", stage) + self.of("weight", stage)
        times = {"forward": self.forward, "input": self.input, "weight": self.weight}[kind]
        return times[stage] if isinstance(times, tuple) else times


UNIT = Costs()

# Whether a kind starts or ends the life of activations; and what it computes, as bits: a backward is both halves.
LIVES: Mapping[Kind, int] = MappingProxyType({"forward": 1, "input": 0, "weight": -1, "backward": -1})
HALVES: Mapping[Kind, int] = MappingProxyType({"forward": 1, "input": 2, "weight": 4, "backward": 6})


def make_plan(schedule: str, ranks: int, virtual: int, micros: int, costs: Costs = UNIT) -> Plan:
    """The plan of one step of `micros` micro-batches over `ranks` x `virtual` stages.

    forward: no backward, for scoring. gpipe: all forwards, then all backwards. 1f1b and interleaved, which differ by
    `virtual` alone: a backward as soon as there is one, so that few activations live (`simulate` counts them).
    zero_bubble (one stage a rank): backwards in two halves, the second of which fills the time that a rank would wait;
    `costs` decide where. In every plan a rank needs what another sends it in the order in which it is sent.
    """
    assert ranks >= 1 and virtual >= 1 and micros >= 1, (ranks, virtual, micros)
    if schedule == "zero_bubble":
        assert virtual == 1, "zero_bubble has one stage a rank"
        return _zero_bubble(ranks, micros, costs)
    assert schedule in ("forward", "gpipe", "1f1b", "interleaved"), schedule
    return tuple(_alternate(schedule, rank, ranks, virtual, micros) for rank in range(ranks))


def _alternate(schedule: str, rank: int, ranks: int, virtual: int, micros: int) -> tuple[Action, ...]:
    """Some forwards, then backward and forward in turn, then the other backwards.

    Micro-batches go through a rank's stages in groups of one a rank: when the group's last leaves a stage, its first
    has come around to the next. The last group is filled up with micro-batches that do not exist, which are then left
    out: what remains of an order without deadlock has none.
    """
    groups = [range(first, first + ranks) for first in range(0, micros, ranks)]
    mine = range(rank, ranks * virtual, ranks)
    forwards = [Action("forward", stage, micro) for group in groups for stage in mine for micro in group]
    backwards = [Action("backward", stage, micro) for group in groups for stage in reversed(mine) for micro in group]
    ahead = ranks - 1 - rank  # the ranks that a micro-batch still has to pass
    if virtual > 1:  # the rounds before the last stage; and twice that way, so that what is sent has time to arrive
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
    """Time runs, and a rank that is free takes up the most urgent action that could start now.

    First what another rank waits for: a gradient for the stage before, then a forward, as long as at most `ranks`
    micro-batches live (as on 1f1b's first rank); last a weight gradient. No backward is whole: one that ended the rank's
    work would make the ranks end one after the other, and with equal stages a step would take 1f1b's time. Gradients are
    therefore synchronized after the plan. Where this order is no faster, the plan is 1f1b's.
    """
    plan: list[list[Action]] = [[] for _ in range(ranks)]
    ended = {kind: [0] * ranks for kind in ("forward", "input", "weight")}  # on a rank, all three go micro by micro

    def most_urgent(rank: int) -> Kind | None:
        forwards, inputs, weights = ended["forward"][rank], ended["input"][rank], ended["weight"][rank]
        if inputs < forwards and (rank == ranks - 1 or inputs < ended["input"][rank + 1]):
            return "input"
        if forwards < micros and forwards - weights < ranks and (rank == 0 or forwards < ended["forward"][rank - 1]):
            return "forward"
        return "weight" if weights < inputs else None

    now, free, running = 0.0, set(range(ranks)), list[tuple[float, int, Kind]]()
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
    found, alternate = tuple(map(tuple, plan)), make_plan("1f1b", ranks, 1, micros)
    return found if simulate(found, costs).total < simulate(alternate, costs).total else alternate


class PlanError(AssertionError):
    """A plan that cannot be carried out: our mistake, never the user's. The message names the actions."""


@dataclass(frozen=True)
class Timeline:
    """A plan in time. `start`, `finish`: of each rank's actions, in the plan's order. `live`: most micro-batches whose
    activations a rank keeps for a backward, counted a stage, from the forward until the last of the backward."""

    start: tuple[tuple[float, ...], ...]
    finish: tuple[tuple[float, ...], ...]
    total: float
    busy: tuple[float, ...]
    live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is spent waiting."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.total)


def simulate(plan: Plan, costs: Costs = UNIT) -> Timeline:
    """Carry out a plan: every rank goes through its actions in order and waits only for what an action needs.

    Sending takes no time and blocks nobody. Raises PlanError for a plan that is not whole or that deadlocks.
    """
    stages = _check_whole(plan)
    times = {kind: [costs.of(kind, stage) for stage in range(stages)] for kind in HALVES}
    start: list[list[float]] = [[] for _ in plan]
    finish: list[list[float]] = [[] for _ in plan]
    ended: dict[Need, float] = {}
    waiting: dict[Need, int] = {}  # the rank that goes on when this has ended; no two can wait for the same and go on
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
        stuck = "; ".join(f"rank {rank} at {actions[0]}" for rank, actions in enumerate(left) if actions)
        raise PlanError(f"the plan deadlocks: {stuck}")
    busy = tuple(sum(times[kind][stage] for kind, stage, _ in actions) for actions in plan)
    total = max(ends[-1] for ends in finish)
    return Timeline(tuple(map(tuple, start)), tuple(map(tuple, finish)), total, busy, tuple(map(_most_live, plan)))


def _need(kind: Kind, stage: int, micro: int, stages: int) -> Need | None:
    """What has to end before an action can start, if anything. What that in turn needed has ended before it."""
    if kind == "forward":
        return ("forward", stage - 1, micro) if stage else None
    if kind == "weight":
        return ("input", stage, micro)
    return ("input", stage + 1, micro) if stage + 1 < stages else ("forward", stage, micro)


def _most_live(actions: tuple[Action, ...]) -> int:
    changes = [LIVES[action.kind] for action in actions]
    return max(accumulate(changes)) if -1 in changes else 0


def _check_whole(plan: Plan) -> int:
    """The number of stages, if each computes every micro-batch once, on its rank: forward, and backward if any does."""
    ranks = len(plan)
    stages = ranks * -(-(1 + max(action.stage for actions in plan for action in actions)) // ranks)
    micros = 1 + max(action.micro for actions in plan for action in actions)
    found = [[0] * micros for _ in range(stages)]
    for rank, actions in enumerate(plan):
        for action in actions:
            kind, stage, micro = action
            if stage % ranks != rank:
                raise PlanError(
                    f"rank {rank} does not hold the stage of {action}; rank {stage % ranks} of {ranks} does"
                )
            if found[stage][micro] & HALVES[kind]:
                raise PlanError(f"rank {rank} does {action} twice")
            found[stage][micro] |= HALVES[kind]
    forward_only = all(has <= HALVES["forward"] for row in found for has in row)
    wanted = HALVES["forward"] | (0 if forward_only else HALVES["backward"])
    missing = [
        str(Action(kind, stage, micro))
        for stage, row in enumerate(found)
        for micro, has in enumerate(row)
        for kind in ("forward", "input", "weight")
        if wanted & ~has & HALVES[kind]
    ]
    if missing:
        raise PlanError(f"nobody does {', '.join(missing)}")
    return stages
