"""How samplers are asked to sample. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dovetail.bounds import MAX_NEW_TOKENS, MAX_SAMPLES, MAX_TEMPERATURE, MIN_TEMPERATURE
from dovetail.errors import ConfigError

# (version of the weights, first token that it drew, end)
VersionSpans = tuple[tuple[int, int, int], ...]
Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample. Noise depends on (seed, step, row, sample, position)."""

    samples: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of inference servers, as stop
    stop: tuple[str, ...] = ()
    seed: int = 0
    step: int = 0
    stop_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()  # log-probs ignore them
    trace: bool = False

    def __post_init__(self) -> None:
        is_warm = MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE
        expected = {
            "samples": (1 <= self.samples <= MAX_SAMPLES, f"1 to {MAX_SAMPLES:,}"),
            "max_new_tokens": (
                1 <= self.max_new_tokens <= MAX_NEW_TOKENS,
                f"1 to {MAX_NEW_TOKENS:,}",
            ),
            "temperature": (
                self.temperature == 0 or is_warm,
                f"0 (the likeliest token), or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
            ),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (which cuts nothing)"),
            "top_k": (self.top_k >= 0, "0 (which cuts nothing) or more"),
            "min_p": (0 <= self.min_p <= 1, "0 (which cuts nothing) to 1"),
        }
        for name, (fits, range_) in expected.items():
            if not fits:
                raise ConfigError(f"sampling {name}={vars(self)[name]!r}: expected {range_}")

    @property
    def cuts(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def join_spans(spans: VersionSpans, more: Iterable[tuple[int, int, int]]) -> VersionSpans:
    """Returns both in one, with neighbors of the same version as one span and no empty ones."""
    for version, start, end in more:
        if spans and spans[-1][0] == version:
            start = spans[-1][1]
            spans = spans[:-1]
        if end > start:
            spans = (*spans, (version, start, end))
    return spans
