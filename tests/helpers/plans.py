"""Plans of pipelines, and runs of them."""

import random

import torch
from torch import Tensor

from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.parallel.process_group import pick_device
from dovetail.pipeline import executor
from dovetail.pipeline.schedule import Action, Kind, Plan, make_plan, num_stages

TOKENS = (
    4,
    4,
    0,
    5,
    4,
    1,
    4,
    4,
)  # by micro-batch; as many of one size that only values tell them apart
SOME_TOKENS = tuple(
    max(1, n) for n in TOKENS
)  # where a message must not be empty; a micro-batch never is
FEATURES = 3
SCHEDULES = ("forward", "gpipe", "1f1b", "interleaved")


class Toy:
    """Stage s gives a_s x + micro, and the loss is half the sum of squares of what the last one gives."""

    def __init__(self, stages: int, device: torch.device | str = "cpu") -> None:
        self.end, self.device = stages - 1, torch.device(device)
        self.tokens = TOKENS if self.device.type == "cpu" else SOME_TOKENS
        self.calls: list[Action] = []
        self.last: list[Action] = []
        self.values: dict[tuple[str, int, int], Tensor] = {}

    def scale(self, stage: int) -> float:
        return 1.0 + (stage + 1) / 7

    def buffer(self, micro: int) -> Tensor:
        return torch.full(
            (self.tokens[micro], FEATURES), float("nan"), dtype=torch.float64, device=self.device
        )

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        self.calls.append(Action("forward", stage, micro))
        assert (x is None) == (stage == 0)
        if x is None:
            generator = torch.Generator().manual_seed(micro)
            x = torch.randn(
                self.tokens[micro], FEATURES, dtype=torch.float64, generator=generator
            ).to(self.device)
        assert not x.requires_grad
        y = (
            x.T.contiguous().requires_grad_() * self.scale(stage) + micro
        ).T  # not contiguous, with a graph
        self.values |= {("x", stage, micro): x, ("y", stage, micro): y.detach()}
        return None if stage == self.end else y

    def backward(self, action: Action, grad: Tensor | None, *, last: bool) -> Tensor | None:
        self.calls.append(action)
        _, stage, micro = action
        assert (grad is None) == (stage == self.end)
        self.last += [action] if last else []
        self.values["grad", stage, micro] = self.values["y", stage, micro] if grad is None else grad
        if action.kind == "backward":
            self._weight(stage, micro)
        return self.values["grad", stage, micro] * self.scale(stage) if stage else None

    def weight(self, stage: int, micro: int) -> None:
        self.calls.append(Action("weight", stage, micro))
        self._weight(stage, micro)

    def _weight(self, stage: int, micro: int) -> None:
        self.values["da", stage, micro] = (
            self.values["grad", stage, micro] * self.values["x", stage, micro]
        )


def in_one_process(stages: int, micros: int, device: torch.device, *, backward: bool) -> Toy:
    """The same without a plan: every micro-batch from the first stage to the last and back."""
    toy = Toy(stages, device)
    for micro in range(micros):
        x = grad = None
        for stage in range(stages):
            y = toy.forward(stage, micro, x)
            x = None if y is None else y.detach()
        for stage in reversed(range(stages)) if backward else ():
            grad = toy.backward(Action("backward", stage, micro), grad, last=False)
    return toy


def any_plan(ranks: int, virtual: int, micros: int, seed: int) -> Plan:
    """A random plan: whatever could be done now is done next, some backwards in halves."""
    draw, stages = random.Random(seed), ranks * virtual
    plan: list[list[Action]] = [[] for _ in range(ranks)]
    todo: list[Action] = []
    for stage in range(stages):
        for micro in range(micros):
            halves: tuple[Kind, ...] = draw.choice((("backward",), ("input", "weight")))
            todo += [Action(kind, stage, micro) for kind in ("forward", *halves)]
    done: set[tuple[bool, int, int]] = set()

    def can_start(action: Action) -> bool:
        kind, stage, micro = action
        if kind == "forward":
            return stage == 0 or (False, stage - 1, micro) in done
        if kind == "weight":
            return (True, stage, micro) in done
        return (False, stage, micro) in done and (
            stage == stages - 1 or (True, stage + 1, micro) in done
        )

    while todo:
        action = draw.choice([action for action in todo if can_start(action)])
        todo.remove(action)
        plan[action.stage % ranks].append(action)
        if action.kind != "weight":
            done.add((action.kind != "forward", action.stage, action.micro))
    return tuple(map(tuple, plan))


def check(plan: Plan, mesh: Mesh) -> None:
    """This rank does its part of the plan, with the values of one process, and learns which backward is its last."""
    stages, mine = num_stages(plan), plan[mesh["pp"].rank]
    toy = Toy(stages, mesh.device)
    executor.run(plan, toy, mesh)
    assert tuple(toy.calls) == mine
    assert toy.last == [action for action in mine if action.kind in ("backward", "input")][-1:]
    micros = 1 + max(action.micro for action in mine)
    backward = any(action.kind != "forward" for action in mine)
    expected = in_one_process(stages, micros, mesh.device, backward=backward).values
    expected = {
        name: x for name, x in expected.items() if name[1] % mesh["pp"].size == mesh["pp"].rank
    }
    assert set(toy.values) == set(expected)
    wrong = [name for name, x in toy.values.items() if not torch.equal(x, expected[name])]
    assert not wrong, f"wrong values: {wrong}"


def check_all(ranks: int, plans: dict[int, list[Plan]], device: str = "cpu") -> None:
    """Plans by number of virtual stages, each list on one mesh."""
    for virtual, some in plans.items():
        mesh = Mesh.build(Layout(pp=ranks, virtual_stages=virtual), pick_device(device))
        executor.connect(mesh)
        for plan in some:
            check(plan, mesh)


def every_schedule(ranks: int) -> dict[int, list[Plan]]:
    """By number of virtual stages."""
    micros = (1, 7)
    plans = {
        virtual: [make_plan(name, ranks, virtual, n) for name in SCHEDULES for n in micros]
        for virtual in (1, 2, 3)
    }
    plans[1] += [make_plan("zero_bubble", ranks, 1, n) for n in micros]
    return plans


def random_plans(ranks: int) -> dict[int, list[Plan]]:
    """By number of virtual stages."""
    micros = (1, 5, len(TOKENS))
    return {virtual: [any_plan(ranks, virtual, n, seed=n) for n in micros] for virtual in (1, 2, 3)}


def in_the_receivers_order(plan: Plan, rank: int) -> list[list[executor.Message]]:
    """The mutation of `receives`: each message where it is needed, not in the order in which it is sent."""
    needs = (executor.needed(action, num_stages(plan)) for action in plan[rank])
    return [[message] if message else [] for message in needs]
