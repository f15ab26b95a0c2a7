"""Turns from inference servers, on the one rank that reaches them."""

import asyncio
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch

from dovetail.arch.spec import MoeSpec
from dovetail.errors import DataError, MachineError
from dovetail.inference_servers.fleet import Fleet
from dovetail.inference_servers.images import image_features
from dovetail.inference_servers.protocol import ServerRequest
from dovetail.inference_servers.routes import read_trace
from dovetail.sampler.turn import GenerationRequest, RequestBatch, Turn


class ServerGenerator:
    """Answers requests by the servers of a fleet. Pushes of weights do not end a request.

    dtype: of pixels. moe: of traced experts. version: of the last push.
    """

    def __init__(
        self,
        fleet: Fleet,
        vocab_size: int,
        dtype: torch.dtype,
        moe: MoeSpec | None = None,
        image_token: int | None = None,
    ) -> None:
        self.fleet = fleet
        self.vocab_size = vocab_size
        self.dtype = dtype
        self.moe = moe
        self.image_token = image_token
        self.version: int | None = None
        self._run = uuid.uuid4().hex  # servers cache prefixes of other runs
        self._batch = RequestBatch(self.begin)

    async def generate(self, request: GenerationRequest) -> Turn:
        return await asyncio.wrap_future(await self._batch.ask(request))

    def begin(self, requests: Sequence[GenerationRequest]) -> list[Future[Turn]]:
        """Returns the futures of turns, each drawn by a thread of the fleet."""
        version = self.version
        assert version is not None, "requests come after a push"
        salt = f"{self._run}-{version}"  # cached keys and values are of these weights
        prepared = [self._prepared(request, salt) for request in requests]
        threads = self.fleet.threads
        return [
            threads.submit(self._generate, request, version)
            for request in self.fleet.assign_batches(prepared)
        ]

    def _generate(self, request: ServerRequest, oldest: int) -> Turn:
        """Checks what servers say. oldest: version at the request."""
        turn = self.fleet.generate(request)
        newest = self.version
        assert newest is not None
        for version, _, _ in turn.versions:
            if not oldest <= version <= newest:
                raise MachineError(
                    f"an engine answered with weights of version {version}, but this run pushed "
                    f"{newest}: another run pushes to it, too; give each run engines of its own"
                )
        if max(turn.ids) >= self.vocab_size:
            raise MachineError(
                f"an engine drew the id {max(turn.ids)} of a vocabulary of {self.vocab_size}"
            )
        return turn

    def _prepared(self, request: GenerationRequest, salt: str) -> ServerRequest:
        ids = [*map(int, request.prompt_ids)]
        images = None
        if request.media is not None:
            if self.image_token is None:
                raise DataError(
                    f"the prompt of row {request.id.row} has images or videos, which these "
                    "engines cannot be given"
                )
            images = image_features(ids, request.media, self.image_token, self.dtype, salt)
        read_routes = None
        if self.moe is not None and request.params.trace:
            read_routes = partial(read_trace, moe=self.moe)
        return ServerRequest(
            id=request.id,
            prompt_ids=ids,
            params=request.params,
            salt=salt,
            images=images,
            read_routes=read_routes,
        )
