"""The rollout buffer: groups that are sampled ahead of the step that trains on them."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from itertools import groupby

from dovetail.errors import Caught, MachineError
from dovetail.rl.asynchronous.checkpoint import RolloutCheckpoint, versions_of
from dovetail.rl.asynchronous.staleness import StalenessController
from dovetail.sampler.base import Watch
from dovetail.sampler.turn import GenerationRequest, Generator, Turn

BegunGroup = tuple[int, Sequence[GenerationRequest]]


class RolloutBuffer:
    """Samples the groups that a staleness controller admits, and keeps them until they train.

    requests: returns those of a step, by group. keeps: trained groups stay on disk until `forget`.
    watch: gets the number of whole turns of a step, of all of them, and 0. A thread runs the
    requests and saves groups.
    """

    def __init__(
        self,
        controller: StalenessController,
        checkpoint: RolloutCheckpoint,
        generator: Generator,
        requests: Callable[[int], Sequence[GenerationRequest]],
        *,
        keeps: bool = True,
        watch: Watch | None = None,
    ) -> None:
        self.controller = controller
        self.checkpoint = checkpoint
        self.generator = generator
        self.requests = requests
        self.keeps = keeps
        self.watch = watch
        self._changed = threading.Condition()  # guards the controller and what follows
        self._finished: dict[int, list[Turn]] = {}
        self._error: BaseException | None = None
        self._begun: asyncio.Queue[list[BegunGroup] | None] = asyncio.Queue()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="rollout-buffer", daemon=True).start()

    def resume(self, step: int, *, repeats: bool = True) -> list[str]:
        """Loads the groups of a run that goes on at `step`; returns why some are sampled again.

        repeats: whether later versions are the same policies again.
        """
        first = step * self.controller.groups_per_step
        saved, problems = self.checkpoint.load(first)
        known = {}
        for group, turns in saved.items():
            versions = versions_of(turns)
            if repeats or versions[1] <= step:
                known[group] = versions
        kept = self.controller.restore(step, known)
        self._finished = {group: saved[group] for group in kept}
        self.checkpoint.drop(first, kept)  # a later start must not meet them
        if lost := len(saved) - len(kept):
            problems.append(
                f"{lost} groups of {self.checkpoint.path} have tokens of policies that this run "
                "does not have"
            )
        return problems

    def pushed(self, version: int) -> None:
        """Begins the groups that may be sampled now that servers hold `version`."""
        per_step = self.controller.groups_per_step
        size = self.controller.samples
        with self._changed:
            self.controller.pushed(version)
            admitted = self.controller.admit()
        begun = list[BegunGroup]()
        for step, groups in groupby(admitted, lambda group: group // per_step):
            requests = self.requests(step)
            for group in groups:
                start = group % per_step * size
                begun.append((group, requests[start : start + size]))
        self._loop.call_soon_threadsafe(self._begun.put_nowait, begun)

    def take(self) -> list[Turn]:
        """Returns the turns of the next step, once all are there.

        Raises what a server raised; MachineError for turns of wrong versions.
        """
        with self._changed:
            step = self.controller.step
            first = self.controller.first
            while (groups := self.controller.take()) is None:
                if self._error is not None:
                    raise self._error
                self._show()
                self._changed.wait()
            taken = {group: self._finished.pop(group) for group in groups}
        for group, turns in taken.items():
            oldest, newest = versions_of(turns)
            least = max(0, step - self.controller.max_lag)
            if not least <= oldest <= newest <= step:
                raise MachineError(
                    f"step {step + 1}: group {group} has tokens of versions {oldest} to "
                    f"{newest}; expected {least} to {step}: an engine sampled with weights that "
                    "it should not hold"
                )
        if not self.keeps:
            self.checkpoint.forget(first)
        return [turn for turns in taken.values() for turn in turns]

    def counts(self) -> dict[str, int]:
        """Returns the numbers of groups of later steps."""
        with self._changed:
            groups = self.controller.groups.values()
            finished = sum(group.is_ready for group in groups)
            return {"pool_finished": finished, "pool_running": len(groups) - finished}

    def forget(self, step: int) -> None:
        """Removes the groups of the steps before from disk."""
        self.checkpoint.forget(step * self.controller.groups_per_step)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._begun.put_nowait, None)

    def _show(self) -> None:
        if self.watch is not None:
            missing = self.controller.missing_samples()
            total = self.controller.groups_per_step * self.controller.samples
            self.watch(total - missing, total, 0)

    def _run(self) -> None:
        self._loop.run_until_complete(self._sample_begun())
        self._loop.close()

    async def _sample_begun(self) -> None:
        """Samples groups until the buffer is closed, which ends those under way."""
        tasks = set[asyncio.Task[None]]()
        while (begun := await self._begun.get()) is not None:
            for group, requests in begun:
                task = asyncio.create_task(self._sample_group(group, requests))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample_group(self, group: int, requests: Sequence[GenerationRequest]) -> None:
        """Samples a group and saves it. The first error of any group is kept for `take`."""
        turns = list[Turn]()
        with Caught() as caught:
            asked = [self._sample(group, request) for request in requests]
            turns = await asyncio.gather(*asked)
            self.checkpoint.save(group, turns)
        with self._changed:
            if caught.error is None:
                self._finished[group] = turns
                self.controller.ready(group)
            else:
                self._error = self._error or caught.error
            self._changed.notify()

    async def _sample(self, group: int, request: GenerationRequest) -> Turn:
        turn = await self.generator.generate(request)
        with self._changed:
            self.controller.finish(group)
            self._changed.notify()
        return turn
