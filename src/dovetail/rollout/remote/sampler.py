"""The sampler of engines in processes of their own: vLLM or SGLang servers, reached over HTTP by the first rank."""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dovetail.errors import MachineError, ModelError
from dovetail.parallel.collectives import sum_over
from dovetail.parallel.consensus import of_first
from dovetail.parallel.mesh import Mesh
from dovetail.rollout.base import Completion, Prompt, SamplingParams, Watch, check_request
from dovetail.rollout.journal import Answer
from dovetail.rollout.remote.fleet import Fleet, Reply
from dovetail.rollout.remote.http import EngineError
from dovetail.rollout.remote.wire import Request


class Push(Protocol):
    """Puts weights into every replica and verifies them; an error for each that did not take them."""

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Sequence[EngineError | None]: ...
    def close(self) -> None: ...


class RemoteSampler:
    """Implements `Sampler`. fleet and pusher: of the first rank alone."""

    def __init__(
        self, mesh: Mesh, dtype: torch.dtype, vocab_size: int, fleet: Fleet | None, pusher: Push | None
    ) -> None:
        self.mesh, self.dtype, self.vocab_size = mesh, dtype, vocab_size
        self.fleet, self.pusher = fleet, pusher
        self.version: int | None = None  # of the last push
        self._run = uuid.uuid4().hex  # another run's cached prefixes have other weights
        self.watch: Watch | None = None

    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As `Sampler.refill`: a push, which counts as one more version."""
        self.push(weights, 1 + (self.version or 0))

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Verified. Requests under way go on behind it. A replica that does not take the weights serves nothing until the next.

        MachineError on every rank if none is left.
        """
        self.version = version
        stream, problem = iter(weights), ""
        try:
            if self.fleet is not None and self.pusher is not None:
                problem = self._push(self.fleet, self.pusher, stream, version)
        finally:
            for _ in stream:  # gathered with the other ranks
                pass
        self._agree({"problem": problem})

    def close(self) -> None:
        if self.fleet is not None and self.pusher is not None:
            self.fleet.close()
            self.pusher.close()

    def _push(self, fleet: Fleet, pusher: Push, stream: Iterator[tuple[str, Tensor]], version: int) -> str:
        with fleet.pushing():
            errors = pusher.push(stream, version)
            for replica, error in zip(fleet.replicas, errors, strict=True):
                fleet.pushed(replica, version, error)
        return "" if None in errors else "; ".join(map(str, errors))

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        check_request(prompts, params, self.vocab_size, None, filled=self.version is not None)
        if any(prompt.media is not None for prompt in prompts):
            raise ModelError("engines of their own get no images or videos yet; set rollout.backend=transformers")
        problem, replies = "", list[Reply]()
        if self.fleet is not None:
            try:
                replies = self._draw(self.fleet, prompts, params)
            except MachineError as error:
                problem = str(error)
        return self.shared(prompts, params, replies, problem)

    def submit(self, prompt: Prompt, sample: int, params: SamplingParams) -> "Future[Answer]":
        """A sample of its own, for the first rank. Returns at once; pushes do not end it, and its tokens name their versions."""
        assert self.fleet is not None and self.version is not None, "the first rank, after a push"
        request = self._request(prompt, sample, params)
        return self.fleet.threads.submit(partial(self._answer, self.fleet, request, self.version))

    def shared(
        self, prompts: Sequence[Prompt], params: SamplingParams, replies: Sequence[Reply | Answer], problem: str
    ) -> list[Completion]:
        """The first rank's replies, ordered by prompt, then sample; MachineError if it has a problem. Collective."""
        outcome = {
            "problem": problem,
            "finish": [reply.finish for reply in replies],
            "versions": [reply.versions for reply in replies],
            "lengths": [len(reply.ids) for reply in replies],
        }
        return self._completions(prompts, params, self._agree(outcome), replies)

    def _answer(self, fleet: Fleet, request: Request, oldest: int) -> Answer:
        reply = fleet.draw(request)
        self._check(reply, oldest)
        assert reply.finish is not None
        return Answer(request.sample, tuple(reply.ids), tuple(reply.log_probs), reply.versions, reply.finish)

    def _request(self, prompt: Prompt, sample: int, params: SamplingParams) -> Request:
        salt = f"{self._run}-{self.version}"  # cached keys and values are of these weights
        return Request(ids=[*map(int, prompt.ids)], row=prompt.row, sample=sample, params=params, salt=salt)

    def _draw(self, fleet: Fleet, prompts: Sequence[Prompt], params: SamplingParams) -> list[Reply]:
        """Ordered by prompt, then sample."""
        assert self.version is not None
        futures = [
            fleet.submit(self._request(prompt, sample, params))
            for prompt in prompts
            for sample in range(params.samples)
        ]
        try:
            tokens = 0
            for done, future in enumerate(as_completed(futures), 1):
                reply = future.result()
                tokens += len(reply.ids)
                self._check(reply, self.version)
                if self.watch is not None:
                    self.watch(done, len(futures), tokens)
        finally:
            for future in futures:
                future.cancel()
        return [future.result() for future in futures]

    def _check(self, reply: Reply, oldest: int) -> None:
        """oldest: version when it was asked for."""
        newest = self.version
        assert newest is not None
        if other := [version for version, _, _ in reply.versions if not oldest <= version <= newest]:
            raise MachineError(
                f"an engine answered with weights of version {other[0]}, but this run pushed {newest}: another run "
                "pushes to it, too; give each run engines of its own"
            )
        if max(reply.ids) >= self.vocab_size:
            raise MachineError(f"an engine drew the id {max(reply.ids)} of a vocabulary of {self.vocab_size}")

    def _agree(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """The first rank's. MachineError on every rank if it has a problem. Collective."""
        agreed = cast(dict[str, Any], of_first(outcome, self.mesh))
        if agreed["problem"]:
            raise MachineError(agreed["problem"])
        return agreed

    def _completions(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        outcome: dict[str, Any],
        replies: Sequence[Reply | Answer],
    ) -> list[Completion]:
        """Ids and log-probs are those of the first rank, which others get by a sum with zeros."""
        world, device, lengths = self.mesh["world"], self.mesh.device, outcome["lengths"]
        ids = torch.zeros(sum(lengths), dtype=torch.int64)
        log_probs = torch.zeros(sum(lengths), dtype=torch.float64)
        if replies:
            ids = torch.tensor([token for reply in replies for token in reply.ids])
            log_probs = torch.tensor([each for reply in replies for each in reply.log_probs], dtype=torch.float64)
        drawn: list[int] = sum_over(ids.to(device), world).tolist()
        scored: list[float] = sum_over(log_probs.to(device), world).tolist()
        completions, first = [], 0
        for slot, (length, finish, versions) in enumerate(
            zip(lengths, outcome["finish"], outcome["versions"], strict=True)
        ):
            index, sample = divmod(slot, params.samples)
            span = slice(first, first + length)
            spans = tuple((version, start, end) for version, start, end in versions)
            completions.append(
                Completion(prompts[index].row, sample, tuple(drawn[span]), tuple(scored[span]), finish, versions=spans)
            )
            first += length
        return completions
