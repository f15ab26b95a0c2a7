"""`generate(request) -> Turn`: one answer of a model, from whatever samples it. Imports no torch."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from dovetail.errors import Caught
from dovetail.sampler.params import Finish, SamplingParams, VersionSpans, join_spans

if TYPE_CHECKING:
    from dovetail.batch.packed import Media
    from dovetail.batch.routing import RoutingTrace

T = TypeVar("T")


class RolloutId(NamedTuple):
    """Names one answer to one prompt of a step; with the seed it decides the noise.

    row: place of the prompt in the step. sample: number among the answers to the prompt.
    """

    step: int
    row: int
    sample: int


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Asks for one answer to a prompt."""

    id: RolloutId
    prompt_ids: Sequence[int]
    params: SamplingParams
    media: "Media | None" = None


@dataclass(frozen=True)
class Turn:
    """What a model said in answer to a request.

    ids: those drawn, with the stop token. log_probs: at the temperature (greedy: 1), before cuts
    and penalties. finish: None while more is to come. routing: of the prompt, too. versions: of
    the weights that drew which ids; empty if unknown.
    """

    id: RolloutId
    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    finish: Finish | None = None
    routing: "RoutingTrace | None" = None
    versions: VersionSpans = ()

    @property
    def row(self) -> int:
        return self.id.row

    @property
    def sample(self) -> int:
        return self.id.sample

    @property
    def mask(self) -> tuple[bool, ...]:
        """Which of `ids` are trained: all that the model drew."""
        return (True,) * len(self.ids)

    def extended(self, part: "Turn", versions: VersionSpans) -> "Turn":
        """Returns the turn with the ids of its next part, which `versions` drew."""
        return replace(
            part,
            ids=self.ids + part.ids,
            log_probs=self.log_probs + part.log_probs,
            versions=join_spans(self.versions, versions),
        )


Completion = Turn  # its name in docs/contract.md


class Generator(Protocol):
    """Anything that samples: the embedded sampler, or a server that runs a model."""

    async def generate(self, request: GenerationRequest) -> Turn: ...


class RequestBatch(Generic[T]):
    """Begins together what coroutines ask for before their event loop goes on to something else.

    begin: takes the requests in the order in which they came, and returns a result for each.
    """

    def __init__(self, begin: Callable[[list[GenerationRequest]], Sequence[T]]) -> None:
        self._begin = begin
        self._requests: list[GenerationRequest] = []
        self._results: asyncio.Future[Sequence[T]] | None = None

    async def ask(self, request: GenerationRequest) -> T:
        if self._results is None:
            loop = asyncio.get_running_loop()
            self._results = loop.create_future()
            loop.call_soon(self._begin_all)  # runs behind the coroutines that are ready now
        place = len(self._requests)
        self._requests.append(request)
        results = await self._results
        return results[place]

    def _begin_all(self) -> None:
        requests = self._requests
        results = self._results
        self._requests = []
        self._results = None
        assert results is not None
        with Caught() as caught:
            results.set_result(self._begin(requests))
        if caught.error is not None:
            results.set_exception(caught.error)


def generate_all(generator: Generator, requests: Sequence[GenerationRequest]) -> list[Turn]:
    """Returns the turns of requests that are made at once, and waits for all of them."""

    async def gathered() -> list[Turn]:
        return await asyncio.gather(*[generator.generate(request) for request in requests])

    return run_coroutine(gathered())


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine; in a notebook, whose thread has a loop, by another one."""
    loop = asyncio.new_event_loop()  # `asyncio.run` would take over Ctrl-C
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return loop.run_until_complete(coroutine)
    else:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(loop.run_until_complete, coroutine).result()
    finally:
        loop.close()
