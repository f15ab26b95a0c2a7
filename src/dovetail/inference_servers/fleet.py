"""Replicas of an inference server; requests of lost ones go on elsewhere."""

import resource
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from dovetail.batch.balancing import plan_microbatches
from dovetail.inference_servers.background import in_background
from dovetail.inference_servers.http import Client, EngineError
from dovetail.inference_servers.protocol import Abilities, ServerRequest
from dovetail.inference_servers.sglang import Sglang
from dovetail.inference_servers.vllm import SLEEP, WAKE, Vllm
from dovetail.sampler.params import join_spans
from dovetail.sampler.turn import Turn

Wire = Vllm | Sglang
BATCHES = 64  # whose replica is remembered
MAX_IMBALANCE = 16  # requests, to keep a prompt's samples together
HEALTH_SECONDS = 10.0
WAKE_SECONDS = 60.0
ATTEMPTS = 6
FIRST_WAIT = 0.25  # without a token; seconds, doubled
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})  # not due to the request


class Replica:
    def __init__(self, client: Client, server: Abilities) -> None:
        self.client = client
        self.server = server
        self.version: int | None = None  # of the last push
        self.problem: EngineError | None = EngineError(
            client.url, "/", None, "no weights were pushed to it"
        )
        self.busy = 0  # requests
        self.heard = 0.0  # when it last answered any
        self.asleep = False

    @property
    def serves(self) -> bool:
        return self.problem is None


