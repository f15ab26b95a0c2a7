"""A row's text, messages or ids -> token ids, a mask of trained ones, and media."""

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, cast

from dovetail.batch.packed import Media, Sequence
from dovetail.batch.packing import IGNORED
from dovetail.data.chat import Chat, Message, messages_of
from dovetail.data.media import KINDS, MediaLocator, MediaRef
from dovetail.data.processor import Processor
from dovetail.data.rows import JsonRow
from dovetail.errors import quoted


class Tokenizer(Protocol):
    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class RowEncoder:
    chat: Chat
    processor: Processor | None  # of a model that reads media

    def read(self, row: JsonRow, key: str) -> tuple[Any, MediaRef]:
        """The text or messages under `key`, and their media."""
        content = row.values[key]
        is_chat = key == "messages" or not isinstance(content, str)
        if is_chat:
            content = messages_of(row, key)
        if self.processor is None:
            _refuse_media(row, content if is_chat else [])
            return [
                _as_string(row, message) for message in content
            ] if is_chat else content, MediaRef()
        with row.locating():
            locator = MediaLocator(row.values, row.path.parent)
            return (
                (locator.messages(content), locator.in_messages())
                if is_chat
                else (content, locator.with_columns())
            )

    def prompt(self, row: JsonRow, prompt: str | list[Message]) -> list[int]:
        if self.chat.tokenizer is None:
            raise row.error("text needs a tokenizer, and the model has none; give input_ids")
        if isinstance(prompt, str):
            return _encode_text(prompt, self.chat.tokenizer)
        continued = prompt[-1]["role"] == "assistant"
        return self.chat.encode(
            row, prompt, continue_final_message=continued, add_generation_prompt=not continued
        )

    def pair(self, row: JsonRow, key: str, *, ends: bool = True) -> Sequence:
        """The prompt and the trained completion under `key`, with one EOS if it `ends`."""
        text, shown = self.read(row, "prompt")
        prompt = self.prompt(row, text)
        if isinstance(row.values[key], list) and isinstance(text, list):
            completion = self._turns(row, text, prompt, key)
        else:
            completion = self._completion(row, text, key)
            end = self._eos(row) if ends else None
            completion += [end] if end is not None and completion[-1:] != [end] else []
        mask = [False] * len(prompt) + [True] * len(completion)
        ids, all_mask, media = self.expand(row, [*prompt, *completion], mask, shown)
        return Sequence(ids, mask=all_mask, media=media)

    def text(self, row: JsonRow) -> tuple[list[int], list[bool]]:
        """Ids with one EOS; all are trained."""
        text = row.values["text"]
        if not isinstance(text, str):
            raise row.error(f"text must be a string, not {json.dumps(text, default=str):.80}")
        ids = _encode_text(text, self.chat.tokenizer)
        end = self._eos(row)
        ids += [] if ids[-1:] == [end] else [end]
        return ids, [True] * len(ids)

    def _eos(self, row: JsonRow) -> int:
        end: int | None = self.chat.tokenizer.eos_token_id
        if end is None:
            raise row.error(
                "the tokenizer has no EOS token to end the completion with; set its eos_token"
            )
        return end

    def _turns(self, row: JsonRow, prompt: list[Message], start: list[int], key: str) -> list[int]:
        whole = self.chat.encode(row, [*prompt, *messages_of(row, key)])
        if whole[: len(start)] != start:
            raise row.error(
                f"the chat template writes the prompt differently once the messages of {key} "
                "follow it, so their tokens cannot "
                f"be told apart; give {key} as a string"
            )
        return whole[len(start) :]

    def _completion(self, row: JsonRow, prompt: str | list[Message], key: str) -> list[int]:
        """Tokenized after the prompt, since some tokenizers put a space in front of every text."""
        completion = row.values[key]
        tokenizer = self.chat.tokenizer
        if not isinstance(completion, str):
            alike = " (messages need a prompt of messages)" if isinstance(completion, list) else ""
            raise row.error(
                f"{key} must be a string{alike}, not {json.dumps(completion, default=str):.80}"
            )
        for before in (prompt, "\n") if isinstance(prompt, str) else ():
            start = _encode_text(before, tokenizer)
            whole = _encode_text(before + completion, tokenizer)
            if whole[: len(start)] == start:
                return whole[len(start) :]
        return cast("list[int]", tokenizer.encode(completion, add_special_tokens=False))

    def expand(
        self, row: JsonRow, ids: list[int], mask: list[bool] | None, shown: MediaRef
    ) -> tuple[list[int], list[bool] | None, Media | None]:
        """Returns ids with the placeholders of the row's media."""
        if self.processor is None:
            return ids, mask, None
        with row.locating():
            return self.processor.expand(ids, mask, shown, f"{row.path}:{row.line}")

    def input_ids(self, row: JsonRow) -> tuple[list[int], Media | None]:
        row.require("input_ids")
        ids = row.values["input_ids"]
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise row.error(
                f"input_ids must be a list of integers, not {json.dumps(ids, default=str):.80}"
            )
        if self.processor is None:
            _refuse_media(row, [])
            return ids, None
        with row.locating():
            media = MediaLocator(row.values, row.path.parent).with_columns()
            return ids, self.processor.match(ids, media, f"{row.path}:{row.line}")


