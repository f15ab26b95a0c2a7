"""Rows of a data file -> token sequences to score, to continue or to train on, with what they show.

A string is tokenized as it is, with one BOS if the tokenizer adds one; messages go through the chat template, which
writes its own special tokens. Images and videos take the places that the text gives them (`media`). Every mistake names
file and line.
"""

import json
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from dovetail.batch.packed import Media, Sequence
from dovetail.data.chat import Chat, Message, messages_of
from dovetail.data.chat_renderer import Renderer
from dovetail.data.media import KINDS, MediaLocator, MediaRef
from dovetail.data.processor import Processor
from dovetail.data.rows import JsonRow, read_rows
from dovetail.errors import DataError, quoted

Example = TypeVar("Example")


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def _quiet(_: str) -> None:
    """For who is not told what is left out."""


@dataclass(frozen=True)
class Limits:
    """What every row must respect: ids below `vocab_size`, at most `max_tokens`, and what befalls a longer row.

    `max_tokens` is what one row may hold: for a prompt, what the response's longest leaves of `tokens_per_batch`.
    `remedy` is what its author may do beside shortening it. `tell` is given one line about a file of which rows are dropped.
    """

    vocab_size: int
    max_tokens: int | None = None
    overlong: Literal["error", "drop"] = "error"
    remedy: str = "raise trainer.tokens_per_batch, or set data.overlong=drop"
    tell: Callable[[str], None] = _quiet


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt to continue. `columns` are the row's other keys, which the reward gets; messages say where they show
    something, not what."""

    id: Any
    ids: tuple[int, ...]
    media: Media | None = None
    prompt: str | list[dict[str, Any]] = ""
    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scored:
    """A token sequence to score, with what it shows, and its row's id."""

    id: Any
    ids: tuple[int, ...]
    media: Media | None = None


def load_prompts(
    path: Path | str,
    tokenizer: Tokenizer | None,
    limits: Limits,
    *,
    answers: bool = True,
    processor: Processor | None = None,
    renderer: Renderer | None = None,
) -> list[Prompt]:
    """RL rows {"prompt": str | messages, "answer": any, "id"?, ...}; with `answers` False, rows to generate from,
    which need no answer and may give {"input_ids"} instead of a prompt (and then no tokenizer). Here and below,
    `processor` is that of a model that sees, and `renderer`, default: one for this call, renders chat templates."""
    chat = Chat(tokenizer, renderer or Renderer())

    def example(index: int, row: JsonRow) -> Prompt:
        if answers:
            row.require("prompt", "answer")
        own = {"id", "prompt", "answer", "input_ids", "images", "videos"}
        columns = {key: value for key, value in row.values.items() if key not in own}
        prompt: Any = ""
        if not answers and row.values.get("prompt") is None and row.gives("input_ids", instead_of="prompt"):
            ids, media = _given_ids(row, processor)
        else:
            row.require("prompt")
            prompt, shown = _shown(row, "prompt", processor)
            ids, _, media = _expanded(row, _encode_prompt(row, chat, prompt), None, shown, processor)
        if not ids:
            raise row.error("the prompt has no tokens; write at least one character")
        answer = row.values.get("answer")
        return Prompt(id=row.id(index), ids=tuple(ids), media=media, prompt=prompt, answer=answer, columns=columns)

    return _load(path, example, limits, chat, processor)


