"""The sampler of inference servers, which the first rank reaches over HTTP."""

import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from dovetail.arch.spec import MoeSpec
from dovetail.errors import DataError, MachineError
from dovetail.inference_servers.fleet import Fleet
from dovetail.inference_servers.images import image_features
from dovetail.inference_servers.protocol import Reply, Request
from dovetail.inference_servers.push import Pusher
from dovetail.inference_servers.routes import read_trace, share_trace
from dovetail.parallel.collectives import sum_over
from dovetail.parallel.consensus import of_first
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.base import Completion, Prompt, SamplingParams, Watch, check_request


class RemoteSampler:
    """Implements `Sampler`. fleet, pusher: of the first rank. moe: of traced experts."""

    def __init__(
        self,
        mesh: Mesh,
        dtype: torch.dtype,
        vocab_size: int,
        fleet: Fleet | None,
        pusher: Pusher | None,
        moe: MoeSpec | None = None,
        image_token: int | None = None,
        *,
        sleeps: bool = False,
    ) -> None:
        """sleeps: engines have the trainer's GPUs, and give their memory away between samplings."""
        self.mesh = mesh
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.moe = moe
        self.image_token = image_token
        self.fleet = fleet
        self.pusher = pusher
        self.sleeps = sleeps
        self.version: int | None = None  # of the last push
        self._run = uuid.uuid4().hex  # servers cache prefixes of other runs
        self.watch: Watch | None = None

    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """A push of the next version."""
        self.push(weights, 1 + (self.version or 0))

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Requests in flight continue after it. MachineError on every rank if no replica took it."""
        self.version = version
        stream = iter(weights)
        problem = ""
        try:
            self._wake()
            if self.fleet is not None and self.pusher is not None:
                with self.fleet.pushing():
                    errors = self.pusher.push(stream, version)
                    for replica, error in zip(self.fleet.replicas, errors, strict=True):
                        self.fleet.pushed(replica, version, error)
                problem = "" if None in errors else "; ".join(map(str, errors))
        except MachineError as error:  # on this rank alone
            problem = str(error)
        finally:
            for _ in stream:  # gathered with the other ranks
                pass
        self._agree({"problem": problem})

    def close(self) -> None:
        if self.fleet is not None and self.pusher is not None:
            self.fleet.close()
            self.pusher.close()

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        check_request(prompts, params, self.vocab_size, None, filled=self.version is not None)
        problem = None
        drawn = list[Completion]()
        self._wake()
        if self.fleet is not None:
            try:
                drawn = self._draw(prompts, params)
                if self.sleeps:
                    self.fleet.sleep()
            except (MachineError, DataError) as error:
                problem = error
        return self.shared(prompts, params, drawn, problem)

    def submit(
        self, samples: Sequence[tuple[Prompt, int, SamplingParams]]
    ) -> "list[Future[Completion]]":
        """Of the first rank. Returns at once; pushes do not end them."""
        return self._begin(
            [
                replace(self._request(prompt, params), sample=sample)
                for prompt, sample, params in samples
            ]
        )

    def shared(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        replies: Sequence[Completion],
        problem: Exception | None,
    ) -> list[Completion]:
        """The first rank's, by prompt, then sample; its problem is raised on every rank. Collective."""
        outcome: dict[str, Any] = {
            "problem": str(problem or ""),
            "data": isinstance(problem, DataError),
        }
        outcome |= {
            "finish": [reply.finish for reply in replies],
            "versions": [reply.versions for reply in replies],
        }
        outcome = self._agree(outcome | {"lengths": [len(reply.ids) for reply in replies]})
        world = self.mesh["world"]
        device = self.mesh.device
        lengths = outcome["lengths"]
        ids = torch.zeros(sum(lengths), dtype=torch.int64)
        log_probs = torch.zeros(sum(lengths), dtype=torch.float64)
        if replies:
            ids = torch.tensor([token for reply in replies for token in reply.ids])
            log_probs = torch.tensor(
                [each for reply in replies for each in reply.log_probs], dtype=torch.float64
            )
        drawn: list[int] = sum_over(ids.to(device), world).tolist()  # other ranks have zeros
        scored: list[float] = sum_over(log_probs.to(device), world).tolist()
        completions = []
        first = 0
        for slot, length in enumerate(lengths):
            index, sample = divmod(slot, params.samples)
            finish = outcome["finish"][slot]
            versions = outcome["versions"][slot]
            span = slice(first, first + length)
            spans = tuple((version, start, end) for version, start, end in versions)
            trace = None
            if self.moe is not None and params.trace:
                mine = replies[slot].routing if replies else None
                trace = share_trace(mine, len(prompts[index].ids) + length, self.moe, self.mesh)
            completions.append(
                Completion(
                    prompts[index].row,
                    sample,
                    tuple(drawn[span]),
                    tuple(scored[span]),
                    finish,
                    trace,
                    spans,
                )
            )
            first += length
        return completions

    def _wake(self) -> None:
        """Collective: memory that no rank uses is free before engines take it."""
        if not self.sleeps:
            return
        if self.mesh.device.type == "cuda":
            torch.cuda.empty_cache()
        self._agree({"problem": ""})
        if self.fleet is not None:
            self.fleet.wake()

    def _begin(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        fleet = self.fleet
        version = self.version
        assert fleet is not None and version is not None, "the first rank, after a push"
        return [
            fleet.threads.submit(self._complete, fleet, request, version)
            for request in fleet.together(requests)
        ]

    def _complete(self, fleet: Fleet, request: Request, oldest: int) -> Completion:
        reply = fleet.draw(request)
        self._check(reply, oldest)
        assert reply.finish is not None
        ids = tuple(reply.ids)
        log_probs = tuple(reply.log_probs)
        trace = None
        if self.moe is not None and request.params.trace:
            trace = read_trace(reply.routes, len(request.ids) + len(ids), self.moe)
        return Completion(
            request.row, request.sample, ids, log_probs, reply.finish, trace, reply.versions
        )

    def _draw(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        prepared = [self._request(prompt, params) for prompt in prompts]
        requests = [
            replace(request, sample=sample)
            for request in prepared
            for sample in range(params.samples)
        ]
        futures = self._begin(requests)
        try:
            tokens = 0
            for done, future in enumerate(as_completed(futures), 1):
                tokens += len(future.result().ids)
                if self.watch is not None:
                    self.watch(done, len(futures), tokens)
        finally:
            for future in futures:
                future.cancel()
        return [future.result() for future in futures]

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        salt = f"{self._run}-{self.version}"  # cached keys and values are of these weights
        ids = [*map(int, prompt.ids)]
        images = None
        if prompt.media is not None:
            if self.image_token is None:
                raise DataError(
                    f"the prompt of row {prompt.row} has images or videos, which these engines "
                    "cannot be given"
                )
            images = image_features(ids, prompt.media, self.image_token, self.dtype, salt)
        return Request(ids=ids, row=prompt.row, sample=0, params=params, salt=salt, images=images)

    def _check(self, reply: Reply, oldest: int) -> None:
        """oldest: version at the request."""
        newest = self.version
        assert newest is not None
        if other := [
            version for version, _, _ in reply.versions if not oldest <= version <= newest
        ]:
            raise MachineError(
                f"an engine answered with weights of version {other[0]}, but this run pushed "
                f"{newest}: another run "
                "pushes to it, too; give each run engines of its own"
            )
        if max(reply.ids) >= self.vocab_size:
            raise MachineError(
                f"an engine drew the id {max(reply.ids)} of a vocabulary of {self.vocab_size}"
            )

    def _agree(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """The first rank's; its problem is raised on every rank. Collective."""
        agreed = cast(dict[str, Any], of_first(outcome, self.mesh))
        if agreed["problem"]:
            raise (DataError if agreed.get("data") else MachineError)(agreed["problem"])
        return agreed
