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
from dovetail.parallel.axes import P2PChannel
from dovetail.parallel.mesh import Mesh
from dovetail.pipeline.schedule import Action, Plan, num_stages, simulate


class Message(NamedTuple):
    gradient: bool
    stage: int
    micro: int


def needed(action: Action, stages: int) -> Message | None:
    """Returns what an action waits for; None at the end of the pipeline where it begins."""
    gradient = action.kind != "forward"
    first = stages - 1 if gradient else 0
    if action.kind == "weight" or action.stage == first:
        return None
    return Message(gradient, action.stage, action.micro)


def produced(action: Action, stages: int) -> Message | None:
    """Returns what an action sends; None at the end of the pipeline where it ends."""
    gradient = action.kind != "forward"
    last = 0 if gradient else stages - 1
    if action.kind == "weight" or action.stage == last:
        return None
    to = action.stage - 1 if gradient else action.stage + 1
    return Message(gradient, to, action.micro)


@lru_cache(maxsize=16)
def receives(plan: Plan, rank: int) -> tuple[tuple[Message, ...], ...]:
    """Returns the receives that a rank posts before each of its actions."""
    stages = num_stages(plan)
    ranks = len(plan)
    times = simulate(plan).start
    own_starts = [(start, rank) for start in times[rank]]
    posts: list[list[Message]] = [[] for _ in plan[rank]]
    previous = (rank - 1) % ranks
    following = (rank + 1) % ranks
    for gradient, sender in ((False, previous), (True, following)):
        sent = zip(times[sender], plan[sender], strict=True)
        for start, action in sent:
            message = produced(action, stages)
            if message and message.gradient == gradient:
                place = bisect(own_starts, (start, sender))
                posts[place].append(message)
    return tuple(map(tuple, posts))


def connect(mesh: Mesh) -> None:
    """Use every channel once: NCCL makes communicators then. Even hops before odd ones: no cycle. Collective over pp."""
    rank = mesh["pp"].rank
    size = mesh["pp"].size
    channels = mesh.channels
    to_next = (channels.to_next, dist.isend)
    from_next = (channels.from_next, dist.irecv)
    from_previous = (channels.from_previous, dist.irecv)
    to_previous = (channels.to_previous, dist.isend)
    hops = {rank: (to_next, from_next)}
    before = (rank - 1) % size
    known = hops.get(before, ())
    hops[before] = (*known, from_previous, to_previous)
    for hop in sorted(hops, key=lambda hop: (hop % 2, hop)):
        for channel, transfer in hops[hop]:
            if channel is not None:
                number = torch.zeros(1, device=mesh.device)
                _start(transfer, number, channel).wait()


def run(plan: Plan, stages: Any, mesh: Mesh) -> None:
    """Collective over pp. Where stages are single ranks, one that fails goes on with zeros and raises at the end.

    stages: a runner of `engine.stage`. At the pipeline's ends None goes in and comes out.
    """
    rank = mesh["pp"].rank
    actions = plan[rank]
    count = num_stages(plan)
    last = None  # the last backward pass
    for i, action in enumerate(actions):
        if action.kind in ("backward", "input"):
            last = i
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
        self.stages = stages
        self.channels = mesh.channels
        self.next = (axis.rank + 1) % axis.size
        self.previous = (axis.rank - 1) % axis.size
        self.posts = receives(plan, axis.rank)
        self.arrived: dict[Message, tuple[dist.Work, Tensor]] = {}
        self.leaving: list[tuple[Message, dist.Work, Tensor]] = []  # alive until they are sent
        # when the neighbors send and need each message, as numbers of their actions
        self.sent_at: dict[Message, int] = {}
        self.needed_at: dict[Message, int] = {}
        count = num_stages(plan)
        for neighbor in {self.previous, self.next}:
            for i, action in enumerate(plan[neighbor]):
                sent = produced(action, count)
                awaited = needed(action, count)
                if sent is not None:
                    self.sent_at[sent] = i
                if awaited is not None:
                    self.needed_at[awaited] = i

    def post(self, i: int) -> None:
        messages = self.posts[i]
        tensors = [self.stages.buffer(message.micro) for message in messages]  # before transfers
        channels = self.channels
        for message, tensor in zip(messages, tensors, strict=True):
            channel = channels.from_next if message.gradient else channels.from_previous
            handle = _start(dist.irecv, tensor, channel)
            self.arrived[message] = (handle, tensor)

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
        assert tensor.shape == expected.shape, f"{message}: not of its buffer's shape"
        assert tensor.dtype == expected.dtype, f"{message}: not of its buffer's dtype"
        pending = []
        for leaving in self.leaving:
            _, handle, _ = leaving
            if not handle.is_completed():
                pending.append(leaving)
        self.leaving = pending
        channels = self.channels
        channel = channels.to_previous if message.gradient else channels.to_next
        handle = _start(dist.isend, tensor, channel)
        self.leaving.append((message, handle, tensor))

    def close(self) -> None:
        for _, handle, _ in self.leaving:
            handle.wait()

    def _release(self, received: Message) -> None:
        """Waits for sends that `received` proves complete.

        gloo's handles complete in `wait` only, and a GPU's host runs ahead.
        """
        sender = self._sender(received.gradient)
        now = self.sent_at[received]
        pending = []
        for leaving in self.leaving:
            message, handle, _ = leaving
            receiver = self._sender(not message.gradient)
            if receiver == sender and self.needed_at[message] <= now:
                handle.wait()
            else:
                pending.append(leaving)
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
