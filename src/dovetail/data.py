"""Rows of a data file -> token sequences to score, to continue or to train on, and which rows a step takes.

JSONL first, parquet where pyarrow is installed. A string is tokenized as it is, with one BOS if the tokenizer adds
one; messages go through the chat template, which writes its own special tokens. Every mistake names file and line.
"""

import importlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from jinja2 import TemplateError

from dovetail.batch import Sequence
from dovetail.errors import DataError

Example = TypeVar("Example")
Message = Mapping[str, Any]
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # escaped, or as bytes, which json lets pass


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def apply_chat_template(self, conversation: list[Any], **options: Any) -> Any: ...


@dataclass(frozen=True)
class Limits:
    """What every row must respect: ids below `vocab_size`, at most `max_tokens`, and what befalls a longer row.

    `max_tokens` is what one row may hold: for a prompt, what the response's longest leaves of `tokens_per_batch`.
    `remedy` is what its author may do beside shortening it.
    """

    vocab_size: int
    max_tokens: int | None = None
    overlong: Literal["error", "drop"] = "error"
    remedy: str = "raise trainer.tokens_per_batch, or set data.overlong=drop"


@dataclass(frozen=True)
class Row:
    """One row of a file and where it stands: the line from 1 in JSONL, the row from 1 in parquet."""

    values: Mapping[str, Any]
    path: Path
    line: int

    def error(self, message: str) -> DataError:
        return DataError(f"{self.path}:{self.line}: {message}")

    def require(self, *names: str) -> None:
        missing = [name for name in names if name not in self.values]
        if missing:
            has = ", ".join(map(repr, self.values)) or "nothing"
            raise self.error(f"the row lacks {', '.join(map(repr, missing))} (it has {has}); add the key to the row")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt to continue. `columns` are the row's other keys, which the reward gets."""

    id: Any
    ids: tuple[int, ...]
    prompt: str | list[dict[str, Any]] = ""
    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scored:
    """A token sequence to score, and its row's id."""

    id: Any
    ids: tuple[int, ...]


def load_prompts(
    path: Path | str, tokenizer: Tokenizer | None, limits: Limits, *, answers: bool = True
) -> list[Prompt]:
    """RL rows {"prompt": str | messages, "answer": any, "id"?, ...}; with `answers` False, rows to generate from,
    which need no answer and may give {"input_ids"} instead of a prompt (and then no tokenizer)."""

    def example(index: int, row: Row) -> Prompt:
        if answers:
            row.require("prompt", "answer")
        own = {"id", "prompt", "answer", "input_ids"}
        columns = {key: value for key, value in row.values.items() if key not in own}
        if "prompt" not in row.values and not answers:
            ids, prompt = _given_ids(row), ""
        else:
            row.require("prompt")
            ids, prompt = _encode_prompt(row, tokenizer), row.values["prompt"]
        if not ids:
            raise row.error("the prompt has no tokens; write at least one character")
        answer = row.values.get("answer")
        return Prompt(id=row.values.get("id", index), ids=tuple(ids), prompt=prompt, answer=answer, columns=columns)

    return _load(path, example, limits)


def load_sft(path: Path | str, tokenizer: Tokenizer, limits: Limits) -> list[Sequence]:
    """SFT rows: {"prompt", "completion"} trains the completion and one EOS; {"messages"} trains the assistant turns."""

    def example(_: int, row: Row) -> Sequence:
        if "messages" in row.values:
            return _conversation(row, tokenizer)
        row.require("prompt", "completion")
        prompt, completion = _encode_prompt(row, tokenizer), _encode_completion(row, tokenizer)
        if tokenizer.eos_token_id is None:
            raise row.error("the tokenizer has no EOS token to end the completion with; set its eos_token")
        completion = [*completion, tokenizer.eos_token_id]
        return Sequence([*prompt, *completion], mask=[False] * len(prompt) + [True] * len(completion))

    return _load(path, example, limits)


