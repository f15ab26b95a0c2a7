"""Stand-ins for the servers of vLLM and SGLang: their wire, strictly, with a language model of a few lines.

What they accept is the servers' own description: `vllm_openapi.json` is vLLM 0.32.0's /openapi.json for the paths that are
used, `sglang_messages.json` has the fields and types of SGLang 0.5.10.post1's message classes. No SGLang was ever run.
"""

import base64
import hashlib
import io
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from tests.helpers.json_schema import problems

HERE = Path(__file__).parent
VOCABULARY = 24
Logits = Callable[[Sequence[int]], Sequence[float]]
Experts = Callable[
    [Sequence[int]], Any
]  # of ids, each routed: an array [ids, layers, experts of a token]


def hashed_logits(ids: Sequence[int]) -> list[float]:
    """Of the token behind `ids`, by their last three."""
    digest = hashlib.sha256(repr(list(ids[-3:])).encode()).digest()
    return [byte / 64.0 for byte in digest[:VOCABULARY]]


def hashed_experts(ids: Sequence[int]) -> Any:
    """2 of 8 experts in each of 3 layers, the first of which is dense: a server leaves zeros there."""
    chosen = np.zeros((len(ids), 3, 2), np.uint8)
    for layer in (1, 2):
        first = (np.array(ids) * 3 + np.arange(len(ids)) + layer) % 8
        chosen[:, layer] = np.stack([first, (first + layer) % 8], axis=-1)
    return chosen


