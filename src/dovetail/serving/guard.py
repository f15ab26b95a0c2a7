"""What every request passes before a handler sees it: key, sizes, and a line of the log."""

import asyncio
import contextlib
import hmac
import time
from collections.abc import Mapping
from datetime import datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.errors import shortened
from dovetail.launch.process import tell
from dovetail.serving.bodies import Json, RequestError, error_fields

MAX_BODY = 1 << 25  # bytes of a request
MAX_HELD = 1 << 28  # bytes of all requests that are not answered yet
SMALL_BODY = 1 << 16  # bytes that are read after a refusal, so that the client reads it
OPEN_PATHS = ("/health",)  # without a key
LEFT = 499  # status in the log: the client left


class Guard:
    """An ASGI app around another one. key: that clients must send."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = None if key is None else f"Bearer {key}".encode()
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        begun = time.monotonic()
        status = LEFT

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, noted)
        finally:
            _log(scope, status, time.monotonic() - begun)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: Mapping[bytes, bytes] = dict(reversed(scope["headers"]))  # the first of a name
        held = 0
        try:
            self._check_key(scope["path"], headers)
            length = _announced(headers)
            if length > MAX_BODY:
                raise RequestError(413, f"the body has {length} bytes, at most {MAX_BODY} are read")
            body = bytearray()
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message.get("body", b"")
                more = message.get("more_body", False)
                self._held += len(body) - held
                held = len(body)
                self._check_size(held)
            await self._run(scope, bytes(body), receive, send)
        except RequestError as error:
            await _refuse(error, headers, scope, receive, send)
        finally:
            self._held -= held

    def _check_key(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        if self._key is None or path in OPEN_PATHS:
            return
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._key):
            raise RequestError(401, "Unauthorized: send the server's key as a bearer token")

    def _check_size(self, length: int) -> None:
        if length > MAX_BODY:
            raise RequestError(413, f"the body has more than {MAX_BODY} bytes")
        if self._held > MAX_HELD:
            waiting = f"unanswered requests have more than {MAX_HELD} bytes"
            raise RequestError(503, f"{waiting}; try again")

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """The app, with a body that is read. It is cancelled if the client leaves."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def given() -> Message:
            return messages.pop() if messages else await asyncio.Future()

        answer = asyncio.ensure_future(self._app(scope, given, send))
        gone = asyncio.ensure_future(receive())  # nothing more is due
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answer
        finally:
            answer.cancel()
            gone.cancel()


def _announced(headers: Mapping[bytes, bytes]) -> int:
    length = headers.get(b"content-length", b"0")
    if not length.isdigit():
        raise RequestError(400, "content-length is not a whole number")
    return int(length[:20])


async def _refuse(
    error: RequestError,
    headers: Mapping[bytes, bytes],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """A connection whose body is large is closed, not read to its end."""
    answer = Json(error_fields(error.status, error.message, error.param), error.status)
    length = headers.get(b"content-length", b"0")
    chunked = b"transfer-encoding" in headers
    if chunked or not length.isdigit() or int(length[:20]) > SMALL_BODY:
        answer.headers["connection"] = "close"
    if error.status == 401:
        answer.headers["www-authenticate"] = "Bearer"
    await answer(scope, receive, send)


def _log(scope: Scope, status: int, seconds: float) -> None:
    now = datetime.now().isoformat(" ", "milliseconds")
    host, port = scope["client"] or ("-", 0)
    path = shortened(ascii(scope["raw_path"].decode("latin-1"))[1:-1])
    tell(f"{now} {host}:{port} {scope['method']} {path} {status} {seconds:.3f} s\n")
