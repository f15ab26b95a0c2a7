"""Hostile requests to `dovetail serve`, by class: bytes, and the statuses that may answer."""

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.parity_configs import VOCAB

KEY = "sk-quite-secret"
CLOSED = 0  # the server closes the connection without an answer
GENERATE, CHAT, COMPLETIONS = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
PUSHES = ("/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update",
          "/update_weights", "/finish_weight_update")  # fmt: skip
OTHERS = ("/v1/models", "/server_info", "/openapi.json", "/weight_info", "/nothing")
ODD: Sequence[Any] = (None, "x", "", -1, 0, 3, 1.5, True, [], ["x"], {}, {"x": 1}, [[1]], 10**40,
                      "7", "\u0000", "a" * 5000)  # fmt: skip
ROW = ["model.norm.weight", "float32", [2], 0, "0"]


@dataclass(frozen=True)
class Attack:
    kind: str
    name: str
    raw: bytes
    statuses: tuple[int, ...]


def post(
    path: str,
    body: object = None,
    *,
    key: str | None = f"Bearer {KEY}",
    headers: Mapping[str, object] | None = None,
    method: str = "POST",
) -> bytes:
    """A request. Bytes are sent as they are, other bodies as JSON."""
    data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
    fields = {"host": "x", "content-length": len(data), **(headers or {})}
    if key is not None:
        fields["authorization"] = key
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + data


def chunked(path: str, *chunks: bytes, end: bytes = b"0\r\n\r\n", key: str = KEY) -> bytes:
    headers = {"transfer-encoding": "chunked", "content-length": None}
    parts = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    return post(path, b"", headers=headers, key=f"Bearer {key}") + b"".join(parts) + end


def generate(**sampling: Any) -> bytes:
    return post(GENERATE, {"token_ids": [5], "sampling_params": sampling})


def update(**info: Any) -> bytes:
    bucket = {"bucket": 0, "num_bytes": 8, "tensors": [ROW], **info}
    return post("/update_weights", {"update_info": bucket})


def attacks(folder: Path) -> Iterator[Attack]:
    """folder: outside of the server's --push-dir."""
    for kind, found in (
        ("ill-typed", ill_typed()),
        ("not JSON", not_json()),
        ("huge", huge()),
        ("length", lengths()),
        ("chunked", chunks()),
        ("no key", without_key()),
        ("half-open", half_open()),
        ("head", heads()),
        ("push", pushes(folder)),
    ):
        for name, raw, statuses in found:
            yield Attack(kind, name, raw, statuses)


Cases = Iterator[tuple[str, bytes, tuple[int, ...]]]


def ill_typed() -> Cases:
    """Those that ended the server of before come first."""
    wrong: tuple[Any, ...] = ("abc", 1.5, [1], {})
    fields: list[dict[str, Any]] = [{"seed": value} for value in wrong]
    fields += [{"top_k": 1.5}]
    wrong = ("ab", [[1]], [{}], [10**40])
    fields += [{"stop_token_ids": value} for value in wrong]
    fields += [{"logit_bias": {name: -100}} for name in ("999999", "-99", str(VOCAB))]
    noises: list[Any] = [["a", 0, 0, 0], [0, 0, [1], 0], [0.5, 0, 0, 0], [0, 0, 1 << 70, 0]]
    noises += [[0, 0, 0, 1 << 70], [0, 0, 0], "noise"]
    fields += [{"extra_args": {"noise": noise}} for noise in noises]
    fields += [{"extra_args": {"drawn": value}} for value in ("x", [1], 1 << 70, -1)]
    fields += [{"extra_args": {"batch": value}} for value in ([[1], 2, 0], "abc", ["b", 0, 0])]
    fields += [{"max_tokens": value} for value in ("7", 2.5, True, 0, -1, 1 << 40)]
    fields += [{"temperature": value} for value in ("hot", -1, 1e308, [1], True)]
    fields += [{"top_p": 0}, {"min_p": 2}, {"logit_bias": [1]}, {"extra_args": [1]}, {"no": 1}]
    for field in fields:
        yield f"{GENERATE} {field}", generate(**field), (400,)
    streamed = {"token_ids": [5], "stream": True, "sampling_params": {"stream_interval": "z"}}
    yield "stream_interval z", post(GENERATE, streamed), (400,)
    others: tuple[Any, ...] = ("x", [1], 7)
    for params in others:
        body: dict[str, Any] = {"token_ids": [5], "sampling_params": params}
        yield f"sampling_params {params}", post(GENERATE, body), (400,)
    for ids in ([1.9], "123", {"1": 2}, [True], ["7"], [], [-1], [VOCAB], [10**40], None):
        yield f"token_ids {ids}", post(GENERATE, {"token_ids": ids}), (400,)
    for value in ODD:
        chat = {"model": "tiny", "messages": value}
        yield f"messages {str(value)[:20]}", post(CHAT, chat), (400,)
    for value in (*ODD[3:], [[VOCAB]], [[]]):
        prompt = {"model": "tiny", "prompt": value}
        yield f"prompt {str(value)[:20]}", post(COMPLETIONS, prompt), (400,)
    for value in ODD[1:]:
        yield f"model {str(value)[:20]}", post(COMPLETIONS, {"model": value}), (400, 404)


