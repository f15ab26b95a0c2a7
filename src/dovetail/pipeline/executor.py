"""Runs one pipeline rank's part of a plan.

Messages have no tags and no shapes: every rank knows the whole plan, so receives of a channel are posted in the order in
which the neighbor sends.

NCCL's transfers are kernels that run until both ends have started, and a host may have to wait for its whole device at
any time (to load a kernel, to free memory). No plan may deadlock even where every host does so in every action. So all
ranks order all actions by one simulation, and a rank posts a receive right before its first action after the sender's.
Then everything waits for something earlier: a receive for the sender's action, a send for the action before the receive.
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


class StageRunner(Protocol):
    """One rank's stages. They do not write to returned tensors, and wait for the stream, never for the whole device."""

    def buffer(self, micro: int) -> Tensor:
        """Fresh memory for a micro-batch, or its gradient, at a stage boundary."""

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        """-> the next stage's input, None at the last stage. x: None at the first stage."""

    def backward(self, action: Action, grad: Tensor | None, *, last: bool) -> Tensor | None:
        """-> the previous stage's gradient, None at stage 0. grad: None at the last stage."""

    def weight(self, stage: int, micro: int) -> None:
        """Weight gradients after an `input` action."""


class Message(NamedTuple):
    """An activation of the stage before `stage`, or a gradient of the one after it."""

    gradient: bool
    stage: int  # the receiver
    micro: int


class Departure(NamedTuple):
    """A send in flight."""

    message: Message
    handle: dist.Work
    tensor: Tensor  # kept alive until it is sent


def num_stages(plan: Plan) -> int:
    return 1 + max(action.stage for actions in plan for action in actions)


def needed(action: Action, stages: int) -> Message | None:
    gradient = action.kind != "forward"
    nothing = action.kind == "weight" or action.stage == (stages - 1 if gradient else 0)
    return None if nothing else Message(gradient, action.stage, action.micro)


def produced(action: Action, stages: int) -> Message | None:
    gradient = action.kind != "forward"
    nothing = action.kind == "weight" or action.stage == (0 if gradient else stages - 1)
    return None if nothing else Message(gradient, action.stage + (-1 if gradient else 1), action.micro)


@lru_cache(maxsize=16)
def receives(plan: Plan, rank: int) -> tuple[tuple[Message, ...], ...]:
    """Receives to post right before each action."""
    order = [[(start, r) for start in starts] for r, starts in enumerate(simulate(plan).start)]
    posts: list[list[Message]] = [[] for _ in plan[rank]]
    for gradient, sender in ((False, (rank - 1) % len(plan)), (True, (rank + 1) % len(plan))):
        for at, action in zip(order[sender], plan[sender], strict=True):
            message = produced(action, num_stages(plan))
            if message and message.gradient == gradient:
                posts[bisect(order[rank], at)].append(message)
    return tuple(map(tuple, posts))


def connect(mesh: Mesh) -> None:
    """Use every channel once. Collective over pp.

    NCCL makes a communicator at its first use, where both ranks wait. One global order leaves no cycle; even hops go before
    odd ones, since hops without a common rank do not wait for each other.
    """
    rank, size, channels = mesh["pp"].rank, mesh["pp"].size, mesh.channels
    hops = [  # by the number of their first rank
        (rank, [(channels.to_next, dist.isend), (channels.from_next, dist.irecv)]),
        ((rank - 1) % size, [(channels.from_previous, dist.irecv), (channels.to_previous, dist.isend)]),
    ]
    for _, transfers in sorted(hops, key=lambda hop: (hop[0] % 2, hop[0])):
        for channel, transfer in transfers:
            if channel is not None:
                _start(transfer, torch.zeros(1, device=mesh.device), channel).wait()


def run(plan: Plan, stages: StageRunner, mesh: Mesh) -> None:
    """One rank's part of `plan`. Collective over pp."""
    actions, count = plan[mesh["pp"].rank], num_stages(plan)
    last = max((i for i, action in enumerate(actions) if action.kind in ("backward", "input")), default=None)
    mail = Mailbox(plan, stages, mesh)
    for i, action in enumerate(actions):
        mail.post(i)
        received, result = mail.wait(needed(action, count)), None
        if action.kind == "forward":
            result = stages.forward(action.stage, action.micro, received)
        elif action.kind == "weight":
            stages.weight(action.stage, action.micro)
        else:
            result = stages.backward(action, received, last=i == last)
        mail.send(produced(action, count), result)
    mail.close()


class Mailbox:
    """One rank's receives and sends in flight."""

    def __init__(self, plan: Plan, stages: StageRunner, mesh: Mesh) -> None:
        axis, count = mesh["pp"], num_stages(plan)
        assert len(plan) == axis.size, f"a plan of {len(plan)} ranks on pp={axis.size}"
        self.stages, self.channels = stages, mesh.channels
        self.next, self.previous = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        self.alone = axis.size == 1
        self.posts = tuple(() for _ in plan[axis.rank]) if self.alone else receives(plan, axis.rank)
        self.arrived: dict[Message, tuple[dist.Work | None, Tensor]] = {}
        self.leaving: list[Departure] = []
        around = [step for n in {self.previous, self.next} for step in enumerate(plan[n])]
        self.sent_at = {message: i for i, action in around if (message := produced(action, count))}
        self.needed_at = {message: i for i, action in around if (message := needed(action, count))}

    def post(self, i: int) -> None:
        tensors = [self.stages.buffer(message.micro) for message in self.posts[i]]
        for message, tensor in zip(self.posts[i], tensors, strict=True):
            channel = self.channels.from_next if message.gradient else self.channels.from_previous
            self.arrived[message] = _start(dist.irecv, tensor, channel), tensor

    def wait(self, message: Message | None) -> Tensor | None:
        if message is None:
            return None
        handle, tensor = self.arrived.pop(message)
        if handle is not None:
            handle.wait()
            self._release(message)
        return tensor

    def send(self, message: Message | None, tensor: Tensor | None) -> None:
        """Within one rank it has arrived at once."""
        assert (message is None) == (tensor is None), f"{message}: the stage returned {tensor}"
        if message is None or tensor is None:
            return
        tensor, expected = tensor.detach().contiguous(), self.stages.buffer(message.micro)
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), f"{message}: not as its buffer"
        if self.alone:
            self.arrived[message] = None, tensor
            return
        self.leaving = [departure for departure in self.leaving if not departure.handle.is_completed()]
        channel = self.channels.to_previous if message.gradient else self.channels.to_next
        self.leaving.append(Departure(message, _start(dist.isend, tensor, channel), tensor))

    def close(self) -> None:
        assert not self.arrived, "the plan sends messages that no action needs"
        for departure in self.leaving:
            departure.handle.wait()

    def _release(self, received: Message) -> None:
        """Drop the sends that `received` proves complete, without blocking.

        Handles of gloo complete only in `wait`, and the host of a GPU runs ahead.
        """
        sender, now = self._sender(received.gradient), self.sent_at[received]
        pending = []
        for departure in self.leaving:
            receiver = self._sender(not departure.message.gradient)
            if receiver == sender and self.needed_at[departure.message] <= now:
                departure.handle.wait()
            else:
                pending.append(departure)
        self.leaving = pending

    def _sender(self, gradient: bool) -> int:
        return self.next if gradient else self.previous


def _start(transfer: Callable[..., dist.Work | None], tensor: Tensor, channel: P2PChannel | None) -> dist.Work:
    assert channel is not None, "a plan with virtual stages on a mesh without them"
    handle = transfer(tensor, channel.peer, group=channel.group)
    assert handle is not None
    return handle
