"""What all inference servers are asked and say, whatever their protocol."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dovetail.errors import ConfigError
from dovetail.inference_servers.http import Client
from dovetail.sampler.params import Finish, SamplingParams, VersionSpans
from dovetail.sampler.turn import GenerationRequest, Turn

if TYPE_CHECKING:
    from dovetail.batch.routing import RoutingTrace

LogProbs = Literal["processed", "tempered", "penalized", "raw"]
FINISHES: Mapping[object, Finish] = {"stop": "stop", "length": "length"}
STREAMED = 128  # tokens of an event; each costs Python time of the server and the trainer
NO_BIAS = -100.0  # of the logits of banned ids
KEEPS_PIXELS = "--no-mm-device-do-normalize"  # of vLLM
SLEEP_MODE = "--enable-sleep-mode"  # of vLLM
RETURNS_ROUTES = "--enable-return-routed-experts"  # of both servers


@dataclass(frozen=True, kw_only=True)
class ServerRequest(GenerationRequest):
    """A request as servers are sent it.

    salt: of the prefix cache. images: vLLM's `features`. batch: a name, the number of its
    requests, and the place of this one. read_routes: makes the experts of all tokens from a
    server's text and the number of tokens; None: they are not asked for.
    """

    salt: str
    images: Mapping[str, Any] | None = None
    batch: tuple[str, int, int] | None = None
    read_routes: "Callable[[str, int], RoutingTrace] | None" = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields that all servers have; what is left out comes from generation_config.json."""
        params = self.params
        fields = {
            "n": 1,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(params.stop),
            "stop_token_ids": list(params.stop_ids),
            "ignore_eos": True,  # it stops at stop_token_ids alone
        }
        bans = {str(banned): NO_BIAS for banned in params.banned_ids}
        return fields | ({"logit_bias": bans} if bans else {})

    def seed(self, received: int) -> int:
        """Returns a seed that depends on the tokens received: servers count draws from the first."""
        step, row, sample = self.id
        key = f"{self.params.seed}/{step}/{row}/{sample}/{received}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) >> 1

    def keys(self, received: int) -> dict[str, Any]:
        """Returns what `dovetail serve` is told: the noise, the tokens drawn before, the batch."""
        return {
            "noise": [self.params.seed, *self.id],
            "drawn": received,
            "batch": None if received else self.batch,
        }

    def routing(self, text: str, tokens: int) -> "RoutingTrace | None":
        return None if self.read_routes is None else self.read_routes(text, tokens)


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What a server is and can do.

    log_probs: raw; penalized; tempered: also at the temperature; processed: also after cuts.
    transfer: how it takes weights. incremental: an event has its own tokens alone. normalizes:
    the pixels that it is sent. fields: of vLLM's sampling parameters. keyed: `dovetail serve`.
    """

    kind: Literal["vllm", "sglang"]
    model: str
    version: str
    max_length: int | None
    log_probs: LogProbs
    transfer: str | None = None
    incremental: bool = True
    routes: bool = False  # returns experts
    sleeps: bool = False
    images: bool = False  # with token ids
    normalizes: bool = False
    fields: frozenset[str] = frozenset()
    keyed: bool = False


def turn_part(
    client: Client,
    path: str,
    request: ServerRequest,
    ids: Sequence[int],
    scored: Sequence[tuple[int, float]],
    finish: str | None,
) -> Turn:
    """Returns a part of a turn, once its log-probs, (id, value), are seen to be of its ids."""
    if [token for token, _ in scored] != ids:
        raise client.error(path, f"log-probs of other tokens than {ids}")
    if finish is not None and finish not in FINISHES:
        raise client.error(path, f"the request ended with {finish!r}")
    log_probs = tuple(value for _, value in scored)
    return Turn(request.id, tuple(ids), log_probs, FINISHES.get(finish))


def fitting_log_probs(params: SamplingParams) -> list[LogProbs]:
    """Returns the kinds that equal those at the temperature, before cuts and penalties."""
    plain = params.repetition_penalty == 1
    warm = params.temperature not in (0, 1)
    fits: dict[LogProbs, bool] = {
        "processed": plain and not params.cuts,
        "tempered": plain,
        "penalized": plain and not warm,
        "raw": not warm,
    }
    return [kind for kind, fit in fits.items() if fit]


def check_log_probs(
    url: str, server: ServerInfo, starts: Mapping[LogProbs, str], asked: Sequence[SamplingParams]
) -> None:
    """Raises ConfigError if training needs another kind. starts: how to get a kind."""
    kinds = [kind for kind in starts if all(kind in fitting_log_probs(params) for params in asked)]
    wrong = next(
        (params for params in asked if server.log_probs not in fitting_log_probs(params)), None
    )
    if wrong is None:
        return
    usual = vars(SamplingParams())
    given = ", ".join(
        f"{name}={value:g}" for name, value in vars(wrong).items() if value != usual[name]
    )
    remedy = (
        f"start it with {starts[kinds[0]]}"
        if kinds
        else f"no start of it gives these, so change one of {given}"
    )
    raise ConfigError(
        f"engine {url} gives log-probs that are {server.log_probs}, but with {given} training "
        f"needs those at the temperature and before cuts and penalties; {remedy}"
    )


def pushed_spans(spans: Any, length: int, client: Client) -> VersionSpans:
    """Returns the versions of a reply's tokens, all of them; () without pushed versions."""
    if not spans:
        return ()
    try:
        made = tuple((int(span["version"]), int(span["start"]), int(span["end"])) for span in spans)
    except ValueError:  # a version that is no number, such as "default"
        return ()
    ends = [0, *(end for _, _, end in made)]
    if [start for _, start, _ in made] != ends[:-1] or ends[-1] != length:
        raise client.error(
            "generate", f"versions {spans} do not cover the {length} tokens of the reply"
        )
    return made
