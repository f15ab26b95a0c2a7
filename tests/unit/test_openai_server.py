"""OpenAI's endpoints of `dovetail serve`, asked by OpenAI's own client."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from dovetail.factory.serving import make_server
from dovetail.inference_servers.http import Client
from dovetail.serving.http_server import HttpServer, listen
from dovetail.serving.text import Detokenizer, StopStrings
from examples.tutorials.tiny import language_model
from tests.helpers.served import running
from tests.helpers.tolerances import MODEL_FP32, assert_close

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.x }}{% endfor %}=\n"
    "{% endfor %}{% if tools %}{{ tools | length }}*{% endif %}"
    "{% if sign %}{{ sign }}{% endif %}{% if add_generation_prompt %}+{% endif %}"
)
TOOL: ChatCompletionToolParam = {"type": "function", "function": {"name": "add"}}
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "1"},
    {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "3"}]},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("text")
    tokenizer = language_model(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    listener = listen("127.0.0.1", 0)
    made = make_server(str(folder), torch.device("cpu"), torch.float32, listener)
    with running(made):
        yield made


@pytest.fixture(scope="module")
def client(server: HttpServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def model(server: HttpServer) -> str:
    return server.settings.model


def test_a_completion_has_the_tokens_of_the_sampler(
    server: HttpServer,
    client: OpenAI,
    model: str,
) -> None:
    """Sample n of prompt r has the noise of (seed, 0, r, n)."""
    prompts = ["12+3=", "7*8="]
    found = client.completions.create(
        model=model, prompt=prompts, max_tokens=6, seed=5, n=2, logprobs=0, temperature=0.8
    )
    assert server.settings.text is not None
    codec = server.settings.text._codec
    bans = {str(token): -100 for token in codec.banned}
    for choice in found.choices:
        row, sample = divmod(choice.index, 2)
        noise = {"noise": [5, 0, row, sample]}
        sampling = {"max_tokens": 6, "temperature": 0.8, "logit_bias": bans, "extra_args": noise}
        body = {"token_ids": codec.tokenizer.encode(prompts[row]), "sampling_params": sampling}
        (expected,) = Client(server.url).post("/inference/v1/generate", body)["choices"]
        assert choice.text == codec.tokenizer.decode(expected["token_ids"])
        assert choice.logprobs is not None and choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.text_offset == [0, 1, 2, 3, 4, 5]
        log_probs = [token["logprob"] for token in expected["logprobs"]["content"]]
        assert choice.logprobs.token_logprobs is not None
        drawn = torch.tensor(choice.logprobs.token_logprobs)
        assert_close(drawn, torch.tensor(log_probs), MODEL_FP32)
    assert found.usage is not None and found.usage.prompt_tokens == 9
    assert found.usage.completion_tokens == 24
    assert len({choice.text for choice in found.choices}) == 4


def test_a_stream_is_the_answer_in_pieces(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "max_tokens": 9, "seed": 4, "n": 2}
    whole = client.completions.create(prompt="1+1=", **asked)
    asked_usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt="1+1=", **asked, **asked_usage))
    for choice in whole.choices:
        parts = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert len(parts) == 9 and "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    said = client.chat.completions.create(messages=MESSAGES, **asked)
    parts = list(client.chat.completions.create(messages=MESSAGES, **asked, stream=True))
    for said_choice in said.choices:
        every = [each for part in parts for each in part.choices]
        deltas = [each for each in every if each.index == said_choice.index]
        assert deltas[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in deltas) == said_choice.message.content
        assert deltas[-1].finish_reason == "length"


def test_a_chat_is_written_by_the_models_template(client: OpenAI, model: str) -> None:
    def prompt_tokens(messages: Any = MESSAGES, **more: Any) -> int:
        asked = {"model": model, "messages": messages, "max_completion_tokens": 1, **more}
        done = client.chat.completions.create(**asked)
        assert done.usage is not None and done.usage.completion_tokens == 1
        return done.usage.prompt_tokens

    assert prompt_tokens() == len("1=\n2\n3=\n+")
    assert prompt_tokens(tools=[TOOL]) == len("1=\n2\n3=\n1*+")
    assert prompt_tokens(tools=[TOOL], tool_choice="none") == len("1=\n2\n3=\n+")
    options = {"chat_template_kwargs": {"sign": "!!"}}
    assert prompt_tokens(extra_body=options) == len("1=\n2\n3=\n!!+")
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"x": 4567}'}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert prompt_tokens([turn]) == len("4567=\n+")


def test_stop_strings_end_a_text(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "1+1=", "max_tokens": 20, "seed": 4}
    text = client.completions.create(**asked).choices[0].text
    stop = text[9:12]
    cut = text[: text.index(stop)]
    ended = client.completions.create(**asked, stop=[stop, "no such"])
    assert ended.choices[0].text == cut and ended.choices[0].finish_reason == "stop"
    chunks = list(client.completions.create(**asked, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert client.completions.create(**asked, stop="no such").choices[0].text == text


def test_log_probs_are_of_the_tokens_drawn(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 4}
    done = client.chat.completions.create(
        **asked, logprobs=True, top_logprobs=1, temperature=0, extra_body={"ignore_eos": True}
    )
    assert done.choices[0].logprobs is not None and done.choices[0].logprobs.content is not None
    tokens = done.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == done.choices[0].message.content
    for token in tokens:
        assert bytes(token.bytes or ()).decode() == token.token and token.logprob < 0
        assert [top.logprob for top in token.top_logprobs] == [token.logprob]
    with pytest.raises(openai.BadRequestError, match="log-probs of the tokens that are drawn"):
        client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)


def test_the_models_that_are_served(client: OpenAI, model: str) -> None:
    (card,) = client.models.list().data
    assert card.id == model and client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError, match="model 'gpt' does not exist"):
        client.models.retrieve("gpt")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("model", "gpt", "does not exist"),
        ("prompt", "", "one or more ids"),
        ("prompt", [[99999]], "one or more ids of the vocabulary, 0 to"),
        ("max_tokens", "7", "valid integer, not '7'"),
        ("max_tokens", 4000, "more than the"),
        ("n", 129, "less than or equal to 128"),
        ("n", True, "valid integer, not True"),
        ("temperature", -1.0, "sampling temperature=-1"),
        ("stop", [""], "at least 1 character"),
        ("echo", True, "echo=True: this server has none"),
        ("suffix", "x", "suffix='x': this server has none"),
        ("presence_penalty", 0.5, "presence_penalty=0.5: this server has none"),
        ("logit_bias", {"1": 3.0}, "takes -100 alone"),
        ("logprobs", 5, "logprobs=5: this server has"),
        ("no_such", 1, "no_such=1: this server has none"),
    ],
)
def test_what_it_does_not_have_is_said(
    client: OpenAI,
    model: str,
    field: str,
    value: Any,
    says: str,
) -> None:
    body = {"model": model, "prompt": "1", field: value}
    with pytest.raises(openai.APIStatusError) as error:
        client.post("/completions", body=body, cast_to=object)
    assert error.value.status_code == (404 if field == "model" else 400)
    assert says in error.value.message and error.value.type == "invalid_request_error"


def test_an_unknown_path_lists_what_is_served(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.embeddings.create(model=model, input="x")
    assert "POST '/v1/embeddings'; this server has POST /inference" in error.value.message
    assert "POST /v1/chat/completions" in error.value.message
    with pytest.raises(openai.APIStatusError, match="Method Not Allowed: GET"):
        client.get("/completions", cast_to=object)


def test_text_comes_in_whole_characters() -> None:
    class Bytes:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            return bytes(ids).decode(errors="replace")

    text = "a\u20ac\U0001f600b\u00e9"
    detokenizer = Detokenizer(Bytes())
    pieces = [detokenizer.add([byte]) for byte in text.encode()]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    cut = Detokenizer(Bytes())
    assert cut.add([*"a\u20ac".encode()][:-1]) == "" and cut.end() == "a\ufffd"


def test_a_stop_string_is_found_across_pieces() -> None:
    for stop in ("</s>", "<<", "b<"):
        stops = StopStrings([stop, "zzz"])
        text = json.dumps("ab<<</s>c")
        found = "".join(stops.add(letter) for letter in text)
        assert found == text[: text.index(stop)] and stops.found
    late = StopStrings(["<<"])
    assert late.add("a<") == "a" and late.add("b<", last=True) == "<b<" and not late.found
