"""The server's ASGI app: routes, errors, and the guard around them."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dovetail.errors import UserError, one_line, quoted
from dovetail.serving.bodies import Json, RequestError, error_fields
from dovetail.serving.bridge import SamplerBridge
from dovetail.serving.guard import Guard
from dovetail.serving.openai_requests import ChatRequest, CompletionRequest
from dovetail.serving.openai_routes import OpenAIRoutes
from dovetail.serving.rl_routes import RlRoutes, described
from dovetail.serving.text import Text


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a server is made of. model: its name for clients. eos: ids that end a sample of token ids. key: of clients."""

    model: str
    text: Text | None = None  # None: no endpoint takes text
    eos: Sequence[int] = ()
    key: str | None = None
    version: str = ""


def make_app(sampler: SamplerBridge, settings: Settings) -> ASGIApp:
    rl = RlRoutes(sampler, eos=settings.eos, version=settings.version)
    openai = OpenAIRoutes(sampler, settings.text, settings.model)
    routes = [*rl.routes(), *openai.routes()]
    description = described(routes, (CompletionRequest, ChatRequest))

    async def describe(_: Request) -> Response:
        return Json(description)

    async def not_found(request: Request, error: Exception) -> Response:
        """Lists what is served."""
        assert isinstance(error, HTTPException)
        served = [f"{_method(route)} {route.path}" for route in routes]
        asked = f"{request.method} {quoted(request.url.path)}"
        message = f"{error.detail}: {asked}; this server has {', '.join(served)}"
        return Json(error_fields(error.status_code, message), error.status_code)

    app = Starlette(
        routes=[*routes, Route("/openapi.json", describe)],
        exception_handlers={
            HTTPException: not_found,
            RequestError: _refused,
            UserError: _wrong,
            RuntimeError: _failed,
            OSError: _failed,
        },
    )
    app.router.redirect_slashes = False
    return Guard(app, settings.key)


def _method(route: Route) -> str:
    return "POST" if "POST" in (route.methods or ()) else "GET"


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return Json(error_fields(error.status, error.message, error.param), error.status)


async def _wrong(_: Request, error: Exception) -> Response:
    return Json(error_fields(400, str(error)), 400)


async def _failed(_: Request, error: Exception) -> Response:
    return Json(error_fields(500, one_line(error)), 500)
