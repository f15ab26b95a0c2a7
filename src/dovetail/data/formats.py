"""Rows of other projects to our columns."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from dovetail.data.files import Source, as_source, read_file, read_rows
from dovetail.data.paths import data_files, hub_source
from dovetail.data.rows import JsonRow
from dovetail.errors import DataError, quoted

Values = dict[str, Any]

ALPACA = (  # Stanford's prompt
    "Below is an instruction that describes a task{paired}. Write a response that appropriately "
    "completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{given}### Response:"
)
PAIRED = ", paired with an input that provides further context"
GIVEN = "### Input:\n{input}\n\n"
GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
LABELS = ("answer", "label", "solution", "ground_truth")
SHAREGPT_ROLES: Mapping[str, str] = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "function_call": "assistant",
    "system": "system", "observation": "tool", "tool": "tool",
}  # fmt: skip
TAG = re.compile("(<image>|<video>)")
MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|from)["']\s*:""")  # as text, in a table's cell


def _verl(row: JsonRow) -> Values:
    values = row.values
    if "response" in values:  # of SFT
        return {"prompt": _user(values["prompt"]), "completion": values["response"]}
    reward = values["reward_model"]
    if not isinstance(reward, Mapping):
        raise row.error(f"reward_model is {quoted(reward)}; expected {{style, ground_truth}}")
    answer = {"answer": reward["ground_truth"]} if "ground_truth" in reward else {}
    return {"prompt": _with_media(values["prompt"], values), **answer, **_label(values, "answer")}


def _openai(row: JsonRow) -> Values:
    messages = row.values.get("messages")
    if messages is None and row.has("prompt"):  # files may hold both
        return _trl(row)
    if not isinstance(messages, list) or not all(
        isinstance(message, Mapping) for message in messages
    ):
        return {}  # refused where messages are read
    return _conversation(row.values, [_openai_message(message) for message in messages])


def _sharegpt(row: JsonRow) -> Values:
    values = row.values
    turns = values["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise row.error(
            f'conversations is {quoted(turns)}; expected [{{"from": "human", "value": "Hi"}}, ...]'
        )
    system = [{"role": "system", "content": values["system"]}] if values.get("system") else []
    messages = [*system, *(_sharegpt_message(row, n, turn) for n, turn in enumerate(turns))]
    if row.has("chosen", "rejected"):
        pair = {
            key: [_sharegpt_message(row, len(turns), values[key])] for key in ("chosen", "rejected")
        }
        return {"prompt": messages, **pair}
    return _conversation(values, _with_media(messages, values))


def _alpaca(row: JsonRow) -> Values:
    values = row.values
    given = values.get("input") or ""
    instruction = values["instruction"]
    history = values.get("history") or []
    target = {key: values[key] for key in ("chosen", "rejected") if row.has("chosen", "rejected")}
    if row.has("kto_tag"):
        target["label"] = values["kto_tag"]
    if "output" in values:
        target |= {"completion": values["output"], "answer": values["output"]}
    if row.chat or history or values.get("system"):  # as LLaMA-Factory
        asked = f"{instruction}\n{given}" if given else instruction
        system = [{"role": "system", "content": values["system"]}] if values.get("system") else []
        earlier = [
            {"role": role, "content": text}
            for pair in history
            for role, text in zip(ROLES, pair, strict=False)
        ]
        prompt = [*system, *earlier, {"role": "user", "content": asked}]
        if earlier and "completion" in target:  # answers of the history are trained, too
            return _conversation(
                values, [*prompt, {"role": "assistant", "content": values["output"]}]
            )
        return {"prompt": prompt, **target}
    shown = GIVEN.format(input=given) if given else ""
    return {
        "prompt": ALPACA.format(
            paired=PAIRED if given else "", instruction=instruction, given=shown
        ),
        **target,
    }


def _gsm8k(row: JsonRow) -> Values:
    """The answer is behind the #### of the solution."""
    question = row.values["question"]
    solution = row.values["answer"]
    match = GSM8K_ANSWER.search(str(solution))
    answer = match[1].replace(",", "") if match else solution
    return {
        "prompt": question if row.chat else f"{question}\n",
        "completion": solution,
        "answer": answer,
    }


def _openrlhf(row: JsonRow) -> Values:
    prompt = row.values["input"]
    output = row.values.get("output")
    if output is None and isinstance(prompt, list):
        return _conversation(row.values, prompt)
    if isinstance(output, str):  # a space comes before EOS without a chat template
        output = output.rstrip("\n") + ("" if row.chat or isinstance(prompt, list) else " ")
    return {
        "prompt": prompt,
        **({} if output is None else {"completion": output}),
        **_label(row.values),
    }


