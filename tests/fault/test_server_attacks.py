"""`dovetail serve` under attack: it lives, and every other client is answered."""

import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dovetail.inference_servers.http import Client, ServerError
from dovetail.serving import connection, guard
from dovetail.serving.http_server import HttpServer
from tests.helpers.served import serving, wait_for
from tests.helpers.server_attacks import CLOSED, GENERATE, KEY, Attack, attacks, fuzzed, post

SECONDS = 30.0  # that no answer takes
SHORT = 0.4  # instead of the server's own limits of a part of a request
SAMPLE = {"token_ids": [7, 8], "sampling_params": {"max_tokens": 5, "seed": 1}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    monkeypatch.setattr(connection, "HEAD_SECONDS", SHORT)
    monkeypatch.setattr(connection, "BODY_SECONDS", SHORT)
    with serving(key=KEY, max_tokens=256) as made:
        yield made


def exchange(server: HttpServer, raw: bytes) -> bytes:
    """The answer's first bytes; nothing if the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as peer:
        with suppress(ConnectionError):  # refused while it was sent
            peer.sendall(raw)
        with suppress(ConnectionError):
            return peer.recv(1 << 16)
        return b""


def status_of(answer: bytes) -> int:
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else CLOSED


class OtherClient:
    """Asks for the same sample while a server is attacked."""

    def __init__(self, server: HttpServer) -> None:
        self._client = Client(server.url, key=KEY, timeout=SECONDS)
        self._expected = self._client.post(GENERATE, SAMPLE)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.answers = Counter[bool]()

    def _ask(self) -> None:
        while not self._over.is_set():
            with suppress(ServerError):
                found = self._client.post(GENERATE, SAMPLE)
                self.answers[ids_of(found) == ids_of(self._expected)] += 1
                continue
            self.answers[False] += 1

    def __enter__(self) -> "OtherClient":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def ids_of(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def attack(server: HttpServer, table: Sequence[Attack]) -> None:
    with OtherClient(server) as other, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda each: exchange(server, each.raw), table))
    wrong = []
    for each, answer in zip(table, answers, strict=True):
        status = status_of(answer)
        if status not in (each.statuses or (CLOSED, 200, 400, 401, 404, 405)):
            wrong.append((each.kind, each.name, each.statuses, answer[:300]))
    assert not wrong, "\n".join(map(str, wrong))
    assert other.answers[True] > 0 and not other.answers[False]
    assert server.sampler_server._living == {}


def test_one_attack_of_each_class(server: HttpServer, tmp_path: Path) -> None:
    first = {each.kind: each for each in attacks(tmp_path)}
    assert len(first) == 9
    attack(server, list(first.values()))


@pytest.mark.soak
def test_the_whole_table_of_attacks(server: HttpServer, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"12345678")
    table = list(attacks(tmp_path))
    attack(server, table)
    assert len(table) > 350


@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.soak)])
def test_fuzzed_requests(server: HttpServer, count: int) -> None:
    attack(server, list(fuzzed(count, seed=count)))


def test_clients_that_send_no_whole_request_are_closed(server: HttpServer) -> None:
    """And those that come meanwhile are answered."""
    threads = threading.active_count()
    parts = (b"", b"POST", post(GENERATE, SAMPLE)[:-4])
    peers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
    for number, peer in enumerate(peers):
        peer.sendall(parts[number % 3])
    assert threading.active_count() == threads
    assert ids_of(Client(server.url, key=KEY).post(GENERATE, SAMPLE))
    for peer in peers:
        peer.settimeout(SECONDS)
        with suppress(ConnectionError):
            assert peer.recv(1) == b""
        peer.close()


def test_bytes_that_are_held_are_bounded(
    server: HttpServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "MAX_BODY", 50_000)
    monkeypatch.setattr(guard, "MAX_HELD", 70_000)
    monkeypatch.setattr(connection, "BODY_SECONDS", SECONDS)
    large = {"content-length": 48_000}
    with socket.create_connection(("127.0.0.1", server.port)) as holds:
        holds.sendall(post(GENERATE, b"y" * 40_000, headers=large))
        Client(server.url, key=KEY).get("/is_paused")
        assert status_of(exchange(server, post(GENERATE, b"y" * 48_000))) == 503
        assert status_of(exchange(server, post(GENERATE, b"y" * 50_001))) == 413
    assert status_of(exchange(server, post(GENERATE, SAMPLE))) == 200


def test_more_clients_than_may_be_are_told(
    server: HttpServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)
    peers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
    answer = exchange(server, b"")
    assert status_of(answer) == 503 and b"3 clients are connected; try again" in answer
    for peer in peers:
        peer.close()


def test_a_reader_that_stops_reading_is_closed(
    server: HttpServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "WRITE_SECONDS", SHORT)
    connections = server._uvicorn.server_state.connections
    server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", server.port))
        wait_for(lambda: len(connections) == 1)
        peer.setblocking(False)
        asked = post("/openapi.json", method="GET") * 100

        def is_closed() -> bool:
            with suppress(BlockingIOError, ConnectionError):
                peer.send(asked)
            return not connections

        wait_for(is_closed)
