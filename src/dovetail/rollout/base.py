"""What every sampler does, whatever is behind it: ids in, ids out; text is never re-tokenized."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from dovetail.batch.packed import MAX_TEMPERATURE, MIN_TEMPERATURE, Media
from dovetail.batch.routing import RoutingTrace
from dovetail.bounds import MAX_NEW_TOKENS, MAX_SAMPLES
from dovetail.errors import ConfigError, DataError, ModelError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to draw. `temperature` 0 takes the likeliest token; `top_p` 1 and `top_k` 0 cut nothing.

    The noise is a function of (seed, step, row, sample, position) alone, so layout and batch size do not change it.
    """

    samples: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    step: int = 0
    stop_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()  # never drawn; log-probs are those of the model without the ban
    trace: bool = False  # completions bring along which experts their tokens went to

    def __post_init__(self) -> None:
        expected = {
            "samples": (1 <= self.samples <= MAX_SAMPLES, f"1 to {MAX_SAMPLES:,}"),
            "max_new_tokens": (1 <= self.max_new_tokens <= MAX_NEW_TOKENS, f"1 to {MAX_NEW_TOKENS:,}"),
            "temperature": (
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE,
                f"0 (the likeliest token), or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
            ),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (which cuts nothing)"),
            "top_k": (self.top_k >= 0, "0 (which cuts nothing) or more"),
        }
        for name, (fits, range_) in expected.items():
            if not fits:
                raise ConfigError(f"sampling {name}={vars(self)[name]!r}: expected {range_}")

    @property
    def cuts(self) -> bool:
        """Whether the likeliest tokens are looked for, to draw from them alone."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, what they show, and the row number that its sampling noise depends on."""

    row: int
    ids: Sequence[int]
    media: Media | None = None


@dataclass(frozen=True)
class Completion:
    """One sample. `ids` end with the stop token where there is one.

    `log_probs` are those of the model at the sampling temperature (at 1 where that is 0), before top-p and top-k: the
    quantity that `score` gives for the same ids.
    """

    row: int
    sample: int
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: Literal["stop", "length"]
    routing: RoutingTrace | None = None  # of the prompt's tokens and `ids`; the last of these was never routed


class Sampler(Protocol):
    """A model that continues prompts. Collective: every rank passes the same prompts and gets all completions."""

    @property
    def dtype(self) -> torch.dtype | None:
        """What it computes in, and wants its weights in, so that they are not rounded on the way; None: as saved."""
        ...

    def refill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over (HF name, whole tensor) pairs, as `Engine.weights` yields them."""
        ...

    def sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """`params.samples` completions of every prompt, ordered by prompt, then sample."""
        ...


def check_prompts(prompts: Sequence[Prompt], vocab_size: int) -> None:
    """Raise DataError where a prompt has no tokens, or an id that the model does not have."""
    for prompt in prompts:
        if not len(prompt.ids):
            raise DataError(f"prompt of row {prompt.row} has no tokens; a prompt needs at least one")
        if min(prompt.ids) < 0 or max(prompt.ids) >= vocab_size:
            bad = next(token for token in prompt.ids if not 0 <= token < vocab_size)
            raise DataError(f"prompt of row {prompt.row} has the id {bad}; this model has ids 0 to {vocab_size - 1}")


def check_lengths(prompts: Sequence[Prompt], params: SamplingParams, kind: str, limit: int) -> None:
    """Refuse sequences that may grow longer than `limit` under a rotary embedding whose `kind` turns longer ones otherwise."""
    for prompt in prompts:
        total = len(prompt.ids) + params.max_new_tokens
        if total > limit:
            raise ModelError(
                f"prompt of row {prompt.row} has {len(prompt.ids)} tokens, {total} with max_new_tokens="
                f"{params.max_new_tokens}; beyond {limit} positions rope_type {kind!r} changes the "
                "keys that are cached; shorten the prompt or lower max_new_tokens"
            )