def load_score(path: Path | str, tokenizer: Tokenizer | None, limits: Limits) -> list[Scored]:
    """Rows {"input_ids"} (no tokenizer needed) or {"prompt", "completion"}, scored as they stand, without an EOS."""

    def example(index: int, row: Row) -> Scored:
        if "input_ids" in row.values:
            ids = _given_ids(row)
        else:
            row.require("prompt", "completion")
            ids = [*_encode_prompt(row, tokenizer), *_encode_completion(row, tokenizer)]
        if not ids:
            raise row.error("the sequence has no tokens; a sequence needs at least one")
        return Scored(row.values.get("id", index), tuple(ids))

    return _load(path, example, limits)


def needs_text(path: Path | str) -> bool:
    """Whether any row of the file gives text, so that a tokenizer is needed."""
    return any("input_ids" not in row.values for row in read_rows(path))


def batch_rows(num_rows: int, count: int, seed: int | None, start: int) -> list[int]:
    """`count` rows from the `start`-th on: a stretch of an endless stream of shuffled epochs.

    Every epoch holds every row once, without a seed in the file's order; a step may reach into the next epoch. A pure
    function of its arguments, so that a resumed run needs no state for the data but how many rows it has taken.
    """
    stream = range(start, start + count)
    orders = {epoch: _epoch_order(num_rows, seed, epoch) for epoch in {at // num_rows for at in stream}}
    return [orders[at // num_rows][at % num_rows] for at in stream]


def read_rows(path: Path | str) -> Iterator[Row]:
    """The rows of a .parquet file, or of any other as JSON lines; blank lines are passed over."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such data file; give the path of a .jsonl or .parquet file")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    with path.open("rb") as lines:
        for line, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                values = json.loads(text)
            except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, or nested beyond reading
                raise DataError(f"{path}:{line}: not JSON ({error}); each line must be one JSON object") from error
            if not isinstance(values, dict):
                raise DataError(f"{path}:{line}: a {type(values).__name__}, not a JSON object such as {{...}}")
            if SURROGATE.search(text) and not _is_text(values):
                raise DataError(
                    f"{path}:{line}: half of a surrogate pair, which no text can hold; write the character itself"
                )
            yield Row(values, path, line)


def _is_text(values: dict[str, Any]) -> bool:
    """Whether all strings in `values` can be written as UTF-8."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path}: parquet needs pyarrow: pip install 'dovetail[parquet]', or give JSONL") from error
    row = 0
    try:
        for group in parquet.ParquetFile(path).iter_batches():
            for values in group.to_pylist():
                row += 1
                yield Row(values, path, row)
    except (ValueError, OSError) as error:  # pyarrow's own are kinds of these
        raise DataError(f"{path}: not readable as parquet ({error}); write it again, or give JSONL") from error


def _load(path: Path | str, make: Callable[[int, Row], Example], limits: Limits) -> list[Example]:
    """Every row's example, its `ids` checked; rows over the limit are refused or dropped."""
    examples: list[Example] = []
    seen = 0
    for seen, row in enumerate(read_rows(path), start=1):
        example = make(seen - 1, row)
        ids: Seq[int] = vars(example)["ids"]
        outside = next((i for i in ids if not 0 <= i < limits.vocab_size), None)
        if outside is not None:
            raise row.error(
                f"token id {outside} lies outside the model's vocabulary of {limits.vocab_size} "
                f"(0 to {limits.vocab_size - 1}); use this model's own tokenizer"
            )
        if limits.max_tokens is None or len(ids) <= limits.max_tokens:
            examples.append(example)
        elif limits.overlong == "error":
            raise row.error(f"{len(ids)} tokens, but at most {limits.max_tokens} fit; shorten the row, {limits.remedy}")
    if not seen:
        raise DataError(f"{path}: no rows; the file needs at least one")
    if not examples:
        raise DataError(
            f"{path}: all {seen} rows are longer than {limits.max_tokens} tokens and dropped by data.overlong=drop; "
            "raise trainer.tokens_per_batch"
        )
    return examples


def _given_ids(row: Row) -> list[int]:
    row.require("input_ids")
    ids = row.values["input_ids"]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise row.error(f"input_ids must be a list of integers, not {json.dumps(ids, default=str):.80}")
    return ids


def _encode_prompt(row: Row, tokenizer: Tokenizer | None) -> list[int]:
    prompt = row.values["prompt"]
    if tokenizer is None:
        raise row.error("text needs a tokenizer, and the model has none; give input_ids")
    if isinstance(prompt, str):
        return _encode_text(prompt, tokenizer)
    messages = _messages(row, "prompt")
    continued = messages[-1]["role"] == "assistant"
    return _render(row, tokenizer, messages, continue_final_message=continued, add_generation_prompt=not continued)


def _encode_completion(row: Row, tokenizer: Tokenizer | None) -> list[int]:
    completion = row.values["completion"]
    if not isinstance(completion, str):
        raise row.error(f"completion must be a string, not {json.dumps(completion, default=str):.80}")
    assert tokenizer is not None  # the prompt came first
    return tokenizer.encode(completion, add_special_tokens=False)


def _encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """The text's ids, with the BOS that the tokenizer adds in front unless the text begins with it; never an EOS."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer.encode("", add_special_tokens=True)[:1] == [bos]
    return [bos, *ids] if bos is not None and adds_bos and ids[:1] != [bos] else ids


def _render(row: Row, tokenizer: Tokenizer, messages: list[Message], **options: bool) -> list[int]:
    """The ids of what the chat template writes for `messages`."""
    if not tokenizer.chat_template:
        raise row.error("messages need a chat template, and the tokenizer has none; write the prompt as a string")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise row.error(f"the chat template refuses these messages: {error}") from error
    return tokenizer.encode(text, add_special_tokens=False)


def _messages(row: Row, key: str) -> list[Message]:
    messages = row.values[key]
    is_chat = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    if not is_chat or not all(isinstance(message.get("role"), str) and "content" in message for message in messages):
        what = "a string or messages" if key == "prompt" else "messages"
        raise row.error(
            f'{key} must be {what} such as [{{"role": "user", "content": "Hi"}}], not '
            f"{json.dumps(messages, default=str):.80}"
        )
    return messages


def _conversation(row: Row, tokenizer: Tokenizer) -> Sequence:
    """The whole conversation's ids, trained where an assistant speaks.

    A turn begins where the template's rendering of what came before it, with the generation prompt, ends; and it ends
    where its own rendering does, or before that at its EOS (what the template writes after an EOS no model produces).
    Both must be beginnings of the whole: a template that writes a turn otherwise once more follows is refused.
    """
    messages = _messages(row, "messages")
    ids = _render(row, tokenizer, messages)
    mask = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(row, tokenizer, messages[:turn], add_generation_prompt=True) if turn else []
        through = _render(row, tokenizer, messages[: turn + 1])
        if ids[: len(before)] != before or ids[: len(through)] != through or len(before) > len(through):
            raise row.error(
                f"message {turn} (assistant): the chat template writes this turn differently once more messages follow "
                'it, so its tokens cannot be told apart; give one row a turn: {"prompt": messages, "completion": text}'
            )
        end = len(through)
        if tokenizer.eos_token_id in ids[len(before) : end]:
            end -= ids[len(before) : end][::-1].index(tokenizer.eos_token_id)
        mask[len(before) : end] = [True] * (end - len(before))
    if not any(mask):
        raise row.error("messages without an assistant turn train nothing; add one")
    return Sequence(ids, mask=mask)


def _epoch_order(num_rows: int, seed: int | None, epoch: int) -> list[int]:
    order = list(range(num_rows))
    if seed is not None:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
