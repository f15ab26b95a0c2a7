"""A language model as judge: the server is a stand-in that speaks the OpenAI chat-completions interface."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import ConfigError
from dovetail.rewards.judge import fill
from dovetail.rewards.runner import CallLimits, RewardRunner
from dovetail.rewards.samples import RewardInput

KEY = "sk-secret-of-this-test"
Reply = tuple[int, Any]


class Server:
    """Answers each request by `reply(prompt, attempt)`."""

    def __init__(self, reply: Callable[[str, int], Reply]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                assert self.path == "/v1/chat/completions"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = body["messages"][0]["content"]
                server.requests.append(body)
                server.keys.add(self.headers.get("Authorization"))
                attempt = sum(
                    request["messages"] == body["messages"] for request in server.requests
                )
                status, text = reply(prompt, attempt)
                answer = (
                    {"choices": [{"message": {"role": "assistant", "content": text}}]}
                    if status == 200
                    else text
                )
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str, int], Reply]], Server]]:
    servers = []

    def start(reply: Callable[[str, int], Reply]) -> Server:
        servers.append(Server(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def scores(judge: dict[str, Any], texts: list[str], **limits: Any) -> list[Any]:
    inputs = [RewardInput(completion=text, answer="42", prompt="What is 6 x 7?") for text in texts]
    with RewardRunner(address=judge, timeout=30.0, limits=CallLimits(**limits)) as runner:
        return [result.error or result.value for result in runner.score(inputs)]


def settings(server: Server, **more: Any) -> dict[str, Any]:
    prompt = "{prompt} Answer {answer}; got {completion}; {braces}"
    return judge_settings(url=server.url, prompt=prompt, **more)


def judge_settings(request: Mapping[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    asked = {"model": "m", "max_tokens": 512, "temperature": 0.0, **(request or {})}
    address = {"key_env": None, "retries": 4, "request_seconds": 20.0}
    return {
        "prompt": "{completion}",
        "pattern": None,
        "scale": 1.0,
        "cache": None,
        **address,
        "request": asked,
        **given,
    }


def test_the_number_of_the_reply_is_the_reward(serve: Callable[..., Server]) -> None:
    server = serve(lambda prompt, _: (200, f"It says 42. Score: {8 if 'got 42' in prompt else 1}"))
    assert scores(
        settings(server, scale=10.0, request={"max_tokens": 7, "temperature": 0.5}), ["42", "41"]
    ) == [
        0.8,
        0.1,
    ]
    assert server.requests[0]["model"] == "m"
    assert (server.requests[0]["max_tokens"], server.requests[0]["temperature"]) == (7, 0.5)
    asked = {request["messages"][0]["content"] for request in server.requests}
    assert "What is 6 x 7? Answer 42; got 42; {braces}" in asked
    assert server.keys == {None}
    assert scores(settings(server, pattern=r"says (\d+)"), ["42"]) == [42.0]


def test_failures_that_may_pass_are_tried_again_and_others_are_not(
    serve: Callable[..., Server],
) -> None:
    server = serve(
        lambda prompt, attempt: (503, "busy") if "got x" in prompt and attempt < 3 else (200, "1")
    )
    assert scores(settings(server), ["x"]) == [1.0]
    assert len(server.requests) == 3
    refusing = serve(lambda *_: (401, {"error": f"bad key {KEY}"}))
    (error,) = scores(settings(refusing), ["x"])
    assert "HTTP 401" in error
    assert len(refusing.requests) == 1
    busy = serve(lambda *_: (429, "slow down"))
    (error,) = scores(settings(busy, retries=1), ["x"])
    assert "HTTP 429" in error and "(2 attempts)" in error


@pytest.mark.parametrize(
    ("reply", "words"),
    [("no verdict", "holds no number"), ("", "holds no number")],
)
def test_a_reply_without_a_number_is_an_error_of_its_sample(
    serve: Callable[..., Server], reply: str, words: str
) -> None:
    server = serve(lambda prompt, _: (200, reply if "got bad" in prompt else "1"))
    bad, good = scores(settings(server), ["bad", "good"])
    assert words in bad
    assert good == 1.0


def test_the_key_is_sent_and_shown_nowhere(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    cache = tmp_path / "cache.sqlite"
    server = serve(
        lambda prompt, _: (401, {"error": f"bad key {KEY}"}) if "got x" in prompt else (200, "1")
    )
    judge = settings(server, key_env="JUDGE_KEY", cache=str(cache))
    error, value = scores(judge, ["x", "y"])
    assert value == 1.0
    assert "bad key ***" in error and KEY not in error
    assert server.keys == {f"Bearer {KEY}"}
    assert KEY.encode() not in cache.read_bytes()
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="the environment variable JUDGE_KEY"):
        scores(judge, [])


def test_replies_are_kept_for_equal_requests(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(lambda *_: (200, "3"))
    judge = settings(server, cache=str(tmp_path / "sub" / "cache.sqlite"))
    assert scores(judge, ["a", "b"], workers=2) == [3.0, 3.0]
    assert scores(judge, ["a", "b", "c"], workers=2) == [3.0, 3.0, 3.0]
    assert len(server.requests) == 3
    assert scores(judge | {"request": {"model": "another"}}, ["a"]) == [3.0]
    assert len(server.requests) == 4, "another model is another request"


def test_an_address_without_a_server_is_named() -> None:
    (error,) = scores(judge_settings(url="http://127.0.0.1:9/v1", retries=0), ["x"])
    assert "the server at http://127.0.0.1:9/v1: " in error


def test_a_pattern_that_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward.judge.pattern '\(' is no regular expression"):
        scores(judge_settings(url="http://127.0.0.1:9/v1", pattern="("), [])


def test_fill() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    sample = {"prompt": chat, "completion": "{answer}", "answer": 5, "columns": {"level": 3}}
    assert (
        fill("{prompt}|{completion}|{answer}|{level}|{other}|{}", sample)
        == "user: hi\nassistant: |{answer}|5|3|{other}|{}"
    )