def not_json() -> Cases:
    deep = 100_000
    for name, body in (
        ("[[[", b"[" * deep),
        ("[[[]]]", b"[" * deep + b"]" * deep),
        ('{"a":{"a":', b'{"a":' * deep),
        ("deep token_ids", b'{"token_ids":' + b"[" * deep),
        ("deep message", b'{"model":"tiny","messages":[{"role":"user","x":' + b"[" * deep),
        ("infinity", b'{"token_ids":[1e999]}'),
        ("NaN", b'{"token_ids":[5],"sampling_params":{"temperature":NaN}}'),
        ("half a surrogate", b'{"token_ids":[5],"model":"\\ud800"}'),
        ("not UTF-8", b'{"token_ids":[5],"model":"\xff"}'),
        ("a list", b"[1]"),
        ("text", b"token_ids=5"),
        ("zeros", bytes(1000)),
        ("an open string", b'{"token_ids":[5],"model":"'),
    ):
        yield f"{GENERATE} {name}", post(GENERATE, body), (400,)
        yield f"{CHAT} {name}", post(CHAT, body), (400,)


def huge() -> Cases:
    gigabyte = {"content-length": 1 << 30}
    for path in (GENERATE, CHAT, "/update_weights", "/nothing"):
        yield f"{path} 1 GB announced", post(path, b"y" * 1000, headers=gigabyte), (413,)
    yield "/health 1 GB announced", post("/health", b"y", headers=gigabyte), (413,)
    ids = [1] * 300_000
    yield "more ids than fit", post(GENERATE, {"token_ids": ids}), (400,)
    message = {"role": "user", "content": "1" * 200_000}
    yield "a long message", post(CHAT, {"model": "tiny", "messages": [message]}), (400,)
    yield "a long number", post(GENERATE, b'{"token_ids":[' + b"9" * 100_000 + b"]}"), (400,)
    many = {"model": "tiny", "prompt": ["1"] * 1000}
    yield "many prompts", post(COMPLETIONS, many), (400,)
    yield "many choices", post(COMPLETIONS, {"model": "tiny", "prompt": "1", "n": 10**6}), (400,)
    names = {"token_ids": [5], **{f"x{n}": 1 for n in range(20_000)}}
    yield "many names", post(GENERATE, names), (400,)
    manifest = [["a", "float32", [1], "0"]] * 20_000
    info = {"update_info": {"manifest": manifest}}
    yield "a long manifest", post("/update_weights", info), (400,)


