"""The endpoints that trainers call: samples by token ids, and pushes of weights."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dovetail.inference_servers.vllm import GENERATE, TITLE
from dovetail.sampler.base import SamplingParams
from dovetail.serving.bodies import Body, EventStream, Json, RequestError, read_body
from dovetail.serving.bridge import SamplerBridge
from dovetail.serving.rl_requests import (
    FinishRequest,
    GenerateRequest,
    InitRequest,
    Sampling,
    UpdateRequest,
)
from dovetail.serving.sampler_server import SamplerServer
from dovetail.serving.served_request import ServedRequest, ServedTokens
from dovetail.serving.trainers import Trainers

BODIES = (GenerateRequest, InitRequest, UpdateRequest, FinishRequest)


class RlRoutes:
    """Endpoints of trainers. eos: ids that end a sample unless a request has ignore_eos. version: of Dovetail."""

    def __init__(self, sampler: SamplerBridge, *, eos: Sequence[int], version: str) -> None:
        self._sampler = sampler
        self._sampler_server = sampler.sampler_server
        self._eos = eos
        self._version = version
        self._trainers = Trainers()
        self._joining = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            Route(GENERATE, self._generate, methods=["POST"]),
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/init_weight_transfer_engine", self._init, methods=["POST"]),
            Route("/start_weight_update", self._start_update, methods=["POST"]),
            Route("/update_weights", self._update, methods=["POST"]),
            Route("/finish_weight_update", self._finish_update, methods=["POST"]),
            Route("/health", self._health),
            Route("/version", self._show_version),
            Route("/server_info", self._server_info),
            Route("/is_paused", self._is_paused),
            Route("/get_world_size", self._world_size),
            Route("/weight_info", self._weight_info),
        ]

    async def _generate(self, request: Request) -> Response:
        body = await read_body(request, GenerateRequest)
        sample = sample_of(body, self._sampler_server, self._eos)
        if body.stream:
            return EventStream(self._replies(sample))
        async for reply in self._replies(sample):
            return Json(reply)
        raise RuntimeError("a sample without an event")

    async def _replies(self, sample: ServedRequest) -> AsyncIterator[dict[str, Any]]:
        async for _, event in self._sampler.events([sample]):
            yield reply_of(event)

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode != "keep":
            raise RequestError(400, f"/pause?mode={mode}: this server has mode=keep", param="mode")
        clear = request.query_params.get("clear_cache", "true") != "false"
        return await self._push(request, partial(self._sampler_server.pause, clear_cache=clear))

    async def _resume(self, request: Request) -> Response:
        return await self._push(request, self._sampler_server.resume)

    async def _init(self, request: Request) -> Response:
        body = await read_body(request, InitRequest)
        self._trainers.admit(request)
        async with self._joining:  # on a thread: samples go on meanwhile
            info = body.init_info.model_dump(exclude_none=True)
            await asyncio.to_thread(self._sampler_server.receiver.connect, info)
        return Json({"message": "done"})

    async def _start_update(self, request: Request) -> Response:
        return await self._push(request, self._sampler_server.start_update)

    async def _update(self, request: Request) -> Response:
        body = await read_body(request, UpdateRequest)
        info = body.update_info.model_dump(exclude_none=True)
        return await self._push(request, partial(self._sampler_server.update, info))

    async def _finish_update(self, request: Request) -> Response:
        body = await read_body(request, FinishRequest)
        return await self._push(
            request, partial(self._sampler_server.finish_update, body.weight_version)
        )

    async def _push(self, request: Request, work: partial[None] | Any) -> Response:
        self._trainers.admit(request)
        await self._sampler.call(work)
        return Json({"message": "done"})

    async def _health(self, _: Request) -> Response:
        return Json({})

    async def _show_version(self, _: Request) -> Response:
        return Json({"version": self._version})

    async def _server_info(self, _: Request) -> Response:
        # for vLLM's client, which then wants no cuts
        model_config = {"logprobs_mode": "processed_logprobs"}
        transfer = {"backend": "dovetail_nccl"}
        config = {"model_config": model_config, "weight_transfer_config": transfer}
        return Json({"vllm_config": config})

    async def _is_paused(self, _: Request) -> Response:
        return Json({"is_paused": self._sampler_server.paused})

    async def _world_size(self, _: Request) -> Response:
        return Json({"world_size": 1})

    async def _weight_info(self, _: Request) -> Response:
        return Json({"weight_version": self._sampler_server.version})


def sample_of(
    body: GenerateRequest, sampler_server: SamplerServer, eos: Sequence[int]
) -> ServedRequest:
    """Raises RequestError or ConfigError for what the server does not have."""
    asked = body.sampling_params
    extra = asked.extra_args
    noise = None if extra is None else extra.noise
    if noise is None:
        noise = (secrets.randbits(62) if asked.seed is None else asked.seed, 0, 0, 0)
    seed, step, row, sample = noise
    longest = new_tokens(sampler_server, body.token_ids, asked.max_tokens)
    stops = tuple(asked.stop_token_ids or ())
    params = SamplingParams(
        max_new_tokens=longest,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(0, asked.top_k),
        min_p=asked.min_p,
        seed=seed,
        step=step,
        stop_ids=stops if asked.ignore_eos else (*stops, *eos),
        banned_ids=banned_of(asked.logit_bias, sampler_server),
    )
    return ServedRequest(
        ids=body.token_ids,
        params=params,
        row=row,
        sample=sample,
        drawn=0 if extra is None else extra.drawn,
        batch=None if extra is None else extra.batch,
        interval=(asked.stream_interval or 1) if body.stream else longest,
    )


def new_tokens(sampler_server: SamplerServer, ids: Sequence[int], asked: int | None) -> int:
    """The largest number of tokens behind a prompt, whose ids are checked. None: all that fit."""
    last = sampler_server.sampler.spec.vocab_size - 1
    if not ids or max(ids) > last:
        expected = f"expected one or more ids of the vocabulary, 0 to {last}"
        raise RequestError(400, f"the prompt: {expected}", param="prompt")
    room = sampler_server.max_length - len(ids)
    if room < 1 or (asked is not None and asked > room):
        given = f"{len(ids)} prompt tokens and {1 if asked is None else asked} new ones"
        most = f"more than the {sampler_server.max_length} of this server"
        raise RequestError(400, f"{given} are {most}", param="max_tokens")
    return room if asked is None else asked


def banned_of(bias: Mapping[str, float] | None, sampler_server: SamplerServer) -> tuple[int, ...]:
    vocab_size = sampler_server.sampler.spec.vocab_size
    banned = tuple(int(token) for token in bias or ())
    wrong = [token for token in banned if token >= vocab_size]
    if wrong:
        expected = f"expected ids of the vocabulary, 0 to {vocab_size - 1}"
        raise RequestError(400, f"logit_bias has the id {wrong[0]}: {expected}", param="logit_bias")
    if len(set(banned)) == vocab_size:
        raise RequestError(400, "logit_bias bans the whole vocabulary", param="logit_bias")
    return banned


def reply_of(event: ServedTokens) -> dict[str, Any]:
    """As vLLM's."""
    drawn = zip(event.ids, event.log_probs, strict=True)
    content = [{"token_id": token, "logprob": log_prob} for token, log_prob in drawn]
    versions = [{"version": v, "start": start, "end": end} for v, start, end in event.versions]
    choice = {
        "index": 0,
        "finish_reason": event.finish,
        "token_ids": event.ids,
        "logprobs": {"content": content},
        "weight_versions": versions or None,
    }
    return {"choices": [choice]}


def described(routes: Sequence[Route], more: Sequence[type[Body]]) -> dict[str, Any]:
    """The OpenAPI description, in which clients look for endpoints and sampling parameters."""
    bodies = [(kind, "validation") for kind in (*BODIES, *more)]
    _, definitions = models_json_schema(
        bodies,  # type: ignore[arg-type]
        ref_template="#/components/schemas/{model}",
    )
    schemas = definitions["$defs"]
    fields = schemas["GenerateRequest"]["properties"]
    fields["sampling_params"] = schemas[Sampling.__name__]  # as vLLM's, without a reference
    paths = dict[str, dict[str, Any]]()
    for route in routes:
        methods = sorted(route.methods or ())
        paths[route.path] = {method.lower(): {} for method in methods}
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }
