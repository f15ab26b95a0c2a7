"""The sampler of inference servers, which the first rank reaches over HTTP."""

from collections.abc import Iterable, Sequence
from concurrent.futures import as_completed
from typing import Any, cast

import torch
from torch import Tensor

from dovetail.arch.spec import MoeSpec
from dovetail.errors import DataError, MachineError
from dovetail.inference_servers.fleet import Fleet
from dovetail.inference_servers.generator import ServerGenerator
from dovetail.inference_servers.push import Pusher
from dovetail.inference_servers.routes import share_trace
from dovetail.parallel.collectives import sum_over
from dovetail.parallel.consensus import of_first
from dovetail.parallel.mesh import Mesh
from dovetail.sampler.base import Sampler, SamplingParams, TokenPrompt, check_request, requests_of
from dovetail.sampler.turn import GenerationRequest, Turn


class RemoteSampler(Sampler):
    """Samples by inference servers for all ranks.

    fleet, pusher: of the first rank. moe: of traced experts. sleeps: servers have the trainer's
    GPUs, and give their memory away between samplings. version: of the last push.
    """

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
        super().__init__()
        self.mesh = mesh
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.moe = moe
        self.pusher = pusher
        self.sleeps = sleeps
        self.version: int | None = None
        self.servers: ServerGenerator | None = None
        if fleet is not None:
            self.servers = ServerGenerator(fleet, vocab_size, dtype, moe, image_token)

    @property
    def fleet(self) -> Fleet | None:
        return None if self.servers is None else self.servers.fleet

    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Pushes the next version."""
        self.push(weights, 1 + (self.version or 0))

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Pushes weights to all servers. MachineError on every rank if none took them."""
        self.version = version
        stream = iter(weights)
        problem = ""
        try:
            self._wake()
            if self.servers is not None and self.pusher is not None:
                self.servers.version = version
                fleet = self.servers.fleet
                with fleet.pushing():
                    errors = self.pusher.push(stream, version)
                    for replica, error in zip(fleet.replicas, errors, strict=True):
                        fleet.pushed(replica, version, error)
                if None not in errors:
                    problem = "; ".join(map(str, errors))
        except MachineError as error:  # on this rank alone
            problem = str(error)
        finally:
            for _ in stream:  # gathered with the other ranks
                pass
        self._agree({"problem": problem})

    def close(self) -> None:
        if self.servers is not None and self.pusher is not None:
            self.servers.fleet.close()
            self.pusher.close()

    def sample(self, prompts: Sequence[TokenPrompt], params: SamplingParams) -> list[Turn]:
        check_request(prompts, params, self.vocab_size, None, filled=self.version is not None)
        requests = requests_of(prompts, params)
        problem = None
        turns = list[Turn]()
        self._wake()
        if self.servers is not None:
            try:
                turns = self._generate(self.servers, requests)
                if self.sleeps:
                    self.servers.fleet.sleep()
            except (MachineError, DataError) as error:
                problem = error
        return self.share(requests, turns, problem)

    def share(
        self,
        requests: Sequence[GenerationRequest],
        turns: Sequence[Turn],
        problem: Exception | None,
    ) -> list[Turn]:
        """Returns the first rank's turns, one a request, or raises its problem on every rank."""
        outcome = self._agree(
            {
                "problem": str(problem or ""),
                "data": isinstance(problem, DataError),
                "finish": [turn.finish for turn in turns],
                "versions": [turn.versions for turn in turns],
                "lengths": [len(turn.ids) for turn in turns],
            }
        )
        lengths = outcome["lengths"]
        ids = torch.zeros(sum(lengths), dtype=torch.int64)
        log_probs = torch.zeros(sum(lengths), dtype=torch.float64)
        if turns:
            ids = torch.tensor([token for turn in turns for token in turn.ids])
            log_probs = torch.tensor(
                [value for turn in turns for value in turn.log_probs], dtype=torch.float64
            )
        world = self.mesh["world"]
        device = self.mesh.device
        all_ids: list[int] = sum_over(ids.to(device), world).tolist()  # other ranks have zeros
        all_log_probs: list[float] = sum_over(log_probs.to(device), world).tolist()
        shared = []
        start = 0
        for place, request in enumerate(requests):
            end = start + lengths[place]
            trace = None
            if self.moe is not None and request.params.trace:
                own = turns[place].routing if turns else None
                tokens = len(request.prompt_ids) + lengths[place]
                trace = share_trace(own, tokens, self.moe, self.mesh)
            shared.append(
                Turn(
                    request.id,
                    tuple(all_ids[start:end]),
                    tuple(all_log_probs[start:end]),
                    outcome["finish"][place],
                    trace,
                    tuple(tuple(span) for span in outcome["versions"][place]),
                )
            )
            start = end
        return shared

    def _generate(
        self, servers: ServerGenerator, requests: Sequence[GenerationRequest]
    ) -> list[Turn]:
        futures = servers.begin(requests)
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

    def _wake(self) -> None:
        """Frees memory that no rank uses before servers take it. Collective."""
        if not self.sleeps:
            return
        if self.mesh.device.type == "cuda":
            torch.cuda.empty_cache()
        self._agree({"problem": ""})
        if self.servers is not None:
            self.servers.fleet.wake()

    def _agree(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Returns the first rank's outcome, or raises its problem on every rank. Collective."""
        agreed = cast(dict[str, Any], of_first(outcome, self.mesh))
        if agreed["problem"]:
            raise (DataError if agreed.get("data") else MachineError)(agreed["problem"])
        return agreed