def _trl(row: JsonRow) -> Values:
    values = row.values
    if row.has("messages") and not row.has("prompt"):
        return _openai(row)
    chosen, rejected, prompt = (values.get(name) for name in ("chosen", "rejected", "prompt"))
    if chosen is None or rejected is None or type(chosen) is not type(rejected):
        return _label(values)
    if prompt is not None and not (isinstance(prompt, str) and isinstance(chosen, list)):
        return {}
    shared = len(
        list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    )
    if isinstance(chosen, str) and chosen[:shared].endswith(" "):
        shared -= 1  # the space belongs to the completions
    return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


ROLES = ("user", "assistant")
FORMATS: Mapping[str, tuple[str, Callable[[JsonRow], Values]]] = {
    "verl": ("verl's", _verl), "trl": ("TRL's", _trl), "openai": ("OpenAI's", _openai),
    "sharegpt": ("ShareGPT's", _sharegpt), "alpaca": ("Alpaca's", _alpaca), "gsm8k": ("GSM8K's", _gsm8k),
    "slime": ("slime's", lambda row: {"answer": row.values["label"]}), "openrlhf": ("OpenRLHF's", _openrlhf),
}  # fmt: skip
COLUMNS: tuple[tuple[str, str], ...] = (
    ("prompt reward_model", "verl"), ("prompt answer", "trl"), ("conversations", "sharegpt"),
    ("instruction output", "alpaca"), ("instruction chosen rejected", "alpaca"), ("chosen rejected", "trl"),
    ("prompt completion", "trl"), ("prompt response", "verl"), ("messages", "openai"), ("question answer", "gsm8k"),
    ("prompt label", "slime"), ("prompt", "trl"), ("input output", "openrlhf"), ("input label", "openrlhf"),
    ("text", "trl"), ("input_ids", "trl"), ("input", "openrlhf"),
)  # fmt: skip
OURS = ("trl", "openai")  # rows of a file may be of both
FIRST_ROWS = 32
MAX_FILES = 32  # rows of each file, and files, that are read before a run
MAX_ARRAY = 1 << 25  # bytes of a JSON array that is read before a run


class RowReader:
    """Reads the rows of `source` in our columns. say: takes a line that names another's format."""

    def __init__(self, source: Source, say: Callable[[str], None]) -> None:
        self.source = source
        self.say = say
        self._first: JsonRow | None = None
        self._format = ""  # of the first row
        self._columns: list[set[str]] = []  # sets of columns, one of which every row needs

    def read(self, raw: JsonRow) -> JsonRow:
        """`raw` in our columns. DataError where it is not written as the first row is."""
        source = self.source
        row = replace(_messages_read(_renamed(raw, source.columns)), chat=source.chat)
        if self._first is None:
            self._first = row
            self._begin(row)
        title, read = FORMATS[self._format]
        self._refuse_other_format(row)
        try:
            values = {**row.values, **read(row)}
        except (AttributeError, TypeError, LookupError) as error:
            raise row.error(
                f"the row is not written as {title} are ({error}); see `dovetail docs data`"
            ) from error
        if source.chat and isinstance(values.get("prompt"), str):
            values["prompt"] = _user(values["prompt"])
        return replace(row, values=values, given=row.values)

    def _begin(self, row: JsonRow) -> None:
        self._format = self.source.format
        if self.source.format == "auto":
            self._format = _recognized(row)
        if (self._format, self.source.format) != ("trl", "auto"):  # TRL's columns are ours
            self.say(f"rows of {self.source.path} are read as {FORMATS[self._format][0]}")
        alike = OURS if self._format in OURS else (self._format,)
        self._columns = [set(columns.split()) for columns, name in COLUMNS if name in alike]

    def _refuse_other_format(self, row: JsonRow) -> None:
        """A file may hold OpenAI's and TRL's rows together, and no others."""
        if any(columns <= row.values.keys() for columns in self._columns):
            return
        other = _format_of(row)
        if other is not None and self._first is not None and self.source.format == "auto":
            theirs = FORMATS[other][0]
            ours = FORMATS[self._format][0]
            raise row.error(
                f"the row is written as {theirs} are, but the first one ({self._first.path}:"
                f"{self._first.line}) as {ours}; put the rows of each format into a file of their "
                "own, and list both in data.train"
            )
        if self._format not in OURS:
            row.require(*next(columns for columns, name in COLUMNS if name == self._format).split())


def rows_of(source: Source | Path | str, say: Callable[[str], None]) -> Iterator[JsonRow]:
    """Rows in our columns. say: gets a line that names another project's format."""
    source = as_source(source)
    reader = RowReader(source, say)
    for raw in read_rows(source):
        yield reader.read(raw)


def first_rows(source: Source) -> Iterator[JsonRow]:
    """The first rows of each file, in our columns; DataError as where all of them are loaded.

    Nothing is read of names on the hub, and of JSON arrays, which are read whole, only of short
    ones.
    """
    if hub_source(source.path) is not None:
        return
    reader = RowReader(source, lambda _: None)
    is_empty = True
    files = data_files(source.path)
    for path in files[:MAX_FILES]:
        if ".json" in path.suffixes[-2:] and path.stat().st_size > MAX_ARRAY:
            is_empty = False
            continue
        for raw in islice(read_file(path, FIRST_ROWS), FIRST_ROWS):
            is_empty = False
            yield reader.read(raw)
    if is_empty and len(files) <= MAX_FILES:
        raise no_rows(source.path)


