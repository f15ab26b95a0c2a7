"""Rows to tokens with a byte-level tokenizer made here: prompts, masks, chat templates, limits and refusals."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dovetail.batch.packed import PackedBatch
from dovetail.data import examples
from dovetail.data.examples import Limits
from dovetail.data.files import needs_text, read_rows
from dovetail.errors import DataError
from dovetail.factory.tokenizer import banned_ids
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

load_prompts = examples.load_prompts
load_sft = examples.load_sft
load_score = examples.load_score


def test_a_string_prompt_is_tokenized_as_it_is(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "4 + 5 =", "answer": 9, "level": 2},
        "",
        {"prompt": "a", "answer": ["c"], "id": "x"},
    )
    first, second = load_prompts(path, PLAIN, LIMITS)
    assert spelled(first.ids) == "4 + 5 ="
    assert (first.id, first.answer, first.prompt, dict(first.columns)) == (
        0,
        9,
        "4 + 5 =",
        {"level": 2},
    )
    assert (second.id, second.ids, second.answer) == ("x", (PLAIN.encode("a")[0],), ["c"])


@pytest.mark.parametrize("prompt", ["hi", "<s>hi"])
def test_bos_comes_once_and_eos_never(tmp_path: Path, prompt: str) -> None:
    (row,) = load_prompts(
        write(tmp_path, {"prompt": prompt, "answer": 1}), make_tokenizer(bos=True), LIMITS
    )
    assert spelled(row.ids) == "<s>hi"


def test_messages_go_through_the_template(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": [USER], "answer": 4},
        {"prompt": [USER, {**ASSISTANT, "content": "It is"}], "answer": 4},
    )
    asked, continued = load_prompts(path, make_tokenizer(bos=True), LIMITS)
    assert spelled(asked.ids) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert (
        spelled(continued.ids) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nIt is"
    )


def test_parts_of_text_are_written_as_text(tmp_path: Path) -> None:
    """Templates of models that read text only would write the list itself."""
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?", "image": None}],
    }
    path = write(tmp_path, {"prompt": [parts], "answer": 4}, {"prompt": [USER], "answer": 4})
    given, plain = load_prompts(path, PLAIN, LIMITS)
    assert (given.ids, given.prompt) == (plain.ids, plain.prompt)
    for part in ({"type": "text"}, {"type": "audio", "audio": "a.wav"}, "2+2?"):
        path = write(tmp_path, {"prompt": [{"role": "user", "content": [part]}], "answer": 4})
        with pytest.raises(
            DataError, match=r'rows.jsonl:1: a content part is .*; expected \{"type": "text"'
        ):
            load_prompts(path, PLAIN, LIMITS)


@pytest.mark.parametrize("content", [{"content": None}, {}], ids=["null", "none"])
def test_a_message_of_tool_calls_alone_needs_no_content(
    content: dict[str, None], tmp_path: Path
) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content or m.tool_calls[0].name }}<|im_end|>{% endfor %}"
    call = {"role": "assistant", **content, "tool_calls": [{"name": "add"}]}
    path = write(tmp_path, {"prompt": [USER, call, {"role": "tool", "content": "4"}], "answer": 1})
    (prompt,) = load_prompts(path, make_tokenizer(template=template), LIMITS)
    assert (
        spelled(prompt.ids)
        == "<|im_start|>2+2?<|im_end|><|im_start|>add<|im_end|><|im_start|>4<|im_end|>"
    )


def test_rows_to_generate_from_need_no_answer(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, {"input_ids": [5, 6], "id": "ids"})
    text, ids = load_prompts(path, PLAIN, LIMITS, answers=False)
    assert text.ids == tuple(PLAIN.encode("a"))
    assert (ids.id, ids.ids) == ("ids", (5, 6))
    (alone,) = load_prompts(write(tmp_path, {"input_ids": [5]}), None, LIMITS, answers=False)
    assert alone.ids == (5,)


def test_a_null_is_a_key_that_is_not_there(tmp_path: Path) -> None:
    """As a table of unlike rows has it."""
    text, ids = (
        {"prompt": "a", "completion": "b", "input_ids": None, "messages": None},
        {"prompt": None, "input_ids": [5]},
    )
    path = write(tmp_path, text, ids)
    assert needs_text(path)
    assert [row.ids for row in load_prompts(path, PLAIN, LIMITS, answers=False)] == [
        tuple(PLAIN.encode("a")),
        (5,),
    ]
    assert [row.ids for row in load_score(path, PLAIN, LIMITS)] == [tuple(PLAIN.encode("ab")), (5,)]
    (row,) = load_sft(write(tmp_path, text), PLAIN, LIMITS)
    assert spelled(row.ids, row.mask) == "b<|im_end|>"


def test_a_null_in_a_message_is_a_key_that_is_not_there(tmp_path: Path) -> None:
    """Templates ask whether a message has calls, and then for their number; transformers 5.17 leaves them the null."""
    calls = "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }} calls{% endif %}{% endfor %}"
    rows = [
        {"prompt": [{**USER, "tool_calls": None, "name": None}], "answer": 4},
        {"prompt": [USER], "answer": 4},
    ]
    unlike, alike = load_prompts(
        write(tmp_path, *rows), make_tokenizer(template=calls + CHATML), LIMITS
    )
    assert (unlike.ids, unlike.prompt) == (alike.ids, [USER])


@pytest.mark.parametrize("prompt", ["2+2?", [USER]])
def test_sft_trains_the_completion_and_one_eos(tmp_path: Path, prompt: object) -> None:
    (row,) = load_sft(
        write(tmp_path, {"prompt": prompt, "completion": " 4"}), make_tokenizer(bos=True), LIMITS
    )
    start = (
        "<s>2+2?"
        if prompt == "2+2?"
        else "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert spelled(row.ids) == start + " 4<|im_end|>"
    assert spelled(row.ids, row.mask) == " 4<|im_end|>"
    assert row.mask is not None
    assert list(row.mask) == sorted(row.mask), "the trained tokens come last"


def test_an_eos_that_the_row_writes_is_the_only_one(tmp_path: Path) -> None:
    (row,) = load_sft(
        write(tmp_path, {"prompt": "2+2?", "completion": " 4<|im_end|>"}), PLAIN, LIMITS
    )
    assert spelled(row.ids) == "2+2? 4<|im_end|>"
    assert spelled(row.ids, row.mask) == " 4<|im_end|>"


def test_an_eos_inside_a_completion_is_not_its_end(tmp_path: Path) -> None:
    (row,) = load_sft(
        write(tmp_path, {"prompt": "2+2?", "completion": " 4<|im_end|> and 5"}), PLAIN, LIMITS
    )
    assert spelled(row.ids) == "2+2? 4<|im_end|> and 5<|im_end|>"
    assert spelled(row.ids, row.mask) == " 4<|im_end|> and 5<|im_end|>"


def test_completions_that_are_marked_as_bad_are_not_trained(tmp_path: Path) -> None:
    """TRL's unpaired preferences; a column of that name with other values is the user's own."""
    row = {"prompt": "a", "completion": "b", "answer": 1}
    path = write(tmp_path, {**row, "label": True}, {**row, "label": 0}, {**row, "label": False})
    with pytest.raises(DataError, match=r"rows.jsonl:3: label is false, .* leave such rows out"):
        load_sft(path, PLAIN, LIMITS)
    assert [prompt.columns["label"] for prompt in load_prompts(path, PLAIN, LIMITS)] == [
        True,
        0,
        False,
    ]
    assert len(load_score(path, PLAIN, LIMITS)) == 3


@pytest.mark.parametrize("prompt", ["2+2=", "2+2", ""])
@pytest.mark.parametrize("completion", ["4", " 4", "=4"])
def test_no_space_comes_between_a_prompt_and_its_completion(
    tmp_path: Path, prompt: str, completion: str
) -> None:
    """Tokenizers such as Llama 2's put a space in front of every text; those of the second prompt merge it with `=4`."""
    pieces = ["<unk>", "</s>", "\u2581", "2", "+", "=", "4", "\n", "2=", "\u25812", "\u25814"]
    merges = [("2", "="), ("\u2581", "2"), ("\u2581", "4")]
    inner = Tokenizer(
        models.BPE(vocab={x: i for i, x in enumerate(pieces)}, merges=merges, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    path = write(tmp_path, {"prompt": prompt, "completion": completion})
    (scored,), (trained,) = load_score(path, tokenizer, LIMITS), load_sft(path, tokenizer, LIMITS)
    assert scored.ids == tuple(trained.ids[:-1])
    assert tokenizer.decode(scored.ids) == (prompt + completion).removeprefix(" ")


def test_sft_with_nothing_before_or_nothing_after(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "", "completion": "ab"}, {"prompt": "ab", "completion": ""})
    bare, silent = load_sft(path, PLAIN, LIMITS)
    assert spelled(bare.ids, bare.mask) == "ab<|im_end|>"
    assert spelled(silent.ids, silent.mask) == "<|im_end|>"
    batch = PackedBatch.pack([silent, bare])
    assert batch.mask.tolist() == [False, True, False, True, True, False], (
        "nothing predicts a sequence's first token"
    )
    assert spelled(batch.targets[batch.mask].tolist()) == "<|im_end|>b<|im_end|>"


def test_conversations_train_the_assistant_turns_only(tmp_path: Path) -> None:
    second = {"role": "assistant", "content": "You said: assistant\n"}
    path = write(
        tmp_path, {"messages": [{"role": "system", "content": "s"}, USER, ASSISTANT, USER, second]}
    )
    (row,) = load_sft(path, PLAIN, LIMITS)
    assert spelled(row.ids, row.mask) == "It is 4<|im_end|>You said: assistant\n<|im_end|>"
    whole = PLAIN.apply_chat_template(
        [{"role": "system", "content": "s"}, USER, ASSISTANT, USER, second], tokenize=False
    )
    assert spelled(row.ids) == whole
    assert row.mask is not None
    runs = "".join("x" if m else " " for m in row.mask).split()
    assert len(runs) == 2, "the mask has a hole between the turns"


def test_a_template_without_eos_trains_the_whole_turn(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(eos="</s>")
    (row,) = load_sft(write(tmp_path, {"messages": [USER, ASSISTANT]}), tokenizer, LIMITS)
    assert spelled(row.ids, row.mask) == "It is 4<|im_end|>\n"


def test_a_conversation_that_an_assistant_opens_trains_no_header(tmp_path: Path) -> None:
    """Nor what a template says before a conversation without a system message."""
    system = (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    )
    path = write(tmp_path, {"messages": [ASSISTANT, USER, ASSISTANT]})
    (row,) = load_sft(path, make_tokenizer(template=system + CHATML), LIMITS)
    assert spelled(row.ids).startswith(
        "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>assistant\nIt is 4"
    )
    assert spelled(row.ids, row.mask) == "It is 4<|im_end|>It is 4<|im_end|>"


def test_a_generation_prompt_that_no_turn_has_is_named(tmp_path: Path) -> None:
    thinking = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    with pytest.raises(
        DataError,
        match=r"rows.jsonl:1: message 1 \(assistant\).*opens a turn with a generation prompt",
    ):
        load_sft(
            write(tmp_path, {"messages": [USER, ASSISTANT]}),
            make_tokenizer(template=thinking),
            LIMITS,
        )


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path, {"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT, USER, ASSISTANT]}
    )
    with pytest.raises(
        DataError, match=r"rows.jsonl:2: message 1 \(assistant\).*writes this turn differently"
    ):
        load_sft(path, make_tokenizer(template=FORGETFUL), LIMITS)


def test_ids_that_the_tokenizer_lacks_are_banned_and_no_others() -> None:
    """Also where its ids have holes, so that they go further than they are many."""
    inner = Tokenizer(
        models.WordLevel(vocab={"a": 0, "b": 1, "</s>": 2, "c": 5, "d": 7}, unk_token="a")
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    source: Any = SimpleNamespace(spec=SimpleNamespace(vocab_size=10))
    assert banned_ids(source, tokenizer, None, [2, 9]) == (3, 4, 6, 8)
    assert banned_ids(source, PLAIN, None, []) == ()


def test_score_rows(tmp_path: Path) -> None:
    path = write(tmp_path, {"input_ids": [9]}, {"prompt": "a", "completion": "b", "id": 7})
    given, text = load_score(path, make_tokenizer(bos=True), LIMITS)
    assert (given.id, given.ids) == (0, (9,))
    assert (text.id, spelled(text.ids)) == (7, "<s>ab")


@pytest.mark.parametrize(
    ("loader", "row", "words"),
    [
        (load_prompts, "{not json", "not JSON .*one JSON object"),
        (load_prompts, '{"prompt": ', r"not JSON .*line 1 column 11 \(char 10\)"),
        (load_prompts, "[" * 100000, "more than 100 deep; make it flat"),
        (
            load_prompts,
            {"x": json.loads("[" * 100 + "]" * 100)},
            "more than 100 deep; make it flat",
        ),
        (load_prompts, "[1]", "a list, not a JSON object"),
        (load_prompts, {"prompt": "a"}, r"lacks 'answer' \(it has 'prompt'\)"),
        (load_prompts, {"text": "a"}, "lacks 'prompt', 'answer'"),
        (load_prompts, {"prompt": "", "answer": 1}, "the row has no tokens"),
        (load_prompts, {"prompt": 3, "answer": 1}, "prompt must be a string or messages"),
        (load_prompts, {"prompt": [], "answer": 1}, "prompt must be a string or messages"),
        (
            load_prompts,
            {"prompt": [{"role": "user"}], "answer": 1},
            "prompt must be a string or messages",
        ),
        (load_sft, {"prompt": "a"}, "lacks 'completion'"),
        (load_sft, {"prompt": "a", "completion": 1}, "completion must be a string, not 1"),
        (load_sft, {"messages": [USER]}, "without an assistant turn"),
        (load_sft, {"messages": "hello"}, "messages must be messages"),
        (load_sft, {"messages": None}, "messages must be messages .*not null"),
        (
            load_sft,
            {"messages": [{**USER, "content": 5}, ASSISTANT]},
            "message 0 has the content 5; expected a string",
        ),
        (
            load_sft,
            {"messages": [USER, {**ASSISTANT, "content": None}]},
            "message 1 has the content null; expected",
        ),
        (load_score, {"input_ids": []}, "has no tokens"),
        (load_score, {"input_ids": [1.5]}, "list of integers"),
        (load_score, {"input_ids": [True]}, "list of integers"),
        (load_score, {"input_ids": [3, 260]}, "token id 260 lies outside .*vocabulary of 260"),
        (load_score, {"input_ids": [-1]}, "token id -1 lies outside"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, loader: Any, row: object, words: str) -> None:
    good = {"prompt": "a", "answer": 1, "completion": "b"}
    with pytest.raises(DataError, match=r"(?s)rows\.jsonl:3: .*" + words):
        loader(write(tmp_path, good, "", row), PLAIN, LIMITS)


def test_mistakes_with_the_tokenizer(tmp_path: Path) -> None:
    chat, text = {"prompt": [ASSISTANT, USER], "answer": 1}, {"prompt": "a", "completion": "b"}
    with pytest.raises(DataError, match=":1: messages need a chat template"):
        load_prompts(write(tmp_path, chat), make_tokenizer(template=None), LIMITS)
    with pytest.raises(DataError, match=":1: the chat template refuses these messages: user first"):
        load_prompts(write(tmp_path, chat), make_tokenizer(template=STRICT), LIMITS)
    with pytest.raises(DataError, match=":1: text needs a tokenizer"):
        load_score(write(tmp_path, text), None, LIMITS)
    with pytest.raises(DataError, match="no EOS token"):
        load_sft(write(tmp_path, text), make_tokenizer(eos=None), LIMITS)


def test_empty_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        load_score(write(tmp_path, "", ""), None, LIMITS)
    with pytest.raises(DataError, match="no such data file"):
        load_score(tmp_path / "absent.jsonl", None, LIMITS)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DataError, match=r"latin\.jsonl:1: not JSON"):
        list(read_rows(tmp_path / "latin.jsonl"))


def test_overlong_rows_by_policy(tmp_path: Path) -> None:
    path = write(tmp_path, {"input_ids": [1] * 3}, {"input_ids": [1] * 4}, {"input_ids": [1] * 2})
    with pytest.raises(
        DataError, match=r":2: 4 tokens, but at most 3 fit.*data\.overlong_rows=drop"
    ):
        load_score(path, None, Limits(9, max_tokens=3))
    kept = load_score(path, None, Limits(9, max_tokens=3, overlong="drop"))
    assert [(row.id, len(row.ids)) for row in kept] == [(0, 3), (2, 2)], "ids stay the rows' own"
    with pytest.raises(DataError, match="all 3 rows are longer than 1 tokens"):
        load_score(path, None, Limits(9, max_tokens=1, overlong="drop"))


def test_half_of_a_surrogate_pair_as_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xed\xa0\x80", "answer": 1}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:1: half of a surrogate pair"):
        load_prompts(path, PLAIN, LIMITS)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    try:
        arrow, parquet = (
            importlib.import_module("pyarrow"),
            importlib.import_module("pyarrow.parquet"),
        )
    except ImportError:
        with pytest.raises(
            DataError, match=r"parquet needs pyarrow: pip install 'dovetail-rl\[parquet\]'"
        ):
            load_score(path, None, LIMITS)
        return
    with pytest.raises(DataError, match=r"rows.parquet: not readable as parquet"):
        load_score(path, None, LIMITS)
    parquet.write_table(arrow.table({"input_ids": [[1, 2], [3]], "id": ["a", None]}), path)
    assert [(row.id, row.ids) for row in load_score(path, None, LIMITS)] == [
        ("a", (1, 2)),
        (1, (3,)),
    ]
    parquet.write_table(arrow.table([["a"], ["b"]], names=["prompt", "prompt"]), path)
    with pytest.raises(DataError, match=r"rows.parquet: .*several columns are named 'prompt'"):
        list(read_rows(path))
    parquet.write_table(arrow.table({"answer": arrow.array([1 << 30], arrow.date32())}), path)
    with pytest.raises(DataError, match=r"rows.parquet: not readable as parquet \(days=1073741824"):
        list(read_rows(path))