class Fleet:
    """A request goes to the replica with the fewest. silence: seconds until one is lost."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        wire: Wire,
        *,
        silence: float,
        on_loss: Callable[[EngineError], None],
        max_num_seqs: int = 512,
    ) -> None:
        self.replicas = replicas
        self._wire = wire
        self.silence = silence
        self._on_loss = on_loss
        self._lock = threading.Lock()
        self._pushing = self._closed = False
        self._pinned: dict[str, Replica] = {}  # by batch
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = max_num_seqs * len(replicas)  # each has a thread with a connection
        self.capacity = most if files == resource.RLIM_INFINITY else min(most, max(1, files // 2))
        self.threads = ThreadPoolExecutor(self.capacity, thread_name_prefix="engines")

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """No replica is lost for its silence."""
        self._pushing = True
        try:
            yield
        finally:
            for replica in self.replicas:
                replica.heard = time.monotonic()
            self._pushing = False

    def assign_batches(self, requests: Sequence[ServerRequest]) -> Sequence[ServerRequest]:
        """Returns the requests with a batch for each `dovetail serve`, so that runs repeat.

        More requests than `capacity` stay unchanged.
        """
        serving = [replica for replica in self.replicas if replica.serves]
        keyed = bool(serving) and all(replica.server.keyed for replica in serving)
        if not keyed or len(requests) > self.capacity - sum(replica.busy for replica in serving):
            return requests
        prompts: dict[tuple[int, ...], list[int]] = {}  # row and ids -> numbers of requests
        for i, request in enumerate(requests):
            prompts.setdefault((request.id.row, *request.prompt_ids), []).append(i)
        costs = [
            len(key) - 1 + sum(requests[i].params.max_new_tokens for i in own)
            for key, own in prompts.items()
        ]
        members = list(prompts.values())
        out = list(requests)
        self._pinned = dict([*self._pinned.items()][-BATCHES:])
        for replica, dealt in zip(
            serving, plan_microbatches(costs, len(serving), None), strict=True
        ):
            name = uuid.uuid4().hex
            numbers = sorted(i for part in dealt for prompt in part for i in members[prompt])
            self._pinned[name] = replica
            for i in numbers:
                out[i] = replace(requests[i], batch=(name, len(numbers), i))
        return out

    def pushed(self, replica: Replica, version: int, problem: EngineError | None) -> None:
        """Notes the end of a push: with a problem the replica serves nothing until the next push."""
        with self._lock:
            replica.version = version
            replica.problem = problem
        if problem is not None:
            self._on_loss(problem)

    def sleep(self) -> None:
        """GPU memory is free until `wake`; weights wait in the host's. A replica that fails serves nothing until a push."""
        self._post(
            [each for each in self.replicas if each.serves], SLEEP
        )  # waking would resume one that is paused

    def wake(self) -> None:
        self._post([replica for replica in self.replicas if replica.asleep], WAKE)

    def _post(self, replicas: Sequence[Replica], path: str) -> None:
        calls = [partial(replica.client.post, path, timeout=WAKE_SECONDS) for replica in replicas]
        for replica, future in zip(replicas, [in_background(call) for call in calls], strict=True):
            try:
                future.result()
                replica.asleep = path == SLEEP
            except EngineError as error:
                replica.asleep = True  # perhaps
                self._lose(replica, error)

    def close(self) -> None:
        """Requests under way end with an error."""
        self._closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)

    def generate(self, request: ServerRequest) -> Turn:
        """Returns a whole turn; EngineError if no replica is left, or one refuses the request."""
        turn = Turn(request.id)
        attempts = 0
        while True:
            replica = self._acquire(request)
            received = len(turn.ids)
            try:
                turn, error = self._read(replica, request, turn)
                if error is None:
                    return turn
                if self._closed or (error.status is not None and error.status not in PASSING):
                    raise error
                attempts = 1 if len(turn.ids) > received else attempts + 1
                self._check_health(replica, error)
                if attempts == ATTEMPTS:
                    raise error
            finally:
                with self._lock:
                    replica.busy -= 1
            turn = self._finished(turn, request)
            if turn.finish is not None:  # the stream broke after its last token
                return turn
            if not self._wire.continues(request.params):
                turn = Turn(request.id)
            if replica.serves:
                time.sleep(FIRST_WAIT * 2 ** (attempts - 1))

    def _read(
        self, replica: Replica, request: ServerRequest, turn: Turn
    ) -> tuple[Turn, EngineError | None]:
        """Returns the turn with all tokens that came, and the error that ended their stream.

        Tokens of a stream that breaks have the oldest version that they can have.
        """
        before = turn
        first = len(before.ids)
        version = replica.version

        def deadline() -> float:
            if self._closed or not replica.serves:
                return 0.0
            return (time.monotonic() if self._pushing else replica.heard) + self.silence

        try:
            for part in self._wire.generate(
                replica.client, replica.server, request, before.ids, deadline
            ):
                replica.heard = time.monotonic()
                start = len(turn.ids)
                known = () if version is None else ((version, start, start + len(part.ids)),)
                turn = turn.extended(part, known)
                version = replica.version
                if part.versions:  # what the server says of all its tokens
                    named = [(v, first + start, first + end) for v, start, end in part.versions]
                    turn = replace(turn, versions=join_spans(before.versions, named))
        except EngineError as error:
            return turn, error
        if turn.finish is None or not turn.ids:
            problem = "the reply ended without a finish or a token"
            return turn, EngineError(replica.client.url, "generate", None, problem)
        return turn, None

    def _finished(self, turn: Turn, request: ServerRequest) -> Turn:
        """Returns the turn with its finish, if its last token tells that."""
        if turn.finish is None and turn.ids and self._wire.continues(request.params):
            if turn.ids[-1] in request.params.stop_ids:
                return replace(turn, finish="stop")
            if len(turn.ids) == request.params.max_new_tokens:
                return replace(turn, finish="length")
        return turn

    def _acquire(self, request: ServerRequest) -> Replica:
        with self._lock:
            alive = [replica for replica in self.replicas if replica.serves]
            if not alive:
                problems = "; ".join(str(replica.problem) for replica in self.replicas)
                raise EngineError(
                    self.replicas[0].client.url, "generate", None, f"no engine is left: {problems}"
                )
            least = min(alive, key=lambda replica: replica.busy)
            home = self._pinned.get(request.batch[0]) if request.batch else None
            if home is None or not home.serves:
                home = alive[(request.id.step + request.id.row) % len(alive)]
            replica = home if request.batch or home.busy < least.busy + MAX_IMBALANCE else least
            if not replica.busy:
                replica.heard = time.monotonic()
            replica.busy += 1
            return replica

    def _check_health(self, replica: Replica, error: EngineError) -> None:
        """Take it out of service if it is silent or not healthy."""
        if not replica.serves:
            return
        if time.monotonic() < replica.heard + self.silence:
            try:
                replica.client.get("/health", timeout=HEALTH_SECONDS)
                return
            except EngineError as unhealthy:
                error = EngineError(
                    error.url,
                    error.path,
                    error.status,
                    f"{error.message} (then {unhealthy.message})",
                )
        self._lose(replica, error)

    def _lose(self, replica: Replica, error: EngineError) -> None:
        with self._lock:
            first = replica.serves
            replica.problem = replica.problem or error
        if first:
            self._on_loss(error)
