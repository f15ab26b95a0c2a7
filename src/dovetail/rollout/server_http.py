"""The embedded sampler's server over HTTP: the part of vLLM's RL wire that `rollout/remote/vllm.py` speaks, and its statuses."""

import hmac
import json
import secrets
import select
import socket
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dovetail.errors import ConfigError, UserError, shortened
from dovetail.rollout.base import SamplingParams
from dovetail.rollout.remote.vllm import GENERATE, PUSH_PATHS, TITLE
from dovetail.rollout.remote.wire import NO_BIAS
from dovetail.rollout.served_sample import Event, Sample
from dovetail.rollout.server import SamplerServer

Events = Generator[Event, None, None]
Answer = dict[str, Any] | Events | None  # None: no such path
LOOK_SECONDS = 1.0  # between looks whether a waiting client is still there
BACKLOG = 1024  # connections that come at once
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "logit_bias",
    "stream_interval", "extra_args",
)  # fmt: skip
LACKING: Mapping[str, tuple[Any, ...]] = {  # sampling parameters, and values that ask for nothing
    "n": (1,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "stop": (None, "", []),
    "logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "detokenize": (True, False, None),
}


class HttpServer(ThreadingHTTPServer):
    """Listens from the start, and serves `engine`, which comes later.

    key: that clients must send. eos: ids that end a sample unless a request has ignore_eos.
    """

    engine: SamplerServer
    daemon_threads, request_queue_size = True, BACKLOG

    def __init__(
        self,
        address: tuple[str, int],
        *,
        model: str,
        eos: tuple[int, ...] = (),
        key: str | None = None,
        version: str = "",
    ) -> None:
        super().__init__(address, _Handler)
        self.model, self.eos, self.key, self.version = model, eos, key, version
        self.url = f"http://{address[0]}:{self.server_port}"

    def get(self, path: str) -> Answer:
        engine = self.engine
        card = {"id": self.model, "object": "model", "root": self.model, "max_model_len": engine.max_length}
        config = {
            "model_config": {"logprobs_mode": "processed_logprobs"}
        }  # for vLLM's client, which then wants no cuts
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "/health": dict,
            "/version": lambda: {"version": self.version},
            "/v1/models": lambda: {"object": "list", "data": [card]},
            "/server_info": lambda: {"vllm_config": {**config, "weight_transfer_config": {"backend": "dovetail_nccl"}}},
            "/is_paused": lambda: {"is_paused": engine.paused},
            "/get_world_size": lambda: {"world_size": 1},
            "/weight_info": lambda: {"weight_version": engine.version},
            "/openapi.json": _described,
        }
        return answers[path]() if path in answers else None

    def post(self, path: str, query: Mapping[str, str], body: Mapping[str, Any]) -> Answer:
        engine = self.engine
        calls: dict[str, Callable[[], None]] = {
            "/pause": lambda: self._pause(query),
            "/resume": engine.resume,
            "/init_weight_transfer_engine": lambda: engine.receiver.connect(body["init_info"]),
            "/start_weight_update": engine.start_update,
            "/update_weights": lambda: engine.update(body["update_info"]),
            "/finish_weight_update": lambda: engine.finish_update(str(body.get("weight_version"))),
        }
        if path not in calls:
            return None
        engine.call(calls[path])
        return {"message": "done"}

    def sample(self, body: Mapping[str, Any]) -> Sample:
        """Of a request. ConfigError for what it lacks, and for what this server does not have."""
        asked: Mapping[str, Any] = body.get("sampling_params") or {}
        for name, value in asked.items():
            if name not in SAMPLING and value not in LACKING.get(name, ()):
                raise ConfigError(f"sampling parameter {name}={shortened(repr(value))}: this server has none")
        ids, vocab_size = [*map(int, body["token_ids"])], self.engine.sampler.spec.vocab_size
        if not ids or min(ids) < 0 or max(ids) >= vocab_size:
            raise ConfigError(f"token_ids: expected ids of the vocabulary, 0 to {vocab_size - 1}, at least one")
        if wrong := {token: bias for token, bias in (asked.get("logit_bias") or {}).items() if bias > NO_BIAS}:
            raise ConfigError(
                f"logit_bias {shortened(repr(wrong))}: this server takes {NO_BIAS:g} alone, which bans an id"
            )
        most, extra = asked.get("max_tokens", 16), asked.get("extra_args") or {}
        most = self.engine.max_length - len(ids) if most is None else int(most)
        if len(ids) + most > self.engine.max_length:
            raise ConfigError(
                f"{len(ids)} prompt tokens and {most} new ones are more than the {self.engine.max_length} of this server"
            )
        seed = asked.get("seed")
        noise = extra.get("noise") or (secrets.randbits(62) if seed is None else seed, 0, 0, 0)
        params = SamplingParams(
            max_new_tokens=most,
            temperature=asked.get("temperature", 1.0),
            top_p=asked.get("top_p", 1.0),
            top_k=max(0, asked.get("top_k", 0)),
            min_p=asked.get("min_p", 0.0),
            seed=noise[0],
            step=noise[1],
            stop_ids=(*(asked.get("stop_token_ids") or ()), *(() if asked.get("ignore_eos") else self.eos)),
            banned_ids=tuple(map(int, asked.get("logit_bias") or ())),
        )
        batch, interval = extra.get("batch"), asked.get("stream_interval") if body.get("stream") else most
        return Sample(
            ids=ids,
            params=params,
            row=noise[2],
            sample=noise[3],
            drawn=extra.get("drawn", 0),
            batch=(batch[0], batch[1], batch[2]) if batch else None,
            interval=interval or 1,
        )

    def _pause(self, query: Mapping[str, str]) -> None:
        if query.get("mode") != "keep":
            raise ConfigError(f"/pause?mode={query.get('mode', 'abort')}: this server has mode=keep")
        self.engine.pause(clear_cache=query.get("clear_cache", "true") != "false")


