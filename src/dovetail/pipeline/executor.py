"""Runs one pipeline rank's part of a plan: when its stages compute, and the messages between ranks.

Messages carry no tag and no shape. Every rank has the plan of all, so a receiver posts the receives of each channel in the
order in which its neighbor sends, whatever the order in which it needs them.

NCCL's sends and receives are kernels that run until both ends have started, and a host may have to wait for its whole
device at any time (to load a kernel, to free memory), and so for all transfers it posted. No plan may deadlock even where
every host does that in every action. So all ranks put all actions of the plan in one order, that of a simulation, and a
rank posts a receive right before its first action after the sender's. Then everything waits for something earlier: a
receive for the sender's action, and a send for the action before the receive, which in that order precedes its own.
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
    """The computation of one rank's stages.

    It never writes to a tensor that it returned, which may be in transfer. On a GPU it may wait for its stream but not for the
    whole device, where transfers may wait for what other ranks have not computed yet.
    """

    def buffer(self, micro: int) -> Tensor:
        """Fresh memory for this micro-batch, or its gradient, at a stage boundary."""

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor | None:
        """The next stage's input, None at the last stage. The first stage has no `x`."""

    def backward(self, action: Action, grad: Tensor | None, *, last: bool) -> Tensor | None:
        """The previous stage's gradient, None at stage 0. The last stage has no `grad`. Kind: backward or input.

        last: this rank's last action of these kinds in the plan.
        """

    def weight(self, stage: int, micro: int) -> None:
        """The parameters' gradients that an `input` action left."""


class Message(NamedTuple):
    """An activation of the stage before `stage`, or a gradient of the stage after it."""

    gradient: bool
    stage: int  # the receiver
    micro: int


class Departure(NamedTuple):
    """A message that may still be in transfer."""

    message: Message
    handle: dist.Work
    tensor: Tensor  # kept alive until it is sent


def num_stages(plan: Plan) -> int:
    """The number of stages of the whole model."""
    return 1 + max(action.stage for actions in plan for action in actions)


def needed(action: Action, stages: int) -> Message | None:
    """The message that an action waits for."""
    gradient = action.kind != "forward"
    nothing = action.kind == "weight" or action.stage == (stages - 1 if gradient else 0)
    return None if nothing else Message(gradient, action.stage, action.micro)


def produced(action: Action, stages: int) -> Message | None:
    """The message that an action sends."""
    gradient = action.kind != "forward"
    nothing = action.kind == "weight" or action.stage == (0 if gradient else stages - 1)
    return None if nothing else Message(gradient, action.stage + (-1 if gradient else 1), action.micro)


@lru_cache(maxsize=16)
def receives(plan: Plan, rank: int) -> tuple[tuple[Message, ...], ...]:
    """The receives that a rank posts right before each of its actions, channel by channel."""
    order = [[(start, r) for start in starts] for r, starts in enumerate(simulate(plan).start)]
    posts: list[list[Message]] = [[] for _ in plan[rank]]
    for gradient, sender in ((False, (rank - 1) % len(plan)), (True, (rank + 1) % len(plan))):
        for at, action in zip(order[sender], plan[sender], strict=True):
            message = produced(action, num_stages(plan))
            if message and message.gradient == gradient:
                posts[bisect(order[rank], at)].append(message)
    return tuple(map(tuple, posts))


def connect(mesh: Mesh) -> None:
    """Use every channel of this rank once. Collective over mesh["pp"].

    NCCL makes the communicator of two ranks at its first use, where each waits for the other. All ranks connect their
    channels in one global order, so no cycle can wait. Even hops go before odd ones: hops without a common rank do not
    wait for each other.
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
    """One rank's part of `plan`. Collective over mesh["pp"]; where `stages` raises, the other ranks are left waiting."""
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
    """One rank's transfers: messages that arrived before they are needed, and sends in flight."""

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
        """Start the receives of this rank's i-th action, after allocating memory for all of them."""
        tensors = [self.stages.buffer(message.micro) for message in self.posts[i]]
        for message, tensor in zip(self.posts[i], tensors, strict=True):
            channel = self.channels.from_next if message.gradient else self.channels.from_previous
            self.arrived[message] = _start(dist.irecv, tensor, channel), tensor

    def wait(self, message: Message | None) -> Tensor | None:
        """The tensor of `message`; on a GPU only its stream waits."""
        if message is None:
            return None
        handle, tensor = self.arrived.pop(message)
        if handle is not None:
            handle.wait()
            self._release(message)
        return tensor

    def send(self, message: Message | None, tensor: Tensor | None) -> None:
        """Start to send `tensor`; within one rank, it has arrived."""
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
        """Wait for all sends."""
        assert not self.arrived, "the plan sends messages that no action needs"
        for departure in self.leaving:
            departure.handle.wait()

    def _release(self, received: Message) -> None:
        """Drop the sends that `received` proves complete: its sender needed them first.

        This bounds memory by the plan even with gloo, whose handles complete only in `wait`, and on a GPU, whose host runs
        ahead. These waits do not block.
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
        """The neighbor that sends gradients, or activations, to this rank."""
        return self.next if gradient else self.previous


def _start(transfer: Callable[..., dist.Work | None], tensor: Tensor, channel: P2PChannel | None) -> dist.Work:
    assert channel is not None, "a plan with virtual stages on a mesh without them"
    handle = transfer(tensor, channel.peer, group=channel.group)
    assert handle is not None
    return handle
