"""Runs one rank's part of a plan: decides when its stages compute, and carries what goes between ranks.

No message carries a tag or a shape. Every rank has the plan of all, so a receiver posts its receives on each road in the
order in which its neighbor sends there, whatever the order in which it needs them; what comes early waits in a mailbox.
Nothing can be taken for something else, on any backend, even where the previous and the next rank are the same.

NCCL's sends and receives are kernels that run until both ends are there, and a host may have to wait for its whole
device at any time (to load or time a kernel, to free memory), and so for all that it posted. No plan may deadlock even
where every host does that in every action, so all ranks put all actions of the plan in one order, and a rank posts a
receive right before its first action that comes after the sender's. Then whatever waits, waits for something earlier:
a receive for the sender's action, and a send for the action before the receive, which in that order lies before its own.
The order is that of a simulation, so receives are under way when their messages are sent.
"""

from bisect import bisect
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.parallel.mesh import Mesh, P2PChannel
from dovetail.pipeline.schedule import Action, Plan, simulate


class Work(Protocol):
    """What the stages of one rank compute.

    The tensors it returns are on their way afterwards: it never writes to them. On a GPU it may wait for its stream, but
    not for the whole device, where transfers may wait for what other ranks have not computed yet.
    """

    def buffer(self, micro: int) -> Tensor:
        """Fresh memory, of the shape and dtype in which this micro-batch and its gradient cross every boundary."""

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        """What the next stage gets, None at the last stage. The first stage has no `x`."""

    def backward(self, action: Action, grad: Tensor | None, *, last: bool) -> Tensor | None:
        """The gradient for the previous stage, None at stage 0. The last stage has no `grad`. Kind: backward or input.

        last: this rank's last action of these kinds in the plan, so the one after which gradients are complete but for
        weight actions.
        """

    def weight(self, stage: int, micro: int) -> None:
        """The half that an `input` action left: the gradients of the parameters."""


class Message(NamedTuple):
    """What a stage waits for: an activation of the stage before it, or a gradient of the stage after it."""

    gradient: bool
    stage: int  # the stage that it is addressed to
    micro: int


class Departure(NamedTuple):
    """A message that may still be on its way."""

    message: Message
    handle: dist.Work
    tensor: Tensor  # held until it is gone


def num_stages(plan: Plan) -> int:
    """The number of stages of the whole model."""
    return 1 + max(action.stage for actions in plan for action in actions)


def needed(action: Action, stages: int) -> Message | None:
    """What an action waits for."""
    gradient = action.kind != "forward"
    nothing = action.kind == "weight" or action.stage == (stages - 1 if gradient else 0)
    return None if nothing else Message(gradient, action.stage, action.micro)


def produced(action: Action, stages: int) -> Message | None:
    """What an action leaves for another stage."""
    gradient = action.kind != "forward"
    nothing = action.kind == "weight" or action.stage == (0 if gradient else stages - 1)
    return None if nothing else Message(gradient, action.stage + (-1 if gradient else 1), action.micro)


@lru_cache(maxsize=16)
def receives(plan: Plan, rank: int) -> tuple[tuple[Message, ...], ...]:
    """What a rank has to have on the way before each of its actions and not yet before the one before, road by road."""
    order = [[(start, r) for start in starts] for r, starts in enumerate(simulate(plan).start)]
    found: list[list[Message]] = [[] for _ in plan[rank]]
    for gradient, sender in ((False, (rank - 1) % len(plan)), (True, (rank + 1) % len(plan))):
        for at, action in zip(order[sender], plan[sender], strict=True):
            message = produced(action, num_stages(plan))
            if message and message.gradient == gradient:
                found[bisect(order[rank], at)].append(message)
    return tuple(map(tuple, found))


def connect(mesh: Mesh) -> None:
    """Use every road of this rank once. Collective over mesh["pp"].

    NCCL makes the communicator of two ranks at its first use, where each waits for the other. All ranks take their roads
    in one order of the whole line, so that no cycle can wait: of the roads not yet made, both ends of the first one are
    at it. Even hops go before odd ones, because hops without a rank in common do not wait for each other.
    """
    rank, size, links = mesh["pp"].rank, mesh["pp"].size, mesh.links
    hops = [  # each named after its first rank
        (rank, [(links.to_next, dist.isend), (links.from_next, dist.irecv)]),
        ((rank - 1) % size, [(links.from_previous, dist.irecv), (links.to_previous, dist.isend)]),
    ]
    for _, roads in sorted(hops, key=lambda hop: (hop[0] % 2, hop[0])):
        for link, transfer in roads:
            if link is not None:
                _start(transfer, torch.zeros(1, device=mesh.device), link).wait()