def lengths() -> Cases:
    for length in ("-1", "abc", str(10**20), "1e3", "0x10", "5, 6", "\u00c2\u00b2"):
        headers = {"content-length": length}
        yield f"length {length!a}", post(GENERATE, b"{}", headers=headers), (400, 413)
        open_path = post("/health", b"{}", headers=headers, key=None)
        yield f"/health length {length!a}", open_path, (400, 413)
    one, two = b"content-length: 2", b"content-length: 2\r\ncontent-length: 9"
    twice = post(GENERATE, b"{}").replace(one, two)
    yield "two lengths", twice, (400,)
    both = post(GENERATE, b"{}", headers={"transfer-encoding": "chunked"})
    yield "length and chunked", both, (400,)


def chunks() -> Cases:
    body = json.dumps({"token_ids": ["x"]}).encode()
    yield "in two parts", chunked(GENERATE, body[:5], body[5:]), (400,)
    yield "without the key", chunked(GENERATE, b"y" * 60_000, key="no"), (401,)
    yield "no end", chunked(GENERATE, b"y" * 60_000, end=b""), (CLOSED,)
    for size in (b"-1", b"zz", b"ffffffffffffffffff", b""):
        yield f"size {size!r}", chunked(GENERATE, end=size + b"\r\nyy\r\n"), (400, CLOSED)


def without_key() -> Cases:
    keys: tuple[str | None, ...] = (None, "", "Bearer", f"bearer {KEY}", KEY)
    keys += (f"Bearer {KEY[:-1]}", f"Bearer {KEY}x")
    keys += ("Bearer no", f"Basic {KEY}", f"Bearer  {KEY}", f"Bearer {KEY.upper()}")
    body = {"token_ids": [5]}
    for path in (GENERATE, CHAT, COMPLETIONS, *PUSHES, *OTHERS):
        method = "GET" if path in OTHERS else "POST"
        for key in keys:
            yield f"{path} {key}", post(path, body, key=key, method=method), (401,)
    first = {"authorization": "Bearer no", "Authorization": f"Bearer {KEY}"}
    yield "the key in the second header", post(GENERATE, body, key=None, headers=first), (401,)
    big = post(GENERATE, b"y" * 1000, key=None, headers={"content-length": 1 << 30})
    yield "a body that is not read", big, (401,)
    yield "a query", post(f"/is_paused?key={KEY}", key=None, method="GET"), (401,)
    yield "as /health", post("//health", key=None, method="GET"), (401,)
    yield "above /health", post("/health/../is_paused", key=None, method="GET"), (401,)


def half_open() -> Cases:
    whole = post(GENERATE, {"token_ids": [5]})
    yield "nothing", b"", (CLOSED,)
    yield "half a line", whole[:10], (CLOSED,)
    yield "half a head", whole[:40], (CLOSED,)
    yield "half a body", whole[:-5], (CLOSED,)
    keyless = post(GENERATE, b"", headers={"content-length": 9}, key="")
    yield "half a body without the key", keyless, (401,)
    expects = {"expect": "100-continue", "content-length": 9}
    yield "expects to be asked", post(GENERATE, b"", headers=expects), (100,)


def heads() -> Cases:
    yield "a long header", post(GENERATE, {}, headers={"x": "y" * 200_000}), (431, CLOSED)
    many = {f"x{n}": "y" * 50 for n in range(5000)}
    yield "many headers", post(GENERATE, {}, headers=many), (431, CLOSED)
    yield "a long path", post("/" + "a" * 200_000, method="GET"), (431, CLOSED)
    yield "a wrong name", post("/health", headers={"a b": 1}, method="GET"), (400,)
    yield "no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (400,)
    yield "a line alone", b"hello\r\n\r\n", (400,)
    yield "HTTP/9.9", post("/health", method="GET").replace(b"/1.1", b"/9.9"), (400,)
    upgrade = {"connection": "upgrade", "upgrade": "websocket"}
    yield "a websocket", post("/health", headers=upgrade, method="GET"), (200, 400)
    for method in ("PUT", "DELETE", "BREW", "OPTIONS"):
        yield f"{method}", post(GENERATE, {}, method=method), (405, 400)
    yield "no such path", post("/v1/embeddings", {}), (404,)
    yield "control characters", post("/%0d%0a%00x", method="GET"), (404,)