def as_npy(experts: Any) -> str:
    """vLLM's `numpy2base64`."""
    with io.BytesIO() as file:
        np.save(file, experts, allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()


def as_int32(experts: Any) -> str:
    """What SGLang's tokenizer manager writes."""
    return base64.b64encode(experts.astype(np.int32).tobytes()).decode()


def log_softmax(z: Sequence[float]) -> list[float]:
    peak = max(z)
    total = math.log(sum(math.exp(each - peak) for each in z)) + peak
    return [each - total for each in z]


class Refused(Exception):
    """With an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class FakeEngine:
    """A server on a port of its own. dies_after: tokens of a reply, after which every connection breaks."""

    kind: Literal["vllm", "sglang"] = "vllm"
    logits: Logits = hashed_logits
    experts: Experts | None = None
    log_probs: str = "processed_logprobs"
    transfer: str | None = "nccl"
    max_length: int = 256
    vocabulary: int = VOCABULARY
    key: str | None = None
    incremental: bool = True
    dev_mode: bool = True
    scale_out: bool = True
    stream_interval: int | None = None
    dies_after: int | None = None
    stalls_after: int | None = None
    version: str = "default"
    paused: bool = False
    asleep: bool | None = None  # None: started without --enable-sleep-mode
    failures: int = 0  # requests that are answered with 503
    requests: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)  # of sleep
    dead: bool = False

    def __enter__(self) -> Self:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version, disable_nagle_algorithm = (
                "HTTP/1.1",
                True,
            )  # which waits 40 ms for an acknowledgement

            def do_GET(self) -> None:
                self.answer(None)

            def do_POST(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                text = self.rfile.read(size)
                if len(text) < size:  # the client left before it had sent its request
                    self.close_connection = True
                    return
                self.answer(json.loads(text) if text else None)

            def answer(self, body: Any) -> None:
                if fake.dead:
                    self.close_connection = True
                    return
                try:
                    if (
                        fake.key is not None
                        and self.headers["authorization"] != f"Bearer {fake.key}"
                    ):
                        raise Refused(401, "Unauthorized")
                    reply = fake.reply(self.path.partition("?")[0], body)
                except Refused as error:
                    self.send(
                        error.status, {"error": {"message": str(error), "code": error.status}}
                    )
                    return
                if isinstance(reply, dict):
                    self.send(200, reply)
                else:
                    self.stream(reply)

            def send(self, status: int, reply: Any) -> None:
                text = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def stream(self, events: Iterator[dict[str, Any]]) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream; charset=utf-8")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                try:
                    for event in events:
                        self.chunk(f"data: {json.dumps(event)}\n\n".encode())
                    self.chunk(b"data: [DONE]\n\n")
                    self.chunk(b"")
                except OSError:
                    self.close_connection = True

            def chunk(self, data: bytes) -> None:
                if fake.dead:
                    raise ConnectionResetError
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def reply(self, path: str, body: Any) -> Any:
        """A JSON object, or the events of a stream."""
        if self.kind == "vllm":
            return self._vllm(path, body)
        return self._sglang(path, body)

    def _vllm(self, path: str, body: Any) -> Any:
        described = json.loads((HERE / "vllm_openapi.json").read_text())
        if not self.dev_mode:
            kept = ("/inference/v1/generate", "/version", "/v1/models", "/health")
            described["paths"] = {path: described["paths"][path] for path in kept}
        known = described["paths"] | {"/openapi.json": {}}
        if self.dev_mode:  # vllm/entrypoints/serve/dev/sleep/api_router.py of 0.33.0
            known |= {"/sleep": {}, "/wake_up": {}, "/is_sleeping": {}}
        if path not in known:
            raise Refused(404, "Not Found")
        if path == "/inference/v1/generate":
            if not self.scale_out:
                raise Refused(
                    403,
                    "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out.",
                )
            if self.asleep:
                raise Refused(500, "asleep: a real one would leave the request without an answer")
            self._check(body, {"$ref": "#/components/schemas/GenerateRequest"}, described)
            return self._vllm_reply(body)
        if path in ("/sleep", "/wake_up"):
            if self.asleep is None:
                raise Refused(500, "Sleep mode is not enabled.")
            self.asleep = path == "/sleep"
            self.calls.append(path)
            if not self.asleep:
                self.paused = False  # waking resumes
        config: dict[str, Any] = {
            "model_config": {"logprobs_mode": self.log_probs},
            "weight_transfer_config": None,
        }
        config["model_config"]["enable_sleep_mode"] = self.asleep is not None
        config["model_config"]["multimodal_config"] = {"mm_device_do_normalize": True}
        if self.transfer:
            config["weight_transfer_config"] = {"backend": self.transfer}
        config["aux_output_config"] = {
            "enable_return_routed_experts": self.experts is not None,
            "max_bytes": None,
        }
        card = {
            "id": "policy",
            "object": "model",
            "root": "policy",
            "max_model_len": self.max_length,
        }
        return {
            "/openapi.json": described,
            "/version": {"version": described["info"]["version"]},
            "/v1/models": {"object": "list", "data": [card]},
            "/server_info": {"vllm_config": config},
            "/is_paused": {"is_paused": self.paused},
            "/is_sleeping": {"is_sleeping": bool(self.asleep)},
        }.get(path, {})

    def _sglang(self, path: str, body: Any) -> Any:
        described = json.loads((HERE / "sglang_messages.json").read_text())
        if path == "/generate":
            self._check(body, {"$ref": "#/components/schemas/GenerateReqInput"}, described)
            return self._sglang_reply(body)
        card = {"id": "policy", "root": "policy", "max_model_len": self.max_length}
        replies: dict[str, Any] = {
            "/openapi.json": {"paths": {path: {} for path in described["paths"]}},
            "/model_info": {
                "model_path": "policy",
                "is_generation": True,
                "weight_version": self.version,
            },
            "/server_info": {
                "version": "0.5.10",
                "incremental_streaming_output": self.incremental,
                "enable_return_routed_experts": self.experts is not None,
            },
            "/v1/models": {"object": "list", "data": [card]},
            "/health": {},
        }
        if path not in replies:
            raise Refused(404, "Not Found")
        return replies[path]

    def _check(self, body: Any, schema: dict[str, Any], described: dict[str, Any]) -> None:
        self.requests.append(body)
        if wrong := list(problems(body, schema, described)):
            raise Refused(422, "; ".join(wrong))
        salt = body.get("cache_salt", "s")
        if not 0 < len(salt) <= 128 or set(salt) & set("@/\\\0"):
            raise Refused(
                400,
                f"Parameter 'cache_salt' has a character or a length that is not allowed: {salt!r}",
            )
        prompt = body.get("token_ids") or body["input_ids"]
        if max(prompt) >= self.vocabulary:
            raise Refused(400, f"Token id {max(prompt)} is out of vocabulary")
        asked = body["sampling_params"].get("max_tokens") or body["sampling_params"].get(
            "max_new_tokens"
        )
        if asked < 1 or len(prompt) + asked > self.max_length:
            raise Refused(
                400,
                f"{asked} tokens behind {len(prompt)} are not between 1 and {self.max_length} together",
            )
        if self.failures:
            self.failures -= 1
            raise Refused(503, "busy")

    def _vllm_reply(self, body: dict[str, Any]) -> Any:
        def events() -> Iterator[dict[str, Any]]:
            spans, begun, whole = list[dict[str, Any]](), 0, [*body["token_ids"]]
            drawn = self._drawn(body["token_ids"], body["sampling_params"], "max_tokens")
            for ids, log_probs, versions, finish in drawn:
                for version in versions:
                    if not spans or spans[-1]["version"] != version:
                        spans.append({"version": version, "start": begun, "end": begun})
                    begun += 1
                    spans[-1]["end"] = begun
                whole += ids
                content: list[dict[str, Any]] = [
                    {"token_id": token, "logprob": each, "rank": None, "top_logprobs": []}
                    for token, each in zip(ids, log_probs, strict=True)
                ]
                choice: dict[str, Any] = {
                    "index": 0,
                    "finish_reason": finish,
                    "stop_reason": None,
                    "token_ids": ids,
                }
                choice |= {
                    "logprobs": {"content": content},
                    "routed_experts": None,
                    "sampling_mask": None,
                }
                choice["weight_versions"] = spans if finish else None
                if finish and self.experts is not None:
                    choice["routed_experts"] = as_npy(self.experts(whole[:-1]))
                event: dict[str, Any] = {
                    "request_id": "r",
                    "output_mode": "tokens",
                    "choices": [choice],
                    "usage": None,
                }
                if body.get("return_token_ids") and begun == len(ids):
                    event["prompt_token_ids"] = self.expanded(body["token_ids"])
                yield event

        return (
            events()
            if body.get("stream")
            else {"choices": [event["choices"][0] for event in events()]}
        )

    def expanded(self, ids: list[int]) -> list[int]:
        """The prompt as the model reads it; with images the one that was sent."""
        return ids

    def _sglang_reply(self, body: dict[str, Any]) -> Any:
        def events() -> Iterator[dict[str, Any]]:
            every, scores = list[int](), list[list[Any]]()
            drawn = self._drawn(body["input_ids"], body["sampling_params"], "max_new_tokens")
            for ids, log_probs, _, finish in drawn:
                fresh = [[each, token, None] for token, each in zip(ids, log_probs, strict=True)]
                every, scores = every + ids, scores + fresh
                meta: dict[str, Any] = {
                    "id": "r",
                    "weight_version": self.version,
                    "completion_tokens": len(every),
                }
                meta["finish_reason"] = None if finish is None else {"type": finish}
                meta["output_token_logprobs"] = scores  # of all tokens, in any case
                if finish and self.experts is not None and body.get("return_routed_experts"):
                    meta["routed_experts"] = as_int32(
                        self.experts([*body["input_ids"], *every][:-1])
                    )
                if body.get("top_logprobs_num"):
                    meta["output_top_logprobs"] = [self._top(body, len(every) - 1)]
                yield {"output_ids": ids if self.incremental else every, "meta_info": meta}

        return events() if body.get("stream") else next(events())

    def _top(self, body: dict[str, Any], position: int) -> list[list[Any]]:
        assert position == 0
        warm = body["sampling_params"]["temperature"] if self.log_probs != "raw_logprobs" else 1.0
        scores = log_softmax([each / warm for each in self.logits(body["input_ids"])])
        return [
            [each, token, None]
            for token, each in sorted(enumerate(scores), key=lambda pair: -pair[1])[:8]
        ]

    def _drawn(
        self, prompt: Sequence[int], params: dict[str, Any], most: str
    ) -> Iterator[tuple[list[int], list[float], list[str], str | None]]:
        """Ids, log-probs and versions of an event, and how the reply ends."""
        noise = random.Random(params.get("seed", params.get("sampling_seed")))
        interval = self.stream_interval or params.get("stream_interval") or 1
        drawn, log_probs, versions, sent, finish = list[int](), list[float](), list[str](), 0, None
        while finish is None:
            version, returned, kept = self.turn([*prompt, *drawn], params)
            token = max(range(self.vocabulary), key=lambda i: kept[i])
            if params["temperature"] > 0:
                token = noise.choices(range(self.vocabulary), [math.exp(each) for each in kept])[0]
            drawn.append(token)
            log_probs.append(returned[token])
            versions.append(version)
            if token in params.get("stop_token_ids", ()):
                finish = "stop"
            elif len(drawn) == params[most]:
                finish = "length"
            if finish or len(drawn) - sent == interval:
                yield drawn[sent:], log_probs[sent:], versions[sent:], finish
                sent = len(drawn)
            if finish is None and len(drawn) == self.dies_after:
                self.dead = True
            if finish is None and len(drawn) == self.stalls_after:
                time.sleep(30)

    def turn(
        self, ids: Sequence[int], params: dict[str, Any]
    ) -> tuple[str, list[float], list[float]]:
        """The version of the weights, and `scores` by them."""
        return self.version, *self.scores(ids, params)

    def scores(self, ids: Sequence[int], params: dict[str, Any]) -> tuple[list[float], list[float]]:
        """Log-probs that are returned, and those that are drawn from."""
        z = list(self.logits(ids))
        warm = params["temperature"] or 1.0
        drawn = [each / warm for each in z]
        for token, bias in (params.get("logit_bias") or {}).items():
            drawn[int(token)] += bias
        kept = log_softmax(drawn)
        if 0 < params.get("top_k", 0) < self.vocabulary:
            floor = sorted(kept, reverse=True)[params["top_k"] - 1]
            kept = log_softmax([each if each >= floor else -1e9 for each in kept])
        if self.log_probs == "raw_logprobs":
            return log_softmax(z), kept
        return log_softmax([each / warm for each in z]) if self.kind == "sglang" else kept, kept
