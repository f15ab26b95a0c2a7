"""Chat templates in their process: the text that transformers writes; templates that fail, never end or fill the memory;
and what rows say of templates: tools, and turns that are not trained."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dovetail.data.chat import Renderer
from dovetail.data.examples import load_prompts, load_score, load_sft
from dovetail.errors import DataError
from tests.unit.test_data import (
    ASSISTANT,
    CHATML,
    FORGETFUL,
    LIMITS,
    PLAIN,
    STRICT,
    USER,
    make_tokenizer,
    spelled,
    write,
)

SECONDS = 0.5  # of processor time for one rendering
DEEP = 5000
TOOLS = [{"type": "function", "function": {"name": "f", "description": "\u00fc < \u4e2d"}}]
ALL = "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ tools }}{{ messages }}{{ messages | tojson(indent=2) }}"
CHATS: tuple[list[dict[str, Any]], ...] = (
    [USER],
    [USER, ASSISTANT],
    [
        USER,
        {
            **ASSISTANT,
            "content": None,
            "tool_calls": [{"f": {"x": 1.5, "y": [None, True]}}],
            "reasoning": "so",
        },
    ],
    [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": " \U0001f642\\u00fc "}],
            "n": float("inf"),
        }
    ],
)


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    with Renderer(seconds=SECONDS, memory=1 << 27) as one:
        yield one


@pytest.mark.parametrize("template", [CHATML, FORGETFUL, ALL, {"default": CHATML, "tool_use": ALL}])
def test_the_text_is_that_of_transformers(template: Any, renderer: Renderer) -> None:
    tokenizer = make_tokenizer(bos=True, template=template)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<more>"]})
    tokenizer._set_model_specific_special_tokens({"image_token": "<image>"})
    for messages in CHATS:
        for options in ({}, {"add_generation_prompt": True}, {"tools": TOOLS}, {"tools": None}):
            expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            assert renderer.render(tokenizer, messages, **options) == expected
    options = {"continue_final_message": True}
    expected = make_tokenizer().apply_chat_template([USER, ASSISTANT], tokenize=False, **options)
    assert renderer.render(make_tokenizer(), [USER, ASSISTANT], **options) == expected


HOSTILE = {
    STRICT.replace(
        "!= 'user'", "!= 'nobody'"
    ): "refuses these messages: user first (line 1 of the template)",
    "{{ raise_exception('x' * 10**6) }}": "refuses these messages: "
    + "x" * 200
    + "... (1000000 characters)",
    "{{ raise_exception('\\x1b[2J\\ud800') }}": "refuses these messages: \\x1b[2J\\ud800 (line 1",
    "\n{{ messages[9].content }}": "refuses these messages: list object has no element 9 (line 2 of the template)",
    "{% for m in messages %}": "refuses these messages: Unexpected end of template.",
    "{{ 1 // (messages | length - 1) }}": "fails on these messages: ZeroDivisionError: ",
    "{{ (10.0 * messages | length) ** 400 }}": "fails on these messages: OverflowError: ",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}": "fails on these messages: RecursionError: ",
    "{{ " + "(" * DEEP + "1" + ")" * DEEP + " }}": "fails on these messages: ",
    "{{ '\\ud800' }}": "fails on these messages: UnicodeEncodeError: ",
    "{% include 'x' %}": "fails on these messages: TypeError: ",
    "{{ 'x' * 10**9 }}": "needs too much memory for these messages",
    "{{ '%999999999d' % 1 }}": "needs too much memory for these messages",
    "{% set s = namespace(x='xx') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}": "needs too much memory",
    "{% for i in range(5000) %}{{ 'x' * 1000 }}{% endfor %}": "writes 5000000 characters, more than 4194304 beyond",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "takes more than 0.5 s of",
    "{{ (10 ** (9 ** 9)) > 1 }}": "takes more than 0.5 s of",
}


@pytest.mark.parametrize(
    "template",
    [pytest.param(text, marks=[pytest.mark.soak] * ("9 ** 9" in text)) for text in HOSTILE],
)
def test_templates_that_fail_or_exceed_a_limit_are_refused(
    template: str, renderer: Renderer
) -> None:
    tokenizer = make_tokenizer(template=template)
    with pytest.raises(DataError) as caught:
        renderer.render(tokenizer, [USER])
    assert str(caught.value).startswith("the chat template " + HOSTILE[template])
    assert len(str(caught.value)) < 300
    assert renderer.render(make_tokenizer(), [USER]).startswith("<|im_start|>user")


def test_a_long_row_may_be_written_as_it_is(renderer: Renderer) -> None:
    """What bounds the output is what a template adds."""
    long = {"role": "user", "content": "x" * (5 << 20)}
    assert (
        renderer.render(make_tokenizer(), [long])
        == f"<|im_start|>user\n{long['content']}<|im_end|>\n"
    )


class Own(PreTrainedTokenizerFast):  # type: ignore[misc]
    """As code that comes with a model may render."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        return f"{len(conversation) // (len(conversation) - 1)} {options['add_generation_prompt']} {os.getpid()}"


def test_a_tokenizer_of_its_own_rendering_is_asked_here() -> None:
    tokenizer = Own(tokenizer_object=make_tokenizer().backend_tokenizer)
    with Renderer() as renderer:
        assert (
            renderer.render(tokenizer, [USER, USER], add_generation_prompt=True)
            == f"2 True {os.getpid()}"
        )
        with pytest.raises(
            DataError, match="the chat template fails on these messages: ZeroDivisionError"
        ):
            renderer.render(tokenizer, [USER], add_generation_prompt=True)


def test_the_process_ends_with_the_outermost_block() -> None:
    with Renderer() as renderer:
        with renderer:
            renderer.render(make_tokenizer(), [USER])
        process = renderer._process
        assert process is not None
        assert process.poll() is None
    assert process.returncode is not None
    assert not Path(f"/proc/{process.pid}").exists()


def test_turns_of_weight_0_are_not_trained(tmp_path: Path, renderer: Renderer) -> None:
    """As in OpenAI's format for fine-tuning."""
    wrong, right = (
        {**ASSISTANT, "content": text, "weight": weight}
        for text, weight in (("It is 5", 0), ("4", 1))
    )
    (row,) = load_sft(
        write(tmp_path, {"messages": [USER, wrong, USER, right, USER, ASSISTANT]}),
        PLAIN,
        LIMITS,
        renderer=renderer,
    )
    assert spelled(row.ids, row.mask) == "4<|im_end|>It is 4<|im_end|>"
    for weights, words in (
        ((0,), "without an assistant turn"),
        ((1, 0.5), "message 3 .* has the weight 0.5; expected 1"),
    ):
        turns = [turn for weight in weights for turn in (USER, {**ASSISTANT, "weight": weight})]
        with pytest.raises(DataError, match=f"rows.jsonl:1: .*{words}"):
            load_sft(write(tmp_path, {"messages": turns}), PLAIN, LIMITS, renderer=renderer)


@pytest.mark.parametrize("form", [list, json.dumps])
def test_tools_reach_the_chat_template(tmp_path: Path, form: Any, renderer: Renderer) -> None:
    tokenizer = make_tokenizer(template="{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML)
    tools = [
        {
            "type": "function",
            "function": {"name": "add", "parameters": {"x": {"type": "integer"}, "y": None}},
        }
    ]
    path = write(tmp_path, {"prompt": [USER], "completion": "4", "answer": 4, "tools": form(tools)})
    asked = tokenizer.apply_chat_template(
        [USER], tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert "integer" in asked
    for answers in (True, False):
        assert (
            spelled(
                load_prompts(path, tokenizer, LIMITS, answers=answers, renderer=renderer)[0].ids
            )
            == asked
        )
    assert spelled(load_score(path, tokenizer, LIMITS, renderer=renderer)[0].ids) == asked + "4"
    assert (
        spelled(load_sft(path, tokenizer, LIMITS, renderer=renderer)[0].ids)
        == asked + "4<|im_end|>"
    )
    (row,) = load_sft(
        write(tmp_path, {"messages": [USER, ASSISTANT], "tools": form(tools)}),
        tokenizer,
        LIMITS,
        renderer=renderer,
    )
    assert spelled(row.ids) == tokenizer.apply_chat_template(
        [USER, ASSISTANT], tools=tools, tokenize=False
    )
    assert spelled(row.ids, row.mask) == "It is 4<|im_end|>"


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([{"name": "add"}], "the row has tools, which the model's chat template does not write"),
        (["add"], r"tools must be a list of JSON schemas .*, not \["),
        ("add", 'tools must be .*, not "add"'),
        ("[" * 100_000, "tools must be"),
        (f"{'[' * 200}{']' * 200}", "tools must be"),
    ],
)
def test_tools_that_no_template_takes_are_refused(
    tmp_path: Path, tools: object, words: str, renderer: Renderer
) -> None:
    path = write(
        tmp_path,
        {"prompt": "a", "answer": 4, "tools": tools},
        {"prompt": [USER], "answer": 4, "tools": tools},
    )
    with pytest.raises(DataError, match=f"^{path}:2: {words}"):
        load_prompts(path, PLAIN, LIMITS, renderer=renderer)