def pushes(folder: Path) -> Cases:
    secret = folder / "secret"
    for path in ("/dev/zero", "/etc/passwd", "/proc/self/environ", str(secret), "../../x", "a\0b"):
        yield f"file {path}", update(file=path), (400,)
    for path in ("/dev/zero", str(secret), "/proc/self/mem", "/proc/self/fd/0", "/proc/1/fd/999"):
        yield f"memory {path}", update(memory={"path": path}), (400,)
    for memory in ({}, {"path": 7}, {"device": "x"}, {"device": "x", "handle": "!"}, "x"):
        yield f"memory {memory}", update(memory=memory), (400,)
    for field, value in (
        ("num_bytes", 1 << 62), ("num_bytes", -1), ("num_bytes", "8"), ("bucket", "x"),
        ("bucket", 5), ("tensors", []), ("tensors", [[1]]), ("tensors", "x"),
        ("tensors", [["a", "Tensor", [2], 0, "0"]]), ("tensors", [["a", "float32", [-2], 0, "0"]]),
        ("tensors", [["a", "float32", [1 << 62, 1 << 62], 0, "0"]]), ("manifest", [[1]]),
    ):  # fmt: skip
        yield f"{field} {value}", update(**{field: value}), (400,)
    timeouts = [{"timeout": value} for value in (-1, "9", 1e400)]
    for info in ({}, *timeouts, {"master_address": "x"}):
        body = json.dumps({"init_info": info}).encode()
        yield f"init {info}", post("/init_weight_transfer_engine", body), (400,)
    for path in ("/update_weights", "/finish_weight_update", "/start_weight_update"):
        yield f"{path} without a body", post(path, b""), (400,)
    yield "resume with no update", post("/pause?mode=abort"), (400,)


def fuzzed(count: int, seed: int) -> Iterator[Attack]:
    """Valid requests with one to three odd values at random places."""
    rng = random.Random(seed)
    valid: tuple[tuple[str, dict[str, Any]], ...] = (
        (GENERATE, {"token_ids": [5, 6], "stream": False, "sampling_params": {
            "max_tokens": 2, "seed": 1, "temperature": 1.0, "top_p": 0.9, "top_k": 3, "min_p": 0.0,
            "stop_token_ids": [1], "logit_bias": {"3": -100}, "ignore_eos": True, "n": 1,
            "stream_interval": 4, "extra_args": {"noise": [1, 2, 3, 4], "drawn": 0, "batch": None},
        }}),
        (COMPLETIONS, {"model": "tiny", "prompt": "12", "max_tokens": 2, "n": 1, "stop": ["1"],
                       "logprobs": 0, "stream": False, "stream_options": {"include_usage": True}}),
        (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "12"}], "max_tokens": 2,
                "tools": [{"type": "function"}], "logprobs": True, "tool_choice": "auto"}),
        ("/update_weights", {"update_info": {"bucket": 0, "num_bytes": 8, "tensors": [ROW]}}),
        ("/init_weight_transfer_engine", {"init_info": {"timeout": 1.0}}),
        ("/finish_weight_update", {"weight_version": "3"}),
    )  # fmt: skip
    for number in range(count):
        path, body = rng.choice(valid)
        body = json.loads(json.dumps(body))
        for _ in range(rng.randint(1, 3)):
            _spoil(body, rng)
        raw = post(path, body)
        if rng.random() < 0.2:
            raw = _damaged(raw, rng)
        yield Attack("fuzzed", f"{number} {path}", raw, ())


def _spoil(value: Any, rng: random.Random) -> None:
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not places:
            return
        place = rng.choice(places)
        inner = value[place]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            value[place] = copy.deepcopy(rng.choice(ODD))
            return
        value = inner


def _damaged(raw: bytes, rng: random.Random) -> bytes:
    """With a few bytes that are changed, or less of them."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(1, len(data))] if rng.random() < 0.3 else data)
