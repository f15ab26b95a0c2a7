"""Requests to an inference server: deadlines against a trickle, kept connections, errors, and a key that never shows."""

import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dovetail.errors import ConfigError
from dovetail.inference_servers.http import Client, ServerError

KEY = "sk-quite-secret"


def reply(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


@contextmanager
def server(
    answer: Callable[[socket.socket, bytes], None], context: ssl.SSLContext | None = None
) -> Iterator[str]:
    """`answer` gets a connection and the bytes of a request. context: of TLS."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk(connection: socket.socket) -> None:
        if context is not None:
            try:
                connection = context.wrap_socket(connection, server_side=True)
            except OSError:  # the client does not trust the certificate
                return
        with connection:
            while head := connection.recv(1 << 16):
                while b"\r\n\r\n" not in head:
                    head += connection.recv(1 << 16)
                length = next(
                    (
                        int(x[15:])
                        for x in head.lower().split(b"\r\n")
                        if x.startswith(b"content-length:")
                    ),
                    0,
                )
                while len(head.partition(b"\r\n\r\n")[2]) < length:
                    head += connection.recv(1 << 16)
                answer(connection, head)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http{'s' if context else ''}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
def test_an_https_server_is_checked_and_its_trickle_ends_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [*words.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    gave_up = threading.Event()
    was_first = list[bool]()

    def answer(connection: socket.socket, request: bytes) -> None:
        text = reply(b'{"ok": true, "n": "%s"}' % (b"x" * 200_000))
        if request.startswith(b"GET /slow"):
            connection.sendall(text[:100])
            was_first.append(gave_up.wait(60))
        else:
            connection.sendall(text)

    with server(answer, context) as url:
        with pytest.raises(ServerError, match="CERTIFICATE_VERIFY_FAILED"):
            Client(url).get("/x")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        client = Client(url)
        assert [len(client.get("/x")["n"]) for _ in range(2)] == [200_000] * 2
        with pytest.raises(ServerError, match="no whole answer"):
            client.get("/slow", timeout=0.2)
        assert was_first == [], "the client does not wait for the server"
        gave_up.set()


def test_a_thread_keeps_its_connection_until_the_server_ends_it() -> None:
    seen = []

    def answer(connection: socket.socket, request: bytes) -> None:
        seen.append((connection.getpeername(), request.partition(b"\r\n\r\n")[2]))
        connection.sendall(reply(b'{"ok": true}'))
        if len(seen) == 2:
            connection.shutdown(socket.SHUT_RDWR)

    with server(answer) as url:
        client = Client(url + "/prefix/")
        for i in range(2):
            assert client.post("/x?mode=keep", {"i": i}) == {"ok": True}
        time.sleep(0.05)
        assert client.get("/y") == {"ok": True}
    assert [body for _, body in seen] == [b'{"i": 0}', b'{"i": 1}', b""]
    assert seen[0][0] == seen[1][0] != seen[2][0]


def test_a_trickle_ends_at_the_deadline_wherever_it_drips() -> None:
    def answer(connection: socket.socket, request: bytes) -> None:
        start = {b"/head": 0, b"/body": 60}[request.split()[1]]
        text = reply(b'{"ok": ' + b" " * 3000 + b"true}")  # a minute of drops
        connection.sendall(text[:start])
        for byte in text[start:]:
            try:
                connection.sendall(bytes([byte]))
            except OSError:
                return
            time.sleep(0.02)

    with server(answer) as url:
        for path in ("/head", "/body"):
            begun = time.monotonic()
            with pytest.raises(ServerError, match="no whole answer within") as error:
                Client(url).get(path, timeout=0.3)
            assert time.monotonic() - begun > 0.25
            assert (
                error.value.status is None and error.value.path == path and error.value.url == url
            )


def test_the_deadline_of_a_stream_moves_with_its_events() -> None:
    """The one that holds at first is far; the last event of a stream that falls silent has a near one."""
    gave_up = threading.Event()

    def answer(connection: socket.socket, request: bytes) -> None:
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
        )
        events = [b'{"i": %d}' % i for i in range(4)]
        for event in events if b"/silent" in request else [*events, b"[DONE]"]:
            data = b"data: " + event + b"\n\n"
            connection.sendall(b"%x\r\n%s\r\n" % (len(data), data))
            time.sleep(0.1)
        if b"/silent" not in request:
            connection.sendall(b"0\r\n\r\n")
        elif not gave_up.wait(30):
            connection.shutdown(socket.SHUT_RDWR)  # another error than that of the deadline

    with server(answer) as url:
        client, got = Client(url), list[int]()

        def read(path: str, near: float) -> None:
            ends = [time.monotonic() + 60]
            for event in client.stream(path, {}, lambda: ends[-1]):
                got.append(event["i"])
                ends.append(time.monotonic() + (near if event["i"] == 3 else 60))

        read("/whole", 60)
        with pytest.raises(ServerError, match="no whole answer"):
            read("/silent", 0.1)
        gave_up.set()
    assert got == [0, 1, 2, 3] * 2


def test_errors_say_what_the_server_says_without_the_key() -> None:
    bodies = {
        "/vllm": (
            "400 Bad Request",
            json.dumps({"error": {"message": f"max_tokens is wrong {KEY}", "code": 400}}),
        ),
        "/fastapi": (
            "422 Unprocessable",
            json.dumps({"detail": [{"loc": ["body"], "msg": "Field required"}]}),
        ),
        "/text": ("500 Internal Server Error", "boom"),
    }

    def answer(connection: socket.socket, request: bytes) -> None:
        assert f"Authorization: Bearer {KEY}".encode() in request
        status, body = bodies[request.split()[1].decode()]
        connection.sendall(reply(body.encode(), status))

    with server(answer) as url:
        client = Client(url, key=KEY)
        said = {}
        for path in bodies:
            with pytest.raises(ServerError) as error:
                client.post(path, {})
            said[path] = (error.value.status, str(error.value))
        assert KEY not in repr(client) + repr(vars(client).keys())
    assert said == {
        "/vllm": (400, f"engine {url}: /vllm: HTTP 400: max_tokens is wrong ***"),
        "/fastapi": (
            422,
            f'engine {url}: /fastapi: HTTP 422: [{{"loc": ["body"], "msg": "Field required"}}]',
        ),
        "/text": (500, f"engine {url}: /text: HTTP 500: boom"),
    }
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ServerError, match="ConnectionRefusedError") as refused:
            Client(f"http://127.0.0.1:{unused.getsockname()[1]}").get("/health")
    assert refused.value.status is None


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://user:pw@host", "http://host/?q=1", "http://h:x"]
)
def test_odd_urls_and_keys_are_refused(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        Client(url)
    assert "pw" not in str(error.value)
    with pytest.raises(ConfigError, match="the key of engine http://host") as error:
        Client("http://host", key=f"{KEY}\n")
    assert KEY not in str(error.value)
