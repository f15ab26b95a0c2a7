"""The first rows of each file, tokenizers and chat templates: refused before any rank, and before the header."""

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.main import run_command
from tests.helpers.first_rows import ASSISTANT, GOOD, USER, started as started, write

HUMAN = {"role": "human", "content": "2+2?"}
CHAT = {"prompt": [USER], "answer": "4"}
TOOLS = {**CHAT, "tools": [{"type": "function", "function": {"name": "add"}}]}
GSM8K = {"question": "2+2?", "answer": "#### 4"}
TEMPLATE = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "D.jsonl: no rows; the file needs at least one"),
        (["", ""], "D.jsonl: no rows"),
        (["{broken"], "D.jsonl:1: not JSON"),
        ([GOOD, "[1]"], "D.jsonl:2: a list, not a JSON object"),
        ([{}], "D.jsonl:1: the row's columns (none) are of no known format"),
        ([{"x": 1}], "D.jsonl:1: the row's columns ('x') are of no known format"),
        ([{"prompt": "2+2?"}], "D.jsonl:1: the row lacks 'answer'"),
        ([GOOD, {"prompt": "2+2?", "answer": None}], "D.jsonl:2: answer is null"),
        ([{"prompt": [], "answer": 1}], "D.jsonl:1: prompt must be a string or messages"),
        (
            [GSM8K, GOOD],
            "D.jsonl:2: the row is written as TRL's are, but the first one (D.jsonl:1) as GSM8K's; put",
        ),
        (
            [GOOD, GSM8K],
            "D.jsonl:2: the row is written as GSM8K's are, but the first one (D.jsonl:1) as TRL's; put",
        ),
        (
            [CHAT],
            "D.jsonl:1: messages need a chat template, and the tokenizer has none; name a Jinja file with data.",
        ),
    ],
)
def test_rows_are_refused_before_the_header(
    rows: list[Any], words: str, started: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    write(*rows)
    assert run_command(["train", "R.yaml"]) == 2
    told = capsys.readouterr()
    assert words in told.err
    assert (told.out, started) == ("", [])


def test_the_first_row_of_each_file_is_read(
    started: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    write(GOOD, name="rows/a.jsonl")
    write({"prompt": "2+2?"}, name="rows/b.jsonl")
    write({"question": "2+2?"}, name="held.jsonl")
    write(GOOD, name="set.jsonl")
    argv = ["train", "R.yaml", "data.train=rows", "data.eval=held.jsonl"]
    assert run_command([*argv, "eval.sets=[{name: x, data: [set.jsonl, none.jsonl]}]"]) == 2
    told = capsys.readouterr().err
    assert "rows/b.jsonl:1: the row lacks 'answer'" in told
    assert "held.jsonl:1: the row's columns ('question') are of no known format" in told
    assert "none.jsonl: no such data file" in told
    assert not started


@pytest.mark.parametrize(
    ("template", "row", "words"),
    [
        ("", GOOD, ""),
        (TEMPLATE, CHAT, ""),
        (TEMPLATE + "{{ tools }}", TOOLS, ""),
        (TEMPLATE, TOOLS, "the row has tools, which the model's chat template does not write"),
        (TEMPLATE, {**CHAT, "tools": 3}, "tools must be a list of JSON schemas"),
    ],
)
@pytest.mark.parametrize("place", ["file", "settings", "given"])
def test_tools_and_messages_need_a_template_that_writes_them(
    place: str,
    template: str,
    row: Any,
    words: str,
    started: list[object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(row)
    argv = ["train", "R.yaml"]
    if place == "file" and template:
        Path("M/chat_template.jinja").write_text(template)
    elif place == "settings":
        Path("M/tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    elif template:
        Path("own.jinja").write_text(template)
        argv.append("data.chat_template=own.jinja")
    assert run_command(argv) == (2 if words else 0)
    assert words in capsys.readouterr().err
    assert bool(started) is not bool(words)


def test_a_template_that_only_the_tokenizers_code_knows_is_not_missed(
    started: list[object],
) -> None:
    write(TOOLS)
    Path("M/tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": "own.Tokenizer"}})
    )
    assert run_command(["train", "R.yaml"]) == 0
    assert started


def test_a_model_without_tokenizer_trains_nothing(
    started: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    write(GOOD)
    Path("M/tokenizer.json").unlink()
    assert run_command(["train", "R.yaml"]) == 2
    assert "M has no tokenizer (tokenizer.json)" in capsys.readouterr().err
    assert not started


def test_unusual_prompts_are_noted_once(
    started: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("M/chat_template.jinja").write_text(TEMPLATE)
    write(
        CHAT,
        {**CHAT, "prompt": [HUMAN]},
        {**CHAT, "prompt": [HUMAN]},
        {**CHAT, "prompt": [USER, ASSISTANT]},
    )
    assert run_command(["train", "R.yaml"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "the prompt" in line]
    assert [line.partition(", which")[0] for line in notes] == [
        "dovetail: note: D.jsonl:2: the prompt has the role 'human'",
        "dovetail: note: D.jsonl:4: the prompt ends with a turn of the assistant",
    ]
    assert started
    Path("M/chat_template.jinja").write_text(
        "{% if m.role == 'human' %}"
    )  # one that knows the role
    write({**CHAT, "prompt": [HUMAN]})
    assert run_command(["train", "R.yaml"]) == 0
    assert "the prompt" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "row", "words"),
    [
        (
            ["score", "--out", "O"],
            {"prompt": "a", "answer": "b"},
            "(it has 'prompt', 'answer'); score takes rows of",
        ),
        (["score", "--out", "O"], {"prompt": "a", "completion": "b"}, ""),
        (["generate", "--out", "O"], {"prompt": "a"}, ""),
        (["generate", "--out", "O"], {"text": "a"}, "the row lacks 'prompt'"),
        (["eval"], {"prompt": "a"}, "the row lacks 'answer'"),
        (["eval", "--reward", "format"], {"prompt": "a"}, ""),
    ],
)
def test_rows_of_other_commands(
    argv: list[str], row: Any, words: str, started: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    write(row)
    model = ["M"] if argv[0] == "eval" else ["--model", "M"]
    assert run_command([argv[0], *model, "--data", "D.jsonl", *argv[1:]]) == (2 if words else 0)
    assert words in capsys.readouterr().err
    assert bool(started) is not bool(words)
