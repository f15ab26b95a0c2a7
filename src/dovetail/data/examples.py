"""Rows of a data file -> token sequences to score, to continue or to train on, with their images and videos.

A string is tokenized as it is, with one BOS if the tokenizer adds one; messages go through the chat template.
"""

import json
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from dovetail.batch.packed import Media, Sequence
from dovetail.data.chat import Chat, Message, Renderer, messages_of
from dovetail.data.media import KINDS, MediaLocator, MediaRef
from dovetail.data.processor import Processor
from dovetail.data.rows import JsonRow, read_rows
from dovetail.errors import DataError, quoted

Example = TypeVar("Example")


class Tokenizer(Protocol):
    """The part of a transformers tokenizer in use."""

    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class Limits:
    vocab_size: int
    max_tokens: int | None = None  # of a prompt: what the longest response leaves
    overlong: Literal["error", "drop"] = "error"
    remedy: str = "raise trainer.tokens_per_batch, or set data.overlong=drop"
    warn: Callable[[str], None] = lambda _: None  # of dropped rows


@dataclass(frozen=True, kw_only=True)
class Prompt:
    id: Any
    ids: tuple[int, ...]
    media: Media | None = None
    prompt: str | list[dict[str, Any]] = ""
    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)  # the row's other keys, for the reward


@dataclass(frozen=True)
class Scored:
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
    """RL rows {"prompt": str | messages, "answer": any, "id"?, ...}.

    answers: False for rows to generate from, without an answer, or of {"input_ids"}, which need no tokenizer.
    """
    encode = _Encoder(Chat(tokenizer, renderer or Renderer()), processor)

    def example(index: int, row: JsonRow) -> Prompt:
        if answers:
            row.require("prompt", "answer")
        own = {"id", "prompt", "answer", "input_ids", "images", "videos"}
        columns = {key: value for key, value in row.values.items() if key not in own}
        prompt: Any = ""
        if not answers and row.values.get("prompt") is None and row.gives("input_ids", instead_of="prompt"):
            ids, media = encode.input_ids(row)
        else:
            row.require("prompt")
            prompt, shown = encode.read(row, "prompt")
            ids, _, media = encode.expand(row, encode.prompt(row, prompt), None, shown)
        answer = row.values.get("answer")
        return Prompt(id=row.id(index), ids=tuple(ids), media=media, prompt=prompt, answer=answer, columns=columns)

    return _load(path, example, limits, encode)


