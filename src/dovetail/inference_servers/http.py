"""A client for JSON over HTTP with deadlines, which shows its key nowhere."""

import http.client
import json
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

from dovetail.errors import ConfigError, MachineError, shortened

Deadline = Callable[[], float]  # by time.monotonic(), asked again while waiting
IDLE_SECONDS = 2.0  # of a kept connection; uvicorn closes it after 5
DEADLINE_SECONDS = 1.0  # after which a wait asks for its deadline again
SHOWN = 500  # characters
DONE = b"[DONE]"
AGENT = "dovetail trainer "  # begins the name by which servers tell trainers apart


class ServerError(MachineError):
    """What went wrong with a server. status: that of HTTP; None: no answer came."""

    def __init__(self, url: str, path: str, status: int | None, message: str) -> None:
        answer = "" if status is None else f"HTTP {status}: "
        super().__init__(f"engine {url}: {path}: {answer}{message}")
        self.url = url
        self.path = path
        self.status = status
        self.message = message


class Client:
    """Talks to http(s)://HOST[:PORT][/PREFIX]. Each thread keeps a connection.

    timeout: seconds until the whole answer is there.
    """

    def __init__(self, url: str, *, key: str | None = None, timeout: float = 60.0) -> None:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https")
        if not is_http or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(
                f"engine {shortened(url)!r}: expected a URL such as http://127.0.0.1:8000"
            )
        if parts.username is not None or parts.password is not None:
            host = f"{parts.scheme}://{parts.hostname}"
            raise ConfigError(
                f"engine {host}: a URL with a user or password; give the engine's key by its "
                "variable"
            )
        if key is not None and not (key.isascii() and key.isprintable() and key):
            raise ConfigError(
                f"the key of engine {url} is empty, or has characters that HTTP cannot carry"
            )
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"engine {shortened(url)!r}: {error}") from None
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._context = ssl.create_default_context() if parts.scheme == "https" else None
        if self._context is not None:
            self._context.sslsocket_class = _TimedTLSSocket
        self._host = parts.hostname
        self._port = port
        self._prefix = parts.path.rstrip("/")
        self._key = key
        self._kept = threading.local()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def error(self, path: str, message: str, status: int | None = None) -> ServerError:
        """Returns an error of this server, in which the key does not show."""
        if self._key:
            message = message.replace(self._key, "***")
        return ServerError(self.url, path, status, message)

    def get(self, path: str, *, timeout: float | None = None) -> dict[str, Any]:
        return self._whole("GET", path, None, timeout)

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Returns the answer's JSON object; {"message": text} for text, {} for nothing."""
        return self._whole("POST", path, body, timeout)

    def stream(
        self, path: str, body: Mapping[str, Any], deadline: Deadline
    ) -> Iterator[dict[str, Any]]:
        """Yields the objects of server-sent events, until [DONE]."""
        with self._answer("POST", path, body, deadline) as answer:
            for line in iter(answer.readline, b""):
                field, _, value = line.strip().partition(b":")
                if field != b"data":
                    continue
                if value.strip() == DONE:
                    answer.read()  # nothing; then the connection can be kept
                    return
                event = self._object(path, value)
                if "error" in event:
                    raise self.error(path, _message(value))
                yield event
            raise self.error(path, "the stream ended early")

    def _whole(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> dict[str, Any]:
        end = time.monotonic() + (self.timeout if timeout is None else timeout)
        with self._answer(method, path, body, lambda: end) as answer:
            text = answer.read()
            kind = answer.headers.get_content_type()
        if not text.strip():
            return {}
        if kind == "application/json":
            return self._object(path, text)
        return {"message": text.decode(errors="replace")}

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline: Deadline
    ) -> Iterator[http.client.HTTPResponse]:
        """Yields an answer of a status below 400; one that is read to its end keeps its connection."""
        headers = {"User-Agent": f"{AGENT}{socket.gethostname()}, process {os.getpid()}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        connection = None
        begun = time.monotonic()
        whole = False
        try:
            connection = self._connection(deadline)
            connection.request(method, self._prefix + path, data, headers)
            answer = connection.getresponse()
            if answer.status >= 400:
                raise self.error(path, _message(answer.read()), answer.status)
            yield answer
            whole = answer.isclosed() and not answer.will_close
        except TimeoutError:
            seconds = time.monotonic() - begun
            raise self.error(path, f"no whole answer within {seconds:.3g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise self.error(path, f"{type(error).__name__}: {error}") from None
        finally:
            if whole:
                self._kept.connection = connection
                self._kept.since = time.monotonic()
            elif connection is not None:
                connection.close()

    def _connection(self, deadline: Deadline) -> http.client.HTTPConnection:
        kept: Any = self._kept.__dict__.pop("connection", None)
        if kept is not None:
            waiting = select.poll()
            waiting.register(kept.sock, select.POLLIN)  # nothing is due but the end
            if time.monotonic() - self._kept.since < IDLE_SECONDS and not waiting.poll(0):
                kept.sock.deadline = deadline
                return cast(http.client.HTTPConnection, kept)
            kept.close()
        place = (self._host, self._port)
        left = _left(deadline)
        if self._context is None:
            new = http.client.HTTPConnection(*place, timeout=left)
        else:
            new = http.client.HTTPSConnection(*place, timeout=left, context=self._context)
        new.connect()
        sock: Any = new.sock
        if self._context is None:
            sock = _TimedSocket(fileno=new.sock.detach())
            new.sock = sock
        sock.deadline = deadline
        return new

    def _object(self, path: str, text: bytes) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise self.error(path, f"the answer is not a JSON object: {shortened(repr(text))}")
        return value


class _TimedSocket(socket.socket):
    """A socket with a deadline for all pieces, which may move; its own timeout is for each piece."""

    deadline: Deadline

    def sendall(self, *args: Any) -> None:
        self.settimeout(_left(self.deadline))
        super().sendall(*args)

    def recv_into(self, *args: Any) -> int:
        while True:
            self.settimeout(min(_left(self.deadline), DEADLINE_SECONDS))
            try:
                return super().recv_into(*args)
            except TimeoutError:  # the deadline may have moved
                continue


class _TimedTLSSocket(_TimedSocket, ssl.SSLSocket):
    pass


def _left(deadline: Deadline) -> float:
    left = deadline() - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _message(body: bytes) -> str:
    """Returns the message of vLLM's {"error": {"message"}}, FastAPI's {"detail"}, or text."""
    text = body.decode(errors="replace").strip()
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    for name in ("error", "detail", "message"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    if value is not None:
        text = value if isinstance(value, str) else json.dumps(value)
    return "an HTML page" if text.startswith("<") else text[:SHOWN] or "no message"