def _described() -> dict[str, Any]:
    sampling: dict[str, Any] = {"type": "object", "properties": {name: {} for name in (*SAMPLING, *LACKING)}}
    fields = {"token_ids": {"type": "array"}, "sampling_params": sampling, "stream": {"type": "boolean"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE},
        "paths": {path: {} for path in (GENERATE, *PUSH_PATHS, "/health", "/version", "/v1/models", "/weight_info")},
        "components": {"schemas": {"GenerateRequest": {"type": "object", "properties": fields}}},
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    server: HttpServer

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client is gone
            super().handle()

    def do_GET(self) -> None:
        self._answer(lambda path, _: self.server.get(path))

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("content-length") or 0))
        self._answer(lambda path, query: self._post(path, query, json.loads(text) if text else {}))

    def _post(self, path: str, query: Mapping[str, str], body: Mapping[str, Any]) -> Answer:
        if not isinstance(body, dict):
            raise ConfigError("expected a JSON object")
        if path != GENERATE:
            return self.server.post(path, query, body)
        events = self._events(self.server.sample(body))
        return events if body.get("stream") else _reply(next(events))

    def _answer(self, work: Callable[[str, Mapping[str, str]], Answer]) -> None:
        parts, given = urlsplit(self.path), self.headers.get("authorization", "").encode()
        is_open = self.server.key is None or parts.path == "/health"
        try:
            if not (is_open or hmac.compare_digest(given, f"Bearer {self.server.key}".encode())):
                self._send(401, _error("Unauthorized"))
                return
            value = work(parts.path, {name: each[0] for name, each in parse_qs(parts.query).items()})
            if isinstance(value, Generator):
                self._stream(value)
            elif value is None:
                self._send(404, _error("Not Found"))
            else:
                self._send(200, value)
        except ConnectionError:  # the client is gone
            self.close_connection = True
        except (UserError, KeyError, IndexError, TypeError, ValueError) as error:
            self._send(400, _error(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"))
        except (RuntimeError, OSError) as error:
            self._send(500, _error(f"{type(error).__name__}: {error}"))

    def _stream(self, events: Events) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with closing(events):
            for event in events:
                self._chunk(f"data: {json.dumps(_reply(event))}\n\n")
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _send(self, status: int, value: Mapping[str, Any]) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _events(self, sample: Sample) -> Events:
        """The sample is aborted if nobody takes them to the end."""
        engine, finished = self.server.engine, False
        engine.submit(sample)
        try:
            while not finished:
                try:
                    event = sample.events.get(timeout=LOOK_SECONDS)
                except Empty:
                    if self._is_gone():
                        raise ConnectionResetError from None
                    continue
                finished = event.is_last
                if event.error is not None:
                    raise RuntimeError(f"the sample failed: {event.error}")
                yield event
        finally:
            if not finished:
                engine.abort(sample)

    def _is_gone(self) -> bool:
        waiting = select.poll()
        waiting.register(self.connection, select.POLLIN)
        return bool(waiting.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)

    def log_message(self, *_: object) -> None:
        pass


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


def _reply(event: Event) -> dict[str, Any]:
    """As vLLM's."""
    drawn = zip(event.ids, event.log_probs, strict=True)
    choice = {
        "index": 0,
        "finish_reason": event.finish,
        "token_ids": event.ids,
        "logprobs": {"content": [{"token_id": token, "logprob": log_prob} for token, log_prob in drawn]},
        "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in event.versions] or None,
    }
    return {"choices": [choice]}
