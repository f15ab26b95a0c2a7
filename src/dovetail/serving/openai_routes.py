"""OpenAI's endpoints for models, completions and chat completions."""

import secrets
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dovetail.sampler.base import SamplingParams
from dovetail.serving.bodies import EventStream, Json, RequestError, read_body
from dovetail.serving.bridge import SamplerBridge
from dovetail.serving.choices import Piece, pieces
from dovetail.serving.openai_answers import Answers, ChatAnswers, CompletionAnswers, usage
from dovetail.serving.openai_requests import ChatRequest, CompletionRequest, TextRequest
from dovetail.serving.rl_routes import banned_of, new_tokens
from dovetail.serving.served_request import ServedRequest
from dovetail.serving.text import Codec, Text, plain_message

COMPLETION_TOKENS = 16  # without max_tokens, as OpenAI's
CHAT_TOKENS = 4096  # at most, without max_tokens: a request reserves memory for all of them
STOP_INTERVAL = 8  # tokens between two looks for a stop string, where nothing is streamed


class OpenAIRoutes:
    """Endpoints of OpenAI's API. text: None for a model without a tokenizer. model: its name."""

    def __init__(self, sampler: SamplerBridge, text: Text | None, model: str) -> None:
        self._sampler = sampler
        self._sampler_server = sampler.sampler_server
        self._text = text
        self._model = model
        self._begun = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._one_model),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]

    async def _models(self, _: Request) -> Response:
        return Json({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return Json(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._begun,
            "owned_by": "dovetail",
            "root": self._model,
            "max_model_len": self._sampler_server.max_length,
        }

    def _check_model(self, model: str) -> None:
        if model != self._model:
            served = f"this server has {self._model!r}"
            raise RequestError(404, f"model {model!r} does not exist; {served}", param="model")

    async def _completions(self, request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        self._check_model(body.model)
        text = self._require_text()
        prompts = list[list[int]]()
        for prompt in body.prompts:
            prompts.append(await text.encode(prompt) if isinstance(prompt, str) else prompt)
        codec = await text.codec()
        most = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        samples = self._samples(body, prompts, most, codec)
        has_log_probs = body.logprobs is not None
        head = self._head("cmpl")
        answers = CompletionAnswers(head, codec.tokenizer, has_log_probs=has_log_probs)
        prompt_tokens = sum(len(ids) for ids in prompts)
        return await self._answer(body, samples, codec, answers, prompt_tokens)

    async def _chat(self, request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        self._check_model(body.model)
        text = self._require_text()
        messages = [plain_message(message.model_dump()) for message in body.messages]
        tools = None if body.tool_choice == "none" else body.tools
        ids = await text.encode_chat(messages, tools, body.chat_template_kwargs or {})
        codec = await text.codec()
        asked = body.max_completion_tokens or body.max_tokens
        most = asked or min(CHAT_TOKENS, new_tokens(self._sampler_server, ids, None))
        samples = self._samples(body, [ids], most, codec)
        answers = ChatAnswers(
            self._head("chatcmpl"),
            codec.tokenizer,
            has_log_probs=bool(body.logprobs),
            has_top=bool(body.top_logprobs),
        )
        return await self._answer(body, samples, codec, answers, len(ids))

    async def _answer(
        self,
        body: TextRequest,
        samples: Sequence[ServedRequest],
        codec: Codec,
        answers: Answers,
        prompt_tokens: int,
    ) -> Response:
        drawn = pieces(self._sampler, samples, codec, body.stop_strings)
        if body.stream:
            shows_usage = body.includes_usage
            return EventStream(_chunks(drawn, answers, len(samples), prompt_tokens, shows_usage))
        parts: list[list[Piece]] = [[] for _ in samples]
        async with aclosing(drawn):
            async for piece in drawn:
                parts[piece.index].append(piece)
        return Json(answers.whole(parts, prompt_tokens))

    def _samples(
        self,
        body: TextRequest,
        prompts: Sequence[Sequence[int]],
        most: int,
        codec: Codec,
    ) -> list[ServedRequest]:
        """Returns n requests for each prompt, which share its keys and values."""
        params = _params(body, most, codec, banned_of(body.logit_bias, self._sampler_server))
        interval = most
        if body.stream:
            interval = 1
        elif body.stop_strings:
            interval = STOP_INTERVAL
        samples = list[ServedRequest]()
        for row, ids in enumerate(prompts):
            new_tokens(self._sampler_server, ids, most)
            for number in range(body.n or 1):
                sample = ServedRequest(
                    ids=ids, params=params, row=row, sample=number, interval=interval
                )
                samples.append(sample)
        return samples

    def _require_text(self) -> Text:
        if self._text is None:
            missing = f"{self._model} has no tokenizer (tokenizer.json)"
            raise RequestError(400, f"{missing}; this server takes no text")
        return self._text

    def _head(self, kind: str) -> dict[str, Any]:
        """Fields of every answer. The fingerprint is the version of the weights."""
        return {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": f"weights-{self._sampler_server.version}",
        }


def _params(
    body: TextRequest,
    most: int,
    codec: Codec,
    banned: Sequence[int],
) -> SamplingParams:
    stops = tuple(body.stop_token_ids or ())
    return SamplingParams(
        max_new_tokens=most,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        stop_ids=stops if body.ignore_eos else (*stops, *codec.stops),
        banned_ids=tuple(sorted({*banned, *codec.banned})),
    )


async def _chunks(
    drawn: AsyncIterator[Piece],
    answers: Answers,
    choices: int,
    prompt_tokens: int,
    shows_usage: bool,
) -> AsyncIterator[Mapping[str, Any]]:
    """Chunks of a stream: of each choice one that opens it, and its pieces."""
    completion_tokens = 0
    for index in range(choices):
        opening = answers.opening(index)
        if opening is not None:
            yield opening
    async with aclosing(drawn):  # type: ignore[type-var]
        async for piece in drawn:
            completion_tokens += len(piece.ids)
            if piece.text or piece.finish or answers.has_log_probs:
                yield answers.chunk(piece)
    if shows_usage:
        yield answers.of_stream([]) | {"usage": usage(prompt_tokens, completion_tokens)}
