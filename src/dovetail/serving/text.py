"""Text and messages to token ids, and token ids back to text as they come."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from dovetail.data.chat import parsed_call, render
from dovetail.errors import DataError

Result = TypeVar("Result")
HALF = "\ufffd"  # how tokenizers write a part of a character


@dataclass(frozen=True)
class Codec:
    """tokenizer: of transformers. stops: ids that end a sample. banned: ids without text."""

    tokenizer: Any
    stops: Sequence[int]
    banned: Sequence[int]


class Text:
    """A codec that is loaded at its first use, since trainers need none. It has its own thread."""

    def __init__(self, load: Callable[[], Codec]) -> None:
        self._load = load
        self._thread = ThreadPoolExecutor(1, "text")

    @cached_property
    def _codec(self) -> Codec:
        return self._load()

    async def codec(self) -> Codec:
        return await self._run(lambda: self._codec)

    async def encode(self, text: str) -> list[int]:
        return await self._run(lambda: self._codec.tokenizer.encode(text))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        """Ids of the messages and of what opens the answer. DataError if the template refuses."""
        return await self._run(lambda: self._encode_chat(messages, tools, options))

    def _encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int]:
        tokenizer = self._codec.tokenizer
        template = tokenizer.chat_template
        if not template:
            raise DataError("messages: this model has no chat template; use /v1/completions")
        if tools and "tools" not in str(template):
            raise DataError("tools: the model's chat template does not write them")
        given = {**options, "tools": tools or None, "add_generation_prompt": True}
        text = render(tokenizer, messages, **given)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """As templates read it: parts of text joined, arguments of calls as objects, no nulls."""
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(part["text"] for part in content)
    plain.setdefault("content", None)
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [parsed_call(call) for call in calls]
    return plain


class Detokenizer:
    """The text of ids that come in pieces. Half a character waits for its other half."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids = list[int]()
        self._begin = 0  # of the ids that the next text depends on
        self._read = 0  # ids whose text was returned

    def add(self, ids: Sequence[int]) -> str:
        self._ids += ids
        text = self._new_text()
        if text.endswith(HALF):
            return ""
        self._begin = self._read
        self._read = len(self._ids)
        return text

    def end(self) -> str:
        """The text that waits."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._begin : self._read])
        return self._decode(self._ids[self._begin :])[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class StopStrings:
    """Cuts a text that comes in pieces before the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""  # may begin a stop string
        self.found = False

    def add(self, text: str, *, last: bool = False) -> str:
        """The text that is known to be outside of a stop string."""
        if self.found:
            return ""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found = True
            self._held = ""
            return text[: min(places)]
        kept = 0 if last else self._begun(text)
        cut = len(text) - kept
        self._held = text[cut:]
        return text[:cut]

    def _begun(self, text: str) -> int:
        """Characters at the end of the text that begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1)
        for count in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0