def load_sft(
    path: Path | str,
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    processor: Processor | None = None,
    renderer: Renderer | None = None,
) -> list[Sequence]:
    """SFT rows: {"prompt", "completion"} trains the completion and one EOS; {"messages"} trains the assistant turns."""
    chat = Chat(tokenizer, renderer or Renderer())

    def example(_: int, row: JsonRow) -> Sequence:
        if row.gives("messages", instead_of="prompt"):
            messages, shown = _shown(row, "messages", processor)
            ids, mask = chat.conversation(row, messages)
        else:
            row.require("prompt", "completion")
            if row.values.get("label") is False:
                raise row.error(
                    "label is false, which marks a completion that is not to be learned (TRL's unpaired preferences), and sft "
                    "trains every completion; leave such rows out, or rename the column if it says something else"
                )
            text, shown = _shown(row, "prompt", processor)
            prompt, completion = _encode_prompt(row, chat, text), _encode_completion(row, tokenizer, text)
            if tokenizer.eos_token_id is None:
                raise row.error("the tokenizer has no EOS token to end the completion with; set its eos_token")
            end = [] if completion[-1:] == [tokenizer.eos_token_id] else [tokenizer.eos_token_id]
            ids = [*prompt, *completion, *end]
            mask = [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        longer, kept, media = _expanded(row, ids, mask, shown, processor)
        return Sequence(longer, mask=kept, media=media)

    return _load(path, example, limits, chat, processor)


def load_score(
    path: Path | str,
    tokenizer: Tokenizer | None,
    limits: Limits,
    *,
    processor: Processor | None = None,
    renderer: Renderer | None = None,
) -> list[Scored]:
    """Rows {"input_ids"} (no tokenizer needed) or {"prompt", "completion"}, scored as they stand, without an EOS."""
    chat = Chat(tokenizer, renderer or Renderer())

    def example(index: int, row: JsonRow) -> Scored:
        if row.gives("input_ids", instead_of="prompt"):
            ids, media = _given_ids(row, processor)
        else:
            row.require("prompt", "completion")
            text, shown = _shown(row, "prompt", processor)
            short = [*_encode_prompt(row, chat, text), *_encode_completion(row, tokenizer, text)]
            ids, _, media = _expanded(row, short, None, shown, processor)
        if not ids:
            raise row.error("the sequence has no tokens; a sequence needs at least one")
        return Scored(row.id(index), tuple(ids), media)

    return _load(path, example, limits, chat, processor)


def _load(
    path: Path | str, make: Callable[[int, JsonRow], Example], limits: Limits, chat: Chat, processor: Processor | None
) -> list[Example]:
    """Every row's example, its `ids` checked; rows over the limit are refused or dropped."""
    placeholders = frozenset[int]() if processor is None else processor.placeholder_ids
    examples: list[Example] = []
    seen = 0
    with chat.renderer:
        for seen, row in enumerate(read_rows(path), start=1):
            example = make(seen - 1, row)
            ids: Seq[int] = vars(example)["ids"]
            outside = next((i for i in ids if not 0 <= i < limits.vocab_size and i not in placeholders), None)
            if outside is not None:
                raise row.error(
                    f"token id {quoted(outside)} lies outside the model's vocabulary of {limits.vocab_size} "
                    f"(0 to {limits.vocab_size - 1}); use this model's own tokenizer"
                )
            if limits.max_tokens is None or len(ids) <= limits.max_tokens:
                examples.append(example)
            elif limits.overlong == "error":
                raise row.error(
                    f"{len(ids)} tokens, but at most {limits.max_tokens} fit; shorten the row, {limits.remedy}"
                )
    if not seen:
        raise DataError(f"{path}: no rows; the file needs at least one")
    if not examples:
        raise DataError(
            f"{path}: all {seen} rows are longer than {limits.max_tokens} tokens and dropped by data.overlong=drop; "
            "raise trainer.tokens_per_batch"
        )
    if len(examples) < seen:
        limits.tell(
            f"data.overlong=drop leaves out {seen - len(examples)} of {seen} rows of {path}: they have more than "
            f"{limits.max_tokens} tokens"
        )
    return examples


def _shown(row: JsonRow, key: str, processor: Processor | None) -> tuple[Any, MediaRef]:
    """The text or the messages under `key`, and what they show; messages for a template, which only has the places."""
    given = row.values[key]
    is_chat = key == "messages" or not isinstance(given, str)
    if is_chat:
        given = messages_of(row, key)
    if processor is None:
        _refuse_media(row, given if is_chat else [])
        return [_as_string(row, message) for message in given] if is_chat else given, MediaRef()
    with row.told():
        finder = MediaLocator(row.values, row.path.parent)
        return (finder.messages(given), finder.in_messages()) if is_chat else (given, finder.with_columns())


def _refuse_media(row: JsonRow, messages: Seq[Message]) -> None:
    """For a model that reads text only."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    for kind in KINDS:
        if row.values.get(f"{kind}s") or any(isinstance(part, dict) and part.get("type") == kind for part in parts):
            raise row.error(
                f"the row has {kind}s, but this model reads text only; drop them, or give a model that sees"
            )


def _as_string(row: JsonRow, message: Message) -> Message:
    """The message with its parts of text put together: templates of models that read text only write strings."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    for part, text in zip(content, texts, strict=True):
        if not isinstance(text, str):
            raise row.error(f'a content part is {part!r:.80}; expected {{"type": "text", "text": ...}}')
    return {**message, "content": "".join(map(str, texts))}


def _expanded(
    row: JsonRow, ids: list[int], mask: list[bool] | None, shown: MediaRef, processor: Processor | None
) -> tuple[list[int], list[bool] | None, Media | None]:
    """Ids and mask with room for what the row shows."""
    if processor is None:
        return ids, mask, None
    with row.told():
        return processor.expand(ids, mask, shown, f"{row.path}:{row.line}")


def _given_ids(row: JsonRow, processor: Processor | None) -> tuple[list[int], Media | None]:
    """The row's ids, which hold the places of its images already."""
    row.require("input_ids")
    ids = row.values["input_ids"]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise row.error(f"input_ids must be a list of integers, not {json.dumps(ids, default=str):.80}")
    if processor is None:
        _refuse_media(row, [])
        return ids, None
    with row.told():
        return ids, processor.match(
            ids, MediaLocator(row.values, row.path.parent).with_columns(), f"{row.path}:{row.line}"
        )


def _encode_prompt(row: JsonRow, chat: Chat, prompt: str | list[Message]) -> list[int]:
    """`prompt` is the row's, as `_shown` gives it."""
    if chat.tokenizer is None:
        raise row.error("text needs a tokenizer, and the model has none; give input_ids")
    if isinstance(prompt, str):
        return _encode_text(prompt, chat.tokenizer)
    continued = prompt[-1]["role"] == "assistant"
    return chat.encode(row, prompt, continue_final_message=continued, add_generation_prompt=not continued)


def _encode_completion(row: JsonRow, tokenizer: Tokenizer | None, prompt: str | list[Message]) -> list[int]:
    """As it stands behind a prompt that is a string: some tokenizers write a space in front of every text, which the row
    does not have there. Behind messages it is a text of its own, as what the template writes for a turn."""
    completion = row.values["completion"]
    if not isinstance(completion, str):
        raise row.error(f"completion must be a string, not {json.dumps(completion, default=str):.80}")
    assert tokenizer is not None  # the prompt came first
    for before in (prompt, "\n") if isinstance(prompt, str) else ():
        start, whole = _encode_text(before, tokenizer), _encode_text(before + completion, tokenizer)
        if whole[: len(start)] == start:
            return whole[len(start) :]
    return tokenizer.encode(completion, add_special_tokens=False)


def _encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """The text's ids, with the BOS that the tokenizer adds in front unless the text begins with it; never an EOS."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer.encode("", add_special_tokens=True)[:1] == [bos]
    return [bos, *ids] if bos is not None and adds_bos and ids[:1] != [bos] else ids
