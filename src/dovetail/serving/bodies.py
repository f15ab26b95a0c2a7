"""Typed request bodies and answers. Bodies are strict: no text for a number, no unknown field."""

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail.errors import quoted

MAX_ERRORS = 5  # of a body, in a message
SSE_HEADERS: Mapping[str, str] = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class RequestError(Exception):
    """An answer other than 200. param: the field that is wrong."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_body(request: Request, kind: type[AnyBody]) -> AnyBody:
    """Reads a body; RequestError 400 names the fields that are wrong. An empty body is {}."""
    text = await request.body()
    try:
        return kind.model_validate_json(text or b"{}")
    except ValidationError as error:
        errors = error.errors(include_url=False)
        message = "; ".join(_described(each) for each in errors[:MAX_ERRORS])
        raise RequestError(400, message, param=_place(errors[0]) or None) from None


def _place(error: ErrorDetails) -> str:
    return ".".join(str(part) for part in error["loc"])


def _described(error: ErrorDetails) -> str:
    place = _place(error)
    if error["type"] == "extra_forbidden":
        return f"{place}={quoted(error['input'])}: this server has none"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] in ("missing", "value_error", "json_invalid"):
        return f"{place}: {message}" if place else message
    return f"{place}: {message}, not {quoted(error['input'])}"


def error_fields(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error, as OpenAI's."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


class Json(Response):
    """Sends one object."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class EventStream(Response):
    """Sends objects as server-sent events, then [DONE]. An error after the first is an event."""

    def __init__(self, events: AsyncIterator[Mapping[str, Any]]) -> None:
        super().__init__(media_type="text/event-stream", headers=SSE_HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                async for event in events:
                    await self._send(send, to_json(event))
        except RequestError as error:
            await self._send(send, to_json(error_fields(error.status, error.message)))
        await self._send(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, data: bytes) -> None:
        body = b"data: %s\n\n" % data
        await send({"type": "http.response.body", "body": body, "more_body": True})
