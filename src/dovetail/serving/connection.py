"""One connection: uvicorn's, with limits on the size of a head and on the time of every part.

A connection is closed that sends no whole head within HEAD_SECONDS, no whole body within
BODY_SECONDS, or does not read its answer for WRITE_SECONDS.
"""

import asyncio
import resource
from functools import partial
from typing import Any

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dovetail.serving.bodies import error_fields

MAX_HEAD = 1 << 16  # bytes
HEAD_SECONDS = 10.0
BODY_SECONDS = 60.0
WRITE_SECONDS = 60.0
MAX_CONNECTIONS = 1 << 14
OWN_FILES = 256  # that are not connections


def most_connections() -> int:
    """As many as this process may open files for."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(1, files - OWN_FILES))


class Connection(HttpToolsProtocol):
    """A connection of one client, which uvicorn makes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None  # of the request's next part
        self._writing: asyncio.TimerHandle | None = None  # of the answer's next part
        self._head = 0  # bytes of a head that is not whole

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(HEAD_SECONDS)
        if len(self.connections) > most_connections():
            self._refuse(503, f"{len(self.connections) - 1} clients are connected; try again")

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        super().data_received(data)
        if self._head > MAX_HEAD and not self.transport.is_closing():
            self._refuse(431, f"the head of the request has more than {MAX_HEAD} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = max(self._head, 1)
        self._wait(HEAD_SECONDS)

    def on_headers_complete(self) -> None:
        self._head = 0
        self._wait(BODY_SECONDS)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = 0
        self._stop_waiting()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        abort = partial(self.transport.abort)
        self._writing = self._writing or self.loop.call_later(WRITE_SECONDS, abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._writing is not None:
            self._writing.cancel()
        super().connection_lost(exc)

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: int, message: str) -> None:
        body = to_json(error_fields(status, message))
        head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\n"
        end = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(f"{head}{end}".encode() + body)
        self.transport.close()
