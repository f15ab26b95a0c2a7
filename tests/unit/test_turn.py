"""Requests, turns, and what coroutines ask for together."""

import asyncio
from collections.abc import Sequence

import pytest

from dovetail.sampler.params import Finish, SamplingParams, VersionSpans
from dovetail.sampler.turn import GenerationRequest, RequestBatch, RolloutId, Turn, generate_all


def requests(count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(id=RolloutId(0, row, 0), prompt_ids=(1,), params=SamplingParams())
        for row in range(count)
    ]


class Batches:
    """Answers each batch with turns whose one id is the number of the batch."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.begun: list[list[int]] = []
        self._batch = RequestBatch(self._begin)

    async def generate(self, request: GenerationRequest) -> Turn:
        return await self._batch.ask(request)

    def _begin(self, asked: Sequence[GenerationRequest]) -> list[Turn]:
        self.begun.append([request.id.row for request in asked])
        if self.error is not None:
            raise self.error
        return [Turn(request.id, (len(self.begun),), (-1.0,), "stop") for request in asked]


def test_requests_made_together_begin_together_in_order() -> None:
    batches = Batches()
    for batch in (1, 2):
        turns = generate_all(batches, requests(5))
        assert [(turn.row, turn.ids) for turn in turns] == [(row, (batch,)) for row in range(5)]
    assert batches.begun == [[*range(5)]] * 2


def test_the_next_turns_of_episodes_begin_together() -> None:
    batches = Batches()

    async def episode(request: GenerationRequest) -> None:
        for _ in range(3):
            await batches.generate(request)

    async def episodes() -> None:
        await asyncio.gather(*map(episode, requests(4)))

    asyncio.run(episodes())
    assert batches.begun == [[*range(4)]] * 3


def test_turns_come_in_a_notebook_whose_loop_runs() -> None:
    async def cell() -> list[Turn]:
        return generate_all(Batches(), requests(2))

    assert [turn.row for turn in asyncio.run(cell())] == [0, 1]


def test_an_error_of_a_batch_reaches_who_asked() -> None:
    with pytest.raises(ValueError, match="no weights"):
        generate_all(Batches(ValueError("no weights")), requests(3))


def test_parts_of_a_turn_add_up() -> None:
    whole = Turn(RolloutId(2, 1, 0))
    parts: list[tuple[tuple[int, ...], Finish | None, VersionSpans]] = [
        ((5, 6), None, ((4, 0, 2),)),
        ((), None, ()),
        ((7,), "stop", ((4, 2, 3),)),
    ]
    for ids, finish, versions in parts:
        part = Turn(whole.id, ids, (-0.5,) * len(ids), finish)
        whole = whole.extended(part, versions)
    assert whole == Turn(RolloutId(2, 1, 0), (5, 6, 7), (-0.5,) * 3, "stop", None, ((4, 0, 3),))
    assert whole.mask == (True,) * 3 and (whole.row, whole.sample) == (1, 0)
