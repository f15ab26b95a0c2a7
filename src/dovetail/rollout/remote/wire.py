"""What is asked of an inference server, and what it answers. Imports no torch."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from dovetail.errors import ConfigError
from dovetail.rollout.remote.http import Client, EngineError

if TYPE_CHECKING:  # imports torch
    from dovetail.rollout.base import SamplingParams

Spans = tuple[tuple[int, int, int], ...]  # (version of the weights, first token, behind the last)
Finish = Literal["stop", "length"]
LogProbs = Literal["processed", "tempered", "penalized", "raw"]
FINISHES: Mapping[object, Finish] = {"stop": "stop", "length": "length"}
STREAMED = 128  # tokens of an event: what is lost with an engine; each costs the server's and the trainer's Python time
NO_BIAS = -100.0  # added to the logits of banned ids
RETURNS_ROUTES = "--enable-return-routed-experts"  # of both servers, for a mixture of experts
MOST_BANNED = 1024  # of a request, in vLLM


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sample of a prompt. salt: of the server's prefix cache. batch: a name, requests that begin together, and its number."""

    ids: Sequence[int]
    row: int
    sample: int
    params: "SamplingParams"
    salt: str
    images: Mapping[str, Any] | None = None  # of the prompt, as vLLM takes them
    batch: tuple[str, int, int] | None = None

    def seed(self, received: int) -> int:
        """Another one behind tokens that are kept: a server counts its draws from its first one."""
        params = self.params
        key = f"{params.seed}/{params.step}/{self.row}/{self.sample}/{received}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) >> 1

    def keys(self, received: int) -> dict[str, Any]:
        """For a server of the embedded sampler: what the noise depends on, and the batch."""
        params, batch = self.params, None if received else self.batch
        return {"noise": [params.seed, params.step, self.row, self.sample], "drawn": received, "batch": batch}


class Part(NamedTuple):
    """Tokens of a stream. With the last ones come versions, of all its tokens (empty: unknown), and routes, as received."""

    ids: Sequence[int]
    log_probs: Sequence[float]
    finish: Finish | None = None
    versions: Spans = ()
    routes: str = ""  # of the prompt and all tokens but the last; see routes.py


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """Of a server as it was started.

    log_probs: raw, before penalties, temperature and cuts; penalized, behind the first; tempered, behind the second;
    processed, behind all. transfer: how it takes weights. incremental: an event holds its own tokens alone.
    """

    kind: Literal["vllm", "sglang"]
    model: str
    version: str
    max_length: int | None
    log_probs: LogProbs
    transfer: str | None = None
    incremental: bool = True
    routes: bool = False  # it returns the experts of each token
    images: bool = False  # it takes them with token ids
    fields: frozenset[str] = frozenset()  # of vLLM's sampling parameters
    keyed: bool = False  # it is the embedded sampler


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What a run or an evaluation samples with, as far as it concerns log-probs."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Wire(Protocol):
    """How one kind of server is spoken to."""

    @property
    def starts(self) -> Mapping[LogProbs, str]:
        """What it is started with to give a kind of log-probs."""
        ...

    def probe(self, client: Client, vocab_size: int | None) -> Abilities:
        """ConfigError if it lacks what a run needs."""
        ...

    def generate(
        self,
        client: Client,
        server: Abilities,
        request: Request,
        received: Sequence[int],
        deadline: Callable[[], float],
    ) -> Iterator[Part]:
        """Draw on behind the prompt and the tokens received."""
        ...

    def continues(self, params: "SamplingParams") -> bool:
        """Whether tokens of one server can be gone on from by another, else a sample begins anew."""
        ...


def fitting_log_probs(drawing: Drawing) -> list[LogProbs]:
    """The kinds that are at the sampling temperature, before cuts and penalties, as training computes them."""
    plain, warm = drawing.repetition_penalty == 1, drawing.temperature not in (0, 1)
    cut = drawing.temperature > 0 and (drawing.top_p < 1 or drawing.top_k > 0 or drawing.min_p > 0)
    fits: dict[LogProbs, bool] = {
        "processed": plain and not cut,
        "tempered": plain,
        "penalized": plain and not warm,
        "raw": not warm,
    }
    return [kind for kind, fit in fits.items() if fit]


def check_log_probs(url: str, server: Abilities, wire: Wire, drawings: Sequence[Drawing]) -> None:
    """ConfigError if the server's log-probs are not those that training needs of each."""
    kinds = [kind for kind in wire.starts if all(kind in fitting_log_probs(drawing) for drawing in drawings)]
    wrong = next((drawing for drawing in drawings if server.log_probs not in fitting_log_probs(drawing)), None)
    if wrong is None:
        return
    usual = Drawing()
    given = ", ".join(f"{name}={value:g}" for name, value in vars(wrong).items() if value != vars(usual)[name])
    remedy = (
        f"start it with {wire.starts[kinds[0]]}" if kinds else f"no start of it gives these, so change one of {given}"
    )
    raise ConfigError(
        f"engine {url} gives log-probs that are {server.log_probs}, but with {given} training needs those at the temperature "
        f"and before cuts and penalties; {remedy}"
    )


def pushed_spans(spans: Any, length: int, url: str) -> Spans:
    """Of a reply, checked to cover its tokens; empty if it has none, or of weights that no trainer pushed."""
    if not spans:
        return ()
    try:
        made = tuple((int(span["version"]), int(span["start"]), int(span["end"])) for span in spans)
    except ValueError:  # a version that is no number, such as "default"
        return ()
    ends = [0, *(end for _, _, end in made)]
    if [start for _, start, _ in made] != ends[:-1] or ends[-1] != length:
        raise EngineError(url, "generate", None, f"versions {spans} do not cover the {length} tokens of the reply")
    return made
