"""Chat templates: the text that transformers writes; templates that fail, or write without end;
and what rows say of templates: tools, and turns that are not trained."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dovetail.data.chat import render
from dovetail.data.examples import load_prompts, load_score, load_sft
from dovetail.errors import DataError
from tests.helpers.tokenizers import (
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


@pytest.mark.parametrize("template", [CHATML, FORGETFUL, ALL, {"default": CHATML, "tool_use": ALL}])
def test_the_text_is_that_of_transformers(template: Any) -> None:
    tokenizer = make_tokenizer(bos=True, template=template)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<more>"]})
    tokenizer._set_model_specific_special_tokens({"image_token": "<image>"})
    for messages in CHATS:
        for options in ({}, {"add_generation_prompt": True}, {"tools": TOOLS}, {"tools": None}):
            expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            assert render(tokenizer, messages, **options) == expected
    options = {"continue_final_message": True}
    expected = make_tokenizer().apply_chat_template([USER, ASSISTANT], tokenize=False, **options)
    assert render(make_tokenizer(), [USER, ASSISTANT], **options) == expected


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
    "{% for i in range(5000) %}{{ 'x' * 1000 }}{% endfor %}": "writes 5000000 characters, more than 4194304 beyond",
    "{{ ''.__class__.__mro__ }}": "refuses these messages: access to attribute '__class__' of 'str' object is unsafe",
    "{% set x = messages.append(1) %}": "refuses these messages: access to attribute 'append' of 'list' object is unsafe",
}


@pytest.mark.parametrize("template", HOSTILE)
def test_templates_that_fail_or_exceed_a_limit_are_refused(template: str) -> None:
    tokenizer = make_tokenizer(template=template)
    with pytest.raises(DataError) as caught:
        render(tokenizer, [USER])
    assert str(caught.value).startswith("the chat template " + HOSTILE[template])
    assert len(str(caught.value)) < 300
    assert render(make_tokenizer(), [USER]).startswith("<|im_start|>user")


def test_a_long_row_may_be_written_as_it_is() -> None:
    """What bounds the output is what a template adds."""
    long = {"role": "user", "content": "x" * (5 << 20)}
    assert render(make_tokenizer(), [long]) == f"<|im_start|>user\n{long['content']}<|im_end|>\n"


class Own(PreTrainedTokenizerFast):  # type: ignore[misc]
    """As code that comes with a model may render."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        return f"{len(conversation) // (len(conversation) - 1)} {options['add_generation_prompt']}"


def test_a_tokenizer_may_render_by_its_own_code() -> None:
    tokenizer = Own(tokenizer_object=make_tokenizer().backend_tokenizer)
    assert render(tokenizer, [USER, USER], add_generation_prompt=True) == "2 True"
    with pytest.raises(
        DataError, match="the chat template fails on these messages: ZeroDivisionError"
    ):
        render(tokenizer, [USER], add_generation_prompt=True)


def test_turns_of_weight_0_are_not_trained(tmp_path: Path) -> None:
    """As in OpenAI's format for fine-tuning."""
    wrong, right = (
        {**ASSISTANT, "content": text, "weight": weight}
        for text, weight in (("It is 5", 0), ("4", 1))
    )
    (row,) = load_sft(
        write(tmp_path, {"messages": [USER, wrong, USER, right, USER, ASSISTANT]}),
        PLAIN,
        LIMITS,
    )
    assert spelled(row.ids, row.mask) == "4<|im_end|>It is 4<|im_end|>"
    for weights, words in (
        ((0,), "without an assistant turn"),
        ((1, 0.5), "message 3 .* has the weight 0.5; expected 1"),
    ):
        turns = [turn for weight in weights for turn in (USER, {**ASSISTANT, "weight": weight})]
        with pytest.raises(DataError, match=f"rows.jsonl:1: .*{words}"):
            load_sft(write(tmp_path, {"messages": turns}), PLAIN, LIMITS)


@pytest.mark.parametrize("form", [list, json.dumps])
def test_tools_reach_the_chat_template(tmp_path: Path, form: Any) -> None:
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
        assert spelled(load_prompts(path, tokenizer, LIMITS, answers=answers)[0].ids) == asked
    assert spelled(load_score(path, tokenizer, LIMITS)[0].ids) == asked + "4"
    assert spelled(load_sft(path, tokenizer, LIMITS)[0].ids) == asked + "4<|im_end|>"
    (row,) = load_sft(
        write(tmp_path, {"messages": [USER, ASSISTANT], "tools": form(tools)}),
        tokenizer,
        LIMITS,
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
    tmp_path: Path, tools: object, words: str
) -> None:
    path = write(
        tmp_path,
        {"prompt": "a", "answer": 4, "tools": tools},
        {"prompt": [USER], "answer": 4, "tools": tools},
    )
    with pytest.raises(DataError, match=f"^{path}:2: {words}"):
        load_prompts(path, PLAIN, LIMITS)
