"""Choices of OpenAI's endpoints: events of samples become text that ends at stop strings."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from dovetail.sampler.params import Finish
from dovetail.serving.bridge import SamplerBridge
from dovetail.serving.served_request import ServedRequest, ServedTokens
from dovetail.serving.text import Codec, Detokenizer, StopStrings


@dataclass(frozen=True)
class Piece:
    """What is new of one choice. Ids and log-probs include the token that ends it."""

    index: int
    text: str
    ids: Sequence[int]
    log_probs: Sequence[float]
    finish: Finish | None


class Choice:
    """One sample as text."""

    def __init__(
        self, index: int, sample: ServedRequest, codec: Codec, stops: Sequence[str]
    ) -> None:
        self.index = index
        self.sample = sample
        self._detokenizer = Detokenizer(codec.tokenizer)
        self._stops = StopStrings(stops)
        self.is_done = False

    def add(self, event: ServedTokens) -> Piece:
        ids = event.ids
        if event.finish == "stop":  # the token that ends it has no text
            ids = ids[:-1]
        is_last = event.finish is not None
        text = self._detokenizer.add(ids)
        if is_last:
            text += self._detokenizer.end()
        text = self._stops.add(text, last=is_last)
        finish: Finish | None = "stop" if self._stops.found else event.finish
        self.is_done = finish is not None
        return Piece(self.index, text, event.ids, event.log_probs, finish)


async def pieces(
    sampler: SamplerBridge,
    samples: Sequence[ServedRequest],
    codec: Codec,
    stops: Sequence[str],
) -> AsyncGenerator[Piece]:
    """Pieces of all samples as they come, each up to its end."""
    choices = [Choice(i, sample, codec, stops) for i, sample in enumerate(samples)]
    async with aclosing(sampler.events(samples)) as events:
        async for place, event in events:
            choice = choices[place]
            if choice.is_done:
                continue
            yield choice.add(event)
            if choice.is_done and not event.is_last:
                sampler.stop(choice.sample)
