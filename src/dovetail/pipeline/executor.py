"""Runs one pipeline rank's part of a plan. Messages have no tags or shapes: every rank knows the plan.

NCCL's transfers run until both ends have started, and a host may wait for its device in any action; no plan may deadlock even
so. All ranks order all actions by one simulation, and post a receive right before the first action after the sender's:
everything waits for something earlier.
"""

from bisect import bisect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.errors import Caught
from dovetail.parallel.mesh import Mesh, P2PChannel
from dovetail.pipeline.schedule import Action, Plan, num_stages, simulate


class Message(NamedTuple):
    gradient: bool
    stage: int
    micro: int


def needed(action: Action, stages: int) -> Message | None:
    gradient = action.kind != "forward"
    nothing = action.kind == "weight" or action.stage == (stages - 1 if gradient else 0)
    return None if nothing else Message(gradient, action.stage, action.micro)


def produced(action: Action, stages: int) -> Message | None:
    gradient = action.kind != "forward"
    nothing = action.kind == "weight" or action.stage == (0 if gradient else stages - 1)
    if nothing:
        return None
    to = action.stage - 1 if gradient else action.stage + 1
    return Message(gradient, to, action.micro)


@lru_cache(maxsize=16)
def receives(plan: Plan, rank: int) -> tuple[tuple[Message, ...], ...]:
    order = [[(start, r) for start in starts] for r, starts in enumerate(simulate(plan).start)]
    posts: list[list[Message]] = [[] for _ in plan[rank]]
    for gradient, sender in ((False, (rank - 1) % len(plan)), (True, (rank + 1) % len(plan))):
        for at, action in zip(order[sender], plan[sender], strict=True):
            message = produced(action, num_stages(plan))
            if message and message.gradient == gradient:
                posts[bisect(order[rank], at)].append(message)
    return tuple(map(tuple, posts))


def connect(mesh: Mesh) -> None:
    """Use every channel once: NCCL makes communicators then. Even hops before odd ones: no cycle. Collective over pp."""
    rank = mesh["pp"].rank
    size = mesh["pp"].size
    channels = mesh.channels
    hops = [
        (rank, [(channels.to_next, dist.isend), (channels.from_next, dist.irecv)]),
        (
            (rank - 1) % size,
            [(channels.from_previous, dist.irecv), (channels.to_previous, dist.isend)],
        ),
    ]
    for _, transfers in sorted(hops, key=lambda hop: (hop[0] % 2, hop[0])):
        for channel, transfer in transfers:
            if channel is not None:
                _start(transfer, torch.zeros(1, device=mesh.device), channel).wait()


def run(plan: Plan, stages: Any, mesh: Mesh) -> None:
    """Collective over pp. Where stages are single ranks, one that fails goes on with zeros and raises at the end.

    stages: a runner of `engine.stage`. At the pipeline's ends None goes in and comes out.
    """
    actions = plan[mesh["pp"].rank]
    count = num_stages(plan)
    backwards = [i for i, action in enumerate(actions) if action.kind in ("backward", "input")]
    last = max(backwards, default=None)
    mail = Mailbox(plan, stages, mesh)
    failure = Caught(Exception if is_alone(mesh) else ())
    for i, action in enumerate(actions):
        mail.post(i)
        received = mail.wait(needed(action, count))
        result = None
        message = produced(action, count)
        if failure.error is None:
            with failure:
                if action.kind == "forward":
                    result = stages.forward(action.stage, action.micro, received)
                elif action.kind == "weight":
                    stages.weight(action.stage, action.micro)
                else:
                    result = stages.backward(action, received, last=i == last)
        if failure.error is not None and message is not None:
            result = stages.buffer(message.micro).zero_()
        mail.send(message, result)
    mail.close()
    if failure.error is not None:
        raise failure.error


def is_alone(mesh: Mesh) -> bool:
    return mesh["world"].size == mesh["pp"].size


class Mailbox:
    def __init__(self, plan: Plan, stages: Any, mesh: Mesh) -> None:
        axis = mesh["pp"]
        count = num_stages(plan)
        self.stages = stages
        self.channels = mesh.channels
        self.next = (axis.rank + 1) % axis.size
        self.previous = (axis.rank - 1) % axis.size
        self.posts = receives(plan, axis.rank)
        self.arrived: dict[Message, tuple[dist.Work, Tensor]] = {}
        self.leaving: list[tuple[Message, dist.Work, Tensor]] = []  # alive until they are sent
        around = [step for n in {self.previous, self.next} for step in enumerate(plan[n])]
        self.sent_at = {message: i for i, action in around if (message := produced(action, count))}
        self.needed_at = {message: i for i, action in around if (message := needed(action, count))}

    def post(self, i: int) -> None:
        tensors = [
            self.stages.buffer(message.micro) for message in self.posts[i]
        ]  # before any transfer
        for message, tensor in zip(self.posts[i], tensors, strict=True):
            channel = self.channels.from_next if message.gradient else self.channels.from_previous
            self.arrived[message] = _start(dist.irecv, tensor, channel), tensor

    def wait(self, message: Message | None) -> Tensor | None:
        if message is None:
            return None
        handle, tensor = self.arrived.pop(message)
        handle.wait()
        self._release(message)
        return tensor

    def send(self, message: Message | None, tensor: Tensor | None) -> None:
        assert (message is None) == (tensor is None), f"{message}: the stage returned {tensor}"
        if message is None or tensor is None:
            return
        tensor = tensor.detach().contiguous()
        expected = self.stages.buffer(message.micro)
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), (
            f"{message}: not as its buffer"
        )
        self.leaving = [leaving for leaving in self.leaving if not leaving[1].is_completed()]
        channel = self.channels.to_previous if message.gradient else self.channels.to_next
        self.leaving.append((message, _start(dist.isend, tensor, channel), tensor))

    def close(self) -> None:
        for _, handle, _ in self.leaving:
            handle.wait()

    def _release(self, received: Message) -> None:
        """Sends that `received` proves complete: gloo's handles complete in `wait` only, a GPU's host runs ahead."""
        sender = self._sender(received.gradient)
        now = self.sent_at[received]
        pending = []
        for message, handle, tensor in self.leaving:
            if self._sender(not message.gradient) == sender and self.needed_at[message] <= now:
                handle.wait()
            else:
                pending.append((message, handle, tensor))
        self.leaving = pending

    def _sender(self, gradient: bool) -> int:
        return self.next if gradient else self.previous


def _start(
    transfer: Callable[..., dist.Work | None], tensor: Tensor, channel: P2PChannel | None
) -> dist.Work:
    assert channel is not None, "a plan with virtual stages on a mesh without them"
    handle = transfer(tensor, channel.peer, group=channel.group)
    assert handle is not None
    return handle
