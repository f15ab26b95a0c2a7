"""Replicas of an inference server: requests of one that is lost go on elsewhere."""

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
from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.protocol import ServerInfo, ServerRequest
from dovetail.inference_servers.sglang import Sglang
from dovetail.inference_servers.vllm import SLEEP, WAKE, Vllm
from dovetail.sampler.params import join_spans
from dovetail.sampler.turn import Turn

ServerClient = Vllm | Sglang
BATCHES = 64  # whose replica is remembered
MAX_IMBALANCE = 16  # requests, to keep a prompt's samples together
HEALTH_SECONDS = 10.0
WAKE_SECONDS = 60.0
ATTEMPTS = 6
FIRST_WAIT = 0.25  # without a token; seconds, doubled
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})  # not due to the request


class Replica:
    def __init__(self, client: Client, server: ServerInfo) -> None:
        self.client = client
        self.server = server
        self.version: int | None = None  # of the last push
        self.problem: ServerError | None = client.error("/", "no weights were pushed to it")
        self.busy = 0  # requests
        self.last_response = 0.0  # by time.monotonic()
        self.asleep = False

    @property
    def serves(self) -> bool:
        return self.problem is None


class Fleet:
    """Sends each request to the replica that has the fewest.

    timeout: seconds without any response after which a replica is lost. on_server_lost: called
    once, with the reason.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        protocol: ServerClient,
        *,
        timeout: float,
        on_server_lost: Callable[[ServerError], None],
        max_num_seqs: int = 512,
    ) -> None:
        self.replicas = replicas
        self._protocol = protocol
        self.timeout = timeout
        self._on_server_lost = on_server_lost
        self._lock = threading.Lock()
        self._pushing = self._closed = False
        self._pinned: dict[str, Replica] = {}  # by batch
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = max_num_seqs * len(replicas)  # each has a thread with a connection
        self.capacity = most if files == resource.RLIM_INFINITY else min(most, max(1, files // 2))
        self.threads = ThreadPoolExecutor(self.capacity, thread_name_prefix="engines")

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Lets no replica time out while weights are pushed."""
        self._pushing = True
        try:
            yield
        finally:
            for replica in self.replicas:
                replica.last_response = time.monotonic()
            self._pushing = False

    def assign_batches(self, requests: Sequence[ServerRequest]) -> Sequence[ServerRequest]:
        """Returns the requests with a batch for each `dovetail serve`, so that runs repeat.

        More requests than `capacity` stay unchanged.
        """
        serving = [replica for replica in self.replicas if replica.serves]
        keyed = bool(serving) and all(replica.server.keyed for replica in serving)
        if not keyed or len(requests) > self.capacity - sum(replica.busy for replica in serving):
            return requests
        by_prompt: dict[tuple[int, ...], list[int]] = {}  # numbers of requests by row and ids
        for i, request in enumerate(requests):
            by_prompt.setdefault((request.id.row, *request.prompt_ids), []).append(i)
        members = list(by_prompt.values())
        costs = []
        for numbers in members:
            new_tokens = sum(requests[i].params.max_new_tokens for i in numbers)
            costs.append(len(requests[numbers[0]].prompt_ids) + new_tokens)
        batched = list(requests)
        self._pinned = dict([*self._pinned.items()][-BATCHES:])
        shares = plan_microbatches(costs, len(serving), None)
        for replica, parts in zip(serving, shares, strict=True):
            name = uuid.uuid4().hex
            self._pinned[name] = replica
            numbers = sorted(i for part in parts for prompt in part for i in members[prompt])
            for i in numbers:
                batched[i] = replace(requests[i], batch=(name, len(numbers), i))
        return batched

    def pushed(self, replica: Replica, version: int, problem: ServerError | None) -> None:
        """Notes the end of a push; with a problem the replica serves nothing until the next one."""
        with self._lock:
            replica.version = version
            replica.problem = problem
        if problem is not None:
            self._on_server_lost(problem)

    def sleep(self) -> None:
        """Frees GPU memory until `wake`; weights wait in the host's.

        A replica that fails serves nothing until a push.
        """
        serving = [replica for replica in self.replicas if replica.serves]
        self._post(serving, SLEEP)  # waking would resume one that is paused

    def wake(self) -> None:
        self._post([replica for replica in self.replicas if replica.asleep], WAKE)

    def _post(self, replicas: Sequence[Replica], path: str) -> None:
        calls = [partial(replica.client.post, path, timeout=WAKE_SECONDS) for replica in replicas]
        for replica, future in zip(replicas, [in_background(call) for call in calls], strict=True):
            try:
                future.result()
                replica.asleep = path == SLEEP
            except ServerError as error:
                replica.asleep = True  # perhaps
                self._lose(replica, error)

    def close(self) -> None:
        """Ends requests under way with an error."""
        self._closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)

    def generate(self, request: ServerRequest) -> Turn:
        """Returns a whole turn; ServerError if no replica is left, or one refuses the request."""
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
            if not self._protocol.continues(request.params):
                turn = Turn(request.id)
            if replica.serves:
                time.sleep(FIRST_WAIT * 2 ** (attempts - 1))

    def _read(
        self, replica: Replica, request: ServerRequest, turn: Turn
    ) -> tuple[Turn, ServerError | None]:
        """Returns the turn with all tokens that came, and the error that ended their stream.

        Tokens of a stream that breaks have the oldest version that they can have.
        """
        before = turn
        first = len(before.ids)
        version = replica.version

        def deadline() -> float:
            if self._closed or not replica.serves:
                return 0.0
            return (time.monotonic() if self._pushing else replica.last_response) + self.timeout

        try:
            for part in self._protocol.generate(
                replica.client, replica.server, request, before.ids, deadline
            ):
                replica.last_response = time.monotonic()
                start = len(turn.ids)
                known = () if version is None else ((version, start, start + len(part.ids)),)
                turn = turn.extended(part, known)
                version = replica.version
                if part.versions:  # what the server says of all its tokens
                    named = [(v, first + start, first + end) for v, start, end in part.versions]
                    turn = replace(turn, versions=join_spans(before.versions, named))
        except ServerError as error:
            return turn, error
        if turn.finish is None or not turn.ids:
            problem = "the reply ended without a finish or a token"
            return turn, replica.client.error("generate", problem)
        return turn, None

    def _finished(self, turn: Turn, request: ServerRequest) -> Turn:
        """Returns the turn with its finish, if its last token tells that."""
        if turn.finish is None and turn.ids and self._protocol.continues(request.params):
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
                raise self.replicas[0].client.error("generate", f"no engine is left: {problems}")
            least = min(alive, key=lambda replica: replica.busy)
            preferred = self._pinned.get(request.batch[0]) if request.batch else None
            if preferred is None or not preferred.serves:
                preferred = alive[(request.id.step + request.id.row) % len(alive)]
            replica = least
            if request.batch or preferred.busy < least.busy + MAX_IMBALANCE:
                replica = preferred
            if not replica.busy:
                replica.last_response = time.monotonic()
            replica.busy += 1
            return replica

    def _check_health(self, replica: Replica, error: ServerError) -> None:
        """Takes a replica out of service if it has timed out or is not healthy."""
        if not replica.serves:
            return
        if time.monotonic() < replica.last_response + self.timeout:
            try:
                replica.client.get("/health", timeout=HEALTH_SECONDS)
                return
            except ServerError as unhealthy:
                message = f"{error.message} (then {unhealthy.message})"
                error = replica.client.error(error.path, message, error.status)
        self._lose(replica, error)

    def _lose(self, replica: Replica, error: ServerError) -> None:
        with self._lock:
            first = replica.serves
            replica.problem = replica.problem or error
        if first:
            self._on_server_lost(error)