def _refuse_media(row: JsonRow, messages: Seq[Message]) -> None:
    parts = [
        part
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
    ]
    for kind in KINDS:
        if row.values.get(f"{kind}s") or any(
            isinstance(part, dict) and part.get("type") == kind for part in parts
        ):
            raise row.error(
                f"the row has {kind}s, but this model reads text only; drop them, or give one "
                "that sees"
            )


def _as_string(row: JsonRow, message: Message) -> Message:
    """Joins the parts of a text."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    for part in content:
        if not (
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ):
            raise row.error(
                f'a content part is {part!r:.80}; expected {{"type": "text", "text": ...}}'
            )
    return {**message, "content": "".join(part["text"] for part in content)}


def _encode_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """Returns ids with one BOS if the tokenizer adds it."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer.encode("", add_special_tokens=True)[:1] == [bos]
    return [bos, *ids] if bos is not None and adds_bos and ids[:1] != [bos] else ids


def labelled(row: JsonRow, ids: list[int]) -> tuple[list[int], list[bool]]:
    """Ids without padding, and a mask by the row's labels and masks."""
    names = ("attention_mask", "labels", "completion_mask", "assistant_masks")
    columns = {name: row.values.get(name) for name in names}
    for name, column in columns.items():
        if column is not None and (not isinstance(column, list) or len(column) != len(ids)):
            raise row.error(
                f"{name} must be a list of {len(ids)} numbers, as input_ids is, not "
                f"{quoted(column)}"
            )
    mask = [True] * len(ids)
    if labels := columns["labels"]:
        mask = [label != IGNORED for label in labels]
        others = [n for n, label in enumerate(labels) if label not in (ids[n], IGNORED)]
        if others:
            raise row.error(
                f"labels[{others[0]}] is {quoted(labels[others[0]])}, but input_ids[{others[0]}] "
                f"is {ids[others[0]]}; expected "
                f"the same id, or {IGNORED} where nothing is trained (labels are not shifted)"
            )
    for name in ("completion_mask", "assistant_masks"):
        mask = [m and bool(bit) for m, bit in zip(mask, columns[name] or mask, strict=True)]
    kept = [
        i
        for i, bit in enumerate(columns["attention_mask"] or mask)
        if bit or columns["attention_mask"] is None
    ]
    if not any(mask[i] for i in kept):
        raise row.error("labels and masks leave nothing to train; leave the row out")
    return [ids[i] for i in kept], [mask[i] for i in kept]