def no_rows(path: str) -> DataError:
    return DataError(f"{path}: no rows; the file needs at least one")


def _renamed(row: JsonRow, columns: Mapping[str, str]) -> JsonRow:
    """columns: our name -> theirs, such as `reward_model.ground_truth`."""
    if not columns:
        return row
    named = {ours: _column(row, theirs) for ours, theirs in columns.items()}
    return replace(
        row, values={**{k: v for k, v in row.values.items() if k not in columns.values()}, **named}
    )


def _messages_read(row: JsonRow) -> JsonRow:
    read = {}
    for name in ("prompt", "messages", "conversations"):
        text = row.values.get(name)
        if isinstance(text, str) and MESSAGES.match(text):
            try:
                read[name] = json.loads(text)
            except ValueError as error:
                raise row.error(
                    f"{name} looks like a list of messages but is not JSON ({error}): "
                    f"{quoted(text)}"
                ) from error
    return replace(row, values={**row.values, **read}) if read else row


def _column(row: JsonRow, name: str) -> Any:
    value: Any = row.values
    for part in (name,) if name in row.values else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            has = ", ".join(map(repr, row.values))
            raise row.error(
                f"the row lacks {name!r}, which data.columns names (it has {has}); name one of "
                "these"
            )
        value = value[part]
    return value


def _recognized(row: JsonRow) -> str:
    name = _format_of(row)
    if name is None:
        raise row.error(
            f"the row's columns ({', '.join(map(repr, row.values)) or 'none'}) are of no known "
            "format; say in a recipe what they hold, such as "
            "data.columns={prompt: COLUMN, answer: COLUMN}"
        )
    return name


def _format_of(row: JsonRow) -> str | None:
    """The format of a row by its columns that are not null, else by all; None: unknown."""
    filled = {key for key, value in row.values.items() if value is not None}
    for here in (filled, row.values.keys()):
        for columns, name in COLUMNS:
            if set(columns.split()) <= here:
                return name
    return None


def _conversation(values: Mapping[str, Any], messages: list[Any]) -> Values:
    """A last turn of the assistant is also a completion."""
    ends = messages and messages[-1].get("role") == "assistant"
    prompt, last = (messages[:-1], messages[-1:]) if ends else (messages, [])
    given = {
        "messages": messages,
        "prompt": prompt if values.get("prompt") is None else values["prompt"],
    }
    return {
        **given,
        **({"completion": last, "answer": last[0].get("content")} if last else {}),
        **_label(values),
    }


def _label(values: Mapping[str, Any], *names: str) -> Values:
    """A boolean `label` is no answer."""
    given = [
        values[n]
        for n in names or LABELS
        if n in values and not (n == "label" and type(values[n]) is bool)
    ]
    return {"answer": given[0]} if given else {}


def _user(prompt: Any) -> Any:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _openai_message(message: Mapping[str, Any]) -> Values:
    """Returns a message with parts of type image for image_url."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = []
    for part in content:
        address = (
            part.get("image_url")
            if isinstance(part, Mapping) and part.get("type") == "image_url"
            else None
        )
        url = address.get("url") if isinstance(address, Mapping) else address
        parts.append(part if address is None else {"type": "image", "url": url})
    return {**message, "content": parts}


def _sharegpt_message(row: JsonRow, number: int, turn: Mapping[str, Any]) -> Values:
    sender = turn.get("from", turn.get("role"))
    text = turn.get("value", turn.get("content"))
    if sender not in SHAREGPT_ROLES:
        raise row.error(
            f"message {number} is from {quoted(sender)}; expected one of "
            f"{', '.join(SHAREGPT_ROLES)}"
        )
    if sender != "function_call":
        others = {
            key: value
            for key, value in turn.items()
            if key not in ("from", "role", "value", "content")
        }
        return {"role": SHAREGPT_ROLES[sender], "content": text, **others}
    try:
        calls = json.loads(text)
        calls = calls if type(calls) is list else [calls]
        functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    except (ValueError, TypeError, LookupError) as error:
        raise row.error(
            f"message {number} calls {quoted(text)}; expected the JSON of {{name, arguments}}"
        ) from error
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": each} for each in functions],
    }


def _with_media(messages: Any, values: Mapping[str, Any]) -> Any:
    """Content parts for <image> and <video>, as verl and LLaMA-Factory."""
    if not (values.get("images") or values.get("videos")) or not isinstance(messages, list):
        return messages
    made = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str) and TAG.search(content):
            texts = filter(None, TAG.split(content))
            parts = [
                {"type": text[1:-1]} if TAG.fullmatch(text) else {"type": "text", "text": text}
                for text in texts
            ]
            message = {**message, "content": parts}
        made.append(message)
    return made