def load_sft(
    path: Path | str,
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    processor: Processor | None = None,
    renderer: Renderer | None = None,
) -> list[Sequence]:
    """Rows {"prompt", "completion"}, training the completion and one EOS, or {"messages"}, training assistant turns."""
    encode = _Encoder(Chat(tokenizer, renderer or Renderer()), processor)

    def example(_: int, row: JsonRow) -> Sequence:
        if row.gives("messages", instead_of="prompt"):
            messages, shown = encode.read(row, "messages")
            ids, mask = encode.chat.conversation(row, messages)
        else:
            row.require("prompt", "completion")
            if row.values.get("label") is False:
                raise row.error(
                    "label is false, which marks a completion that is not to be learned (TRL's unpaired preferences), and sft "
                    "trains every completion; leave such rows out, or rename the column if it says something else"
                )
            text, shown = encode.read(row, "prompt")
            prompt, completion = encode.prompt(row, text), encode.completion(row, text)
            if tokenizer.eos_token_id is None:
                raise row.error("the tokenizer has no EOS token to end the completion with; set its eos_token")
            end = [] if completion[-1:] == [tokenizer.eos_token_id] else [tokenizer.eos_token_id]
            ids = [*prompt, *completion, *end]
            mask = [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        all_ids, all_mask, media = encode.expand(row, ids, mask, shown)
        return Sequence(all_ids, mask=all_mask, media=media)

    return _load(path, example, limits, encode)


def load_score(
    path: Path | str,
    tokenizer: Tokenizer | None,
    limits: Limits,
    *,
    processor: Processor | None = None,
    renderer: Renderer | None = None,
) -> list[Scored]:
    """Rows {"input_ids"}, which need no tokenizer, or {"prompt", "completion"}, scored without an EOS."""
    encode = _Encoder(Chat(tokenizer, renderer or Renderer()), processor)

    def example(index: int, row: JsonRow) -> Scored:
        if row.gives("input_ids", instead_of="prompt"):
            ids, media = encode.input_ids(row)
        else:
            row.require("prompt", "completion")
            text, shown = encode.read(row, "prompt")
            ids = [*encode.prompt(row, text), *encode.completion(row, text)]
            ids, _, media = encode.expand(row, ids, None, shown)
        return Scored(row.id(index), tuple(ids), media)

    return _load(path, example, limits, encode)


def _load(
    path: Path | str, make: Callable[[int, JsonRow], Example], limits: Limits, encoder: "_Encoder"
) -> list[Example]:
    placeholders = frozenset[int]() if encoder.processor is None else encoder.processor.placeholder_ids
    examples: list[Example] = []
    count = 0
    with encoder.chat.renderer:
        for count, row in enumerate(read_rows(path), start=1):
            example = make(count - 1, row)
            ids: Seq[int] = vars(example)["ids"]
            if not ids:
                raise row.error("the row has no tokens; it needs at least one")
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
    if not count:
        raise DataError(f"{path}: no rows; the file needs at least one")
    if not examples:
        raise DataError(
            f"{path}: all {count} rows are longer than {limits.max_tokens} tokens and dropped by data.overlong=drop; "
            "raise trainer.tokens_per_batch"
        )
    if len(examples) < count:
        limits.warn(
            f"data.overlong=drop leaves out {count - len(examples)} of {count} rows of {path}: they have more than "
            f"{limits.max_tokens} tokens"
        )
    return examples


@dataclass(frozen=True)
class _Encoder:
    chat: Chat
    processor: Processor | None  # None: of a model that reads text only

    def read(self, row: JsonRow, key: str) -> tuple[Any, MediaRef]:
        """The text or the messages under `key`, and their media."""
        content = row.values[key]
        is_chat = key == "messages" or not isinstance(content, str)
        if is_chat:
            content = messages_of(row, key)
        if self.processor is None:
            _refuse_media(row, content if is_chat else [])
            return [_as_string(row, message) for message in content] if is_chat else content, MediaRef()
        with row.locating():
            locator = MediaLocator(row.values, row.path.parent)
            return (locator.messages(content), locator.in_messages()) if is_chat else (content, locator.with_columns())

    def prompt(self, row: JsonRow, prompt: str | list[Message]) -> list[int]:
        if self.chat.tokenizer is None:
            raise row.error("text needs a tokenizer, and the model has none; give input_ids")
        if isinstance(prompt, str):
            return _encode_text(prompt, self.chat.tokenizer)
        continued = prompt[-1]["role"] == "assistant"
        return self.chat.encode(row, prompt, continue_final_message=continued, add_generation_prompt=not continued)

    def completion(self, row: JsonRow, prompt: str | list[Message]) -> list[int]:
        """Tokenized behind a prompt of text: some tokenizers put a space in front of every text."""
        completion, tokenizer = row.values["completion"], self.chat.tokenizer
        if not isinstance(completion, str):
            raise row.error(f"completion must be a string, not {json.dumps(completion, default=str):.80}")
        for before in (prompt, "\n") if isinstance(prompt, str) else ():
            start, whole = _encode_text(before, tokenizer), _encode_text(before + completion, tokenizer)
            if whole[: len(start)] == start:
                return whole[len(start) :]
        ids: list[int] = tokenizer.encode(completion, add_special_tokens=False)
        return ids

    def expand(
        self, row: JsonRow, ids: list[int], mask: list[bool] | None, shown: MediaRef
    ) -> tuple[list[int], list[bool] | None, Media | None]:
        """Insert the places of the row's media."""
        if self.processor is None:
            return ids, mask, None
        with row.locating():
            return self.processor.expand(ids, mask, shown, f"{row.path}:{row.line}")

    def input_ids(self, row: JsonRow) -> tuple[list[int], Media | None]:
        """The row's own ids, with the places of its media."""
        row.require("input_ids")
        ids = row.values["input_ids"]
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise row.error(f"input_ids must be a list of integers, not {json.dumps(ids, default=str):.80}")
        if self.processor is None:
            _refuse_media(row, [])
            return ids, None
        with row.locating():
            media = MediaLocator(row.values, row.path.parent).with_columns()
            return ids, self.processor.match(ids, media, f"{row.path}:{row.line}")


def _refuse_media(row: JsonRow, messages: Seq[Message]) -> None:
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    for kind in KINDS:
        if row.values.get(f"{kind}s") or any(isinstance(part, dict) and part.get("type") == kind for part in parts):
            raise row.error(
                f"the row has {kind}s, but this model reads text only; drop them, or give a model that sees"
            )


def _as_string(row: JsonRow, message: Message) -> Message:
    """Parts of text joined, for templates of models that read text only."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    for part, text in zip(content, texts, strict=True):
        if not isinstance(text, str):
            raise row.error(f'a content part is {part!r:.80}; expected {{"type": "text", "text": ...}}')
    return {**message, "content": "".join(map(str, texts))}


def _encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer.encode("", add_special_tokens=True)[:1] == [bos]
    return [bos, *ids] if bos is not None and adds_bos and ids[:1] != [bos] else ids
