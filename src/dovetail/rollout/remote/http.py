"""JSON over HTTP with an inference server: deadlines on everything, and a key that is written nowhere. Imports no torch."""

import http.client
import io
import json
import select
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from dovetail.errors import ConfigError, MachineError, shortened

IDLE_SECONDS = 2.0  # after which a kept connection is not used again: uvicorn closes it after 5
LOOK_SECONDS = 1.0  # after which a wait asks for its deadline again
SHOWN = 500  # characters of a server's message
DONE = b"[DONE]"


class EngineError(MachineError):
    """An inference server did not do what it was asked. status: of HTTP; None: no answer came."""

    def __init__(self, url: str, path: str, status: int | None, message: str) -> None:
        answer = "" if status is None else f"HTTP {status}: "
        super().__init__(f"engine {url}: {path}: {answer}{message}")
        self.url, self.path, self.status, self.message = url, path, status, message


class Client:
    """One server. Threads may share it; each has a connection of its own, kept between requests."""

    def __init__(self, url: str, *, key: str | None = None, timeout: float = 60.0) -> None:
        """url: http(s)://HOST[:PORT][/PREFIX]. timeout: seconds for a whole request and its answer."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"engine {shortened(url)!r}: expected a URL such as http://127.0.0.1:8000")
        if parts.username is not None or parts.password is not None:
            host = f"{parts.scheme}://{parts.hostname}"
            raise ConfigError(f"engine {host}: a URL with a user or password; give the engine's key by its variable")
        if key is not None and not (key.isascii() and key.isprintable() and key):
            raise ConfigError(f"the key of engine {url} is empty, or has characters that HTTP cannot carry")
        try:
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"engine {shortened(url)!r}: {error}") from None
        self.url, self.timeout = url.rstrip("/"), timeout
        self._context = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port, self._prefix = parts.hostname, port, parts.path.rstrip("/")
        self._key, self._kept = key, threading.local()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def get(self, path: str, *, timeout: float | None = None) -> dict[str, Any]:
        return self._whole("GET", path, None, timeout)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> dict[str, Any]:
        """The answer's JSON object; of an answer that is text, {"message": text}; of an empty one {}."""
        return self._whole("POST", path, body, timeout)

    def stream(self, path: str, body: Mapping[str, Any], deadline: Callable[[], float]) -> Iterator[dict[str, Any]]:
        """The objects of server-sent events, until [DONE]. deadline: asked again while waiting, by time.monotonic()."""
        with self._answer("POST", path, body, deadline) as answer:
            for line in iter(answer.readline, b""):
                field, _, value = line.strip().partition(b":")
                if field == b"data" and value.strip() == DONE:
                    answer.read()  # nothing more, so that the connection can be kept
                    return
                if field == b"data":
                    event = self._object(path, value)
                    if "error" in event:
                        raise EngineError(self.url, path, None, self._without_key(_message(value)))
                    yield event
            raise EngineError(self.url, path, None, "the stream ended early")

    def _whole(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None) -> dict[str, Any]:
        end = time.monotonic() + (self.timeout if timeout is None else timeout)
        with self._answer(method, path, body, lambda: end) as answer:
            text = answer.read()
            kind = answer.headers.get_content_type()
        if not text.strip():
            return {}
        return self._object(path, text) if kind == "application/json" else {"message": text.decode(errors="replace")}

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline: Callable[[], float]
    ) -> Iterator[http.client.HTTPResponse]:
        """An answer with a status below 400. Its connection is kept if it was read to its end."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        connection, begun, whole = None, time.monotonic(), False
        try:
            connection = self._connection(deadline)
            connection.request(method, self._prefix + path, data, headers)
            answer = connection.getresponse()
            if answer.status >= 400:
                raise EngineError(self.url, path, answer.status, self._without_key(_message(answer.read())))
            yield answer
            whole = answer.isclosed() and not answer.will_close
        except TimeoutError:
            waited = f"no whole answer within {time.monotonic() - begun:.3g} s"
            raise EngineError(self.url, path, None, waited) from None
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(self.url, path, None, self._without_key(f"{type(error).__name__}: {error}")) from None
        finally:
            if whole:
                self._kept.connection, self._kept.since = connection, time.monotonic()
            elif connection is not None:
                connection.close()

    def _connection(self, deadline: Callable[[], float]) -> http.client.HTTPConnection:
        """This thread's kept connection if the server has not closed it, else a new one."""
        kept: http.client.HTTPConnection | None = self._kept.__dict__.pop("connection", None)
        if kept is not None:
            sock: Any = kept.sock
            waiting = select.poll()
            waiting.register(sock, select.POLLIN)  # nothing is due: it would be the end
            if time.monotonic() - self._kept.since < IDLE_SECONDS and not waiting.poll(0):
                sock.deadline = deadline
                return kept
            kept.close()
        left = _left(deadline)
        if self._context is None:
            new = http.client.HTTPConnection(self._host, self._port, timeout=left)
        else:
            new = http.client.HTTPSConnection(self._host, self._port, timeout=left, context=self._context)
        new.connect()
        new.sock = _TimedSocket(new.sock, deadline)
        return new

    def _object(self, path: str, text: bytes) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            shown = self._without_key(shortened(repr(text)))
            raise EngineError(self.url, path, None, f"the answer is not a JSON object: {shown}")
        return value

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


class _TimedSocket:
    """What http.client uses of a socket. A socket's own timeout is for each piece: a trickle would never end."""

    def __init__(self, sock: Any, deadline: Callable[[], float]) -> None:
        self.sock, self.deadline = sock, deadline
        self._users, self._closed = 0, False

    def fileno(self) -> int:
        return int(self.sock.fileno())

    def sendall(self, data: Any) -> None:
        self.sock.settimeout(_left(self.deadline))
        self.sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        self._users += 1
        return io.BufferedReader(_Reader(self))

    def receive(self, into: Any) -> int:
        while True:
            self.sock.settimeout(min(_left(self.deadline), LOOK_SECONDS))
            try:
                return int(self.sock.recv_into(into))
            except TimeoutError:  # the deadline may have moved
                continue

    def release(self) -> None:
        self._users -= 1
        self._close_unused()

    def close(self) -> None:
        """An answer that still reads keeps the connection open, as with a real socket."""
        self._closed = True
        self._close_unused()

    def _close_unused(self) -> None:
        if self._closed and self._users <= 0:
            self.sock.close()


class _Reader(io.RawIOBase):
    def __init__(self, sock: _TimedSocket) -> None:
        super().__init__()
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        return self._sock.receive(into)

    def close(self) -> None:
        if not self.closed:
            self._sock.release()
        super().close()


def _left(deadline: Callable[[], float]) -> float:
    left = deadline() - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _message(body: bytes) -> str:
    """What a server says of an error: vLLM {"error": {"message"}}, FastAPI {"detail"}, or text."""
    text = body.decode(errors="replace").strip()
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    for name in ("error", "detail", "message"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    text = text if value is None else value if isinstance(value, str) else json.dumps(value)
    return text[:SHOWN] or "no message"