def run(plan: Plan, work: Work, mesh: Mesh) -> None:
    """One rank's part of `plan`. Collective over mesh["pp"]; where `work` raises, the other ranks wait in vain."""
    actions, stages = plan[mesh["pp"].rank], num_stages(plan)
    last = max((i for i, action in enumerate(actions) if action.kind in ("backward", "input")), default=None)
    mail = Mail(plan, work, mesh)
    for i, action in enumerate(actions):
        mail.post(i)
        received, result = mail.take(needed(action, stages)), None
        if action.kind == "forward":
            result = work.forward(action.stage, action.micro, received)
        elif action.kind == "weight":
            work.weight(action.stage, action.micro)
        else:
            result = work.backward(action, received, last=i == last)
        mail.send(produced(action, stages), result)
    mail.close()


class Mail:
    """What was sent to one rank before it needs it, and what it sent and does not know to have arrived."""

    def __init__(self, plan: Plan, work: Work, mesh: Mesh) -> None:
        axis, stages = mesh["pp"], num_stages(plan)
        assert len(plan) == axis.size, f"a plan of {len(plan)} ranks on pp={axis.size}"
        self.work, self.links = work, mesh.links
        self.next, self.previous = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        self.alone = axis.size == 1
        self.coming = tuple(() for _ in plan[axis.rank]) if self.alone else receives(plan, axis.rank)
        self.arrived: dict[Message, tuple[dist.Work | None, Tensor]] = {}
        self.leaving: list[Departure] = []
        around = [step for n in {self.previous, self.next} for step in enumerate(plan[n])]
        self.sent_at = {message: i for i, action in around if (message := produced(action, stages))}
        self.needed_at = {message: i for i, action in around if (message := needed(action, stages))}

    def post(self, i: int) -> None:
        """Have the receives under way that belong before this rank's i-th action; first comes the memory for all."""
        tensors = [self.work.buffer(message.micro) for message in self.coming[i]]
        for message, tensor in zip(self.coming[i], tensors, strict=True):
            link = self.links.from_next if message.gradient else self.links.from_previous
            self.arrived[message] = _start(dist.irecv, tensor, link), tensor

    def take(self, message: Message | None) -> Tensor | None:
        """Wait for `message`; on a GPU only its stream waits."""
        if message is None:
            return None
        handle, tensor = self.arrived.pop(message)
        if handle is not None:
            handle.wait()
            self._release(message)
        return tensor

    def send(self, message: Message | None, tensor: Tensor | None) -> None:
        """Have `tensor` on its way as `message`; within one rank, it has arrived."""
        assert (message is None) == (tensor is None), f"{message}: the stage returned {tensor}"
        if message is None or tensor is None:
            return
        tensor, expected = tensor.detach().contiguous(), self.work.buffer(message.micro)
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), f"{message}: not as its buffer"
        if self.alone:
            self.arrived[message] = None, tensor
            return
        self.leaving = [departure for departure in self.leaving if not departure.handle.is_completed()]
        link = self.links.to_previous if message.gradient else self.links.to_next
        self.leaving.append(Departure(message, _start(dist.isend, tensor, link), tensor))

    def close(self) -> None:
        """Wait until all that this rank sent is gone."""
        assert not self.arrived, "a plan that sends what nobody needs"
        for departure in self.leaving:
            departure.handle.wait()

    def _release(self, received: Message) -> None:
        """Drop what `received` proves to be gone: its sender needed that before.

        So no more is held than the plan keeps alive, even by gloo, whose handles know nothing before they are waited
        for, and by the host of a GPU, which runs ahead of them. These waits do not wait.
        """
        sender, now = self._sender(received.gradient), self.sent_at[received]
        kept = []
        for departure in self.leaving:
            receiver = self._sender(not departure.message.gradient)
            if receiver == sender and self.needed_at[departure.message] <= now:
                departure.handle.wait()
            else:
                kept.append(departure)
        self.leaving = kept

    def _sender(self, gradient: bool) -> int:
        """The neighbor that sends gradients here, or activations; it gets the others from here."""
        return self.next if gradient else self.previous


def _start(transfer: Callable[..., dist.Work | None], tensor: Tensor, link: P2PChannel | None) -> dist.Work:
    assert link is not None, "a plan with virtual stages on a mesh without them"
    handle = transfer(tensor, link.peer, group=link.group)
    assert handle is not None
    return handle
