"""Messages of a row and the ids that a chat template makes of them; of a conversation, those that are trained."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from dovetail.data.chat_renderer import Renderer
from dovetail.data.rows import JsonRow, is_deep
from dovetail.errors import quoted

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    """A tokenizer, None where there is none, and what renders its chat template."""

    tokenizer: Any
    renderer: Renderer

    def encode(self, row: JsonRow, messages: list[Message], **options: bool) -> list[int]:
        """The ids of what the template writes for `messages` and the row's tools."""
        if not self.tokenizer.chat_template:
            raise row.error("messages need a chat template, and the tokenizer has none; write the prompt as a string")
        tools = _tools(row, self.tokenizer.chat_template)
        with row.told():
            text = self.renderer.render(self.tokenizer, messages, tools=tools, **options)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def conversation(self, row: JsonRow, messages: list[Message]) -> tuple[list[int], list[bool]]:
        """The whole conversation's ids, and its mask: trained where an assistant speaks with another weight than 0.

        A turn begins where the template's rendering of what came before it, with the generation prompt, ends, or in the first
        message where turns of other texts begin to differ; and it ends where its own rendering does, or before that at its EOS
        (what the template writes after an EOS no model produces).
        Both must be beginnings of the whole: a template that writes a turn otherwise once more follows is refused.
        """
        ids = self.encode(row, messages)
        mask = [False] * len(ids)
        end_id = self.tokenizer.eos_token_id
        for turn, message in enumerate(messages):
            if not _trains(row, turn, message):
                continue
            through = self.encode(row, messages[: turn + 1])
            before = self._opening(row, messages[:turn], message, through)
            why = ""
            if ids[: len(through)] != through:
                why = "writes this turn differently once more messages follow it"
            elif through[: len(before)] != before:
                why = "opens a turn with a generation prompt that it does not write before this one"
            if why:
                raise row.error(
                    f"message {turn} (assistant): the chat template {why}, so its tokens cannot be told apart; give one row a "
                    'turn: {"prompt": messages, "completion": text}'
                )
            end = len(through)
            if end_id in ids[len(before) : end]:
                end -= ids[len(before) : end][::-1].index(end_id)
            mask[len(before) : end] = [True] * (end - len(before))
        if not any(mask):
            raise row.error("messages without an assistant turn (of weight 1) train nothing; add one")
        return ids, mask

    def _opening(self, row: JsonRow, earlier: list[Message], message: Message, through: list[int]) -> list[int]:
        """What the template writes before the text of an assistant's turn, `through` being all up to the turn's end."""
        if earlier:
            return self.encode(row, earlier, add_generation_prompt=True)
        parts = isinstance(message["content"], list)
        texts: list[Any] = [[{"type": "text", "text": text}] if parts else text for text in "ab"]
        others = [self.encode(row, [{**message, "content": text}]) for text in texts]
        shared = takewhile(lambda ids: len(set(ids)) == 1, zip(through, *others, strict=False))
        return [ids[0] for ids in shared]


def messages_of(row: JsonRow, key: str) -> list[Message]:
    """The row's messages, each with a content, and without other nulls: a table has them, and templates ask for keys."""
    messages = row.values[key]
    is_chat = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    if not is_chat or not all(
        isinstance(message.get("role"), str) and ("content" in message or _says_more(message)) for message in messages
    ):
        what = "a string or messages" if key == "prompt" else "messages"
        raise row.error(
            f'{key} must be {what} such as [{{"role": "user", "content": "Hi"}}], not '
            f"{json.dumps(messages, default=str):.80}"
        )
    for turn, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and _says_more(message)):
            raise row.error(  # templates would write what Python calls it
                f"message {turn} has the content {json.dumps(content, default=str):.80}; expected a string, a list of "
                "parts, or null beside tool calls"
            )
    known = [{k: x for k, x in message.items() if x is not None} for message in messages]
    return [{**message, "content": message.get("content")} for message in known]


def _says_more(message: Message) -> bool:
    """Whether there is more to a message than its role and content, as where it calls tools."""
    return any(value for key, value in message.items() if key not in ("role", "content", "weight"))


def _trains(row: JsonRow, turn: int, message: Message) -> bool:
    """Whether a turn of a conversation is trained: an assistant's, unless its weight is 0."""
    if message["role"] != "assistant":
        return False
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise row.error(f"message {turn} (assistant) has the weight {quoted(weight)}; expected 1, or 0 for not trained")
    return bool(weight)


def _tools(row: JsonRow, template: Any) -> list[Any] | None:
    """The row's tools for the chat template, None without any. A table may hold them as JSON text, as TRL's do."""
    given = row.values.get("tools")
    try:
        tools = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        tools = given
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and (not is_list or is_deep(tools)):
        raise row.error(
            'tools must be a list of JSON schemas such as [{"type": "function", "function": {"name": ...}}], or the JSON text '
            f"of one, not {json.dumps(given, default=str):.80}; rename the column if it is not for the chat template"
        )
    if tools and "tools" not in str(template):
        raise row.error("the row has tools, which the model's chat template does not write; drop or rename the column")
    return tools
