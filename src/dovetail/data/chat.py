"""Messages -> token ids by the chat template, and the mask of trained ones."""

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from traceback import walk_tb
from typing import Any, cast

from jinja2 import TemplateError, TemplateSyntaxError

from dovetail.data.rows import JsonRow, is_deep
from dovetail.errors import Caught, DataError, quoted, shortened

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]  # of characters
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ROLES = ("system", "user", "assistant", "tool")
METHODS = ("apply_chat_template", "get_chat_template")
SOURCE = "<template>"  # jinja2's name
MAX_ADDED = 1 << 22  # characters of a rendering beyond those of the messages


def render(tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    """As `apply_chat_template`; DataError where the template fails or writes too much.

    transformers renders in jinja2's sandbox, where a template can call and change nothing.
    """
    text = ""
    with Caught() as caught:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        text.encode()  # refuses half of a surrogate pair
    return _checked(text, messages, caught.error)


def render_marked(tokenizer: Any, messages: Sequence[Message], **options: Any) -> tuple[str, Spans]:
    """As `render`, with the spans that the template marks as generated."""
    text = ""
    spans: Spans = []
    with Caught() as caught:
        library = importlib.import_module("transformers.utils.chat_template_utils")
        (text,), (spans,) = library.render_jinja_template(
            conversations=[messages],
            chat_template=tokenizer.get_chat_template(None, options.get("tools")),
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **options},
        )
        text.encode()
    return _checked(text, messages, caught.error), spans


def _checked(text: str, messages: Sequence[Any], error: BaseException | None) -> str:
    if error is not None:
        raise DataError(f"the chat template {_failure(error)}") from error
    allowed = len(str(messages)) + MAX_ADDED
    if len(text) > allowed:
        much = f"{len(text)} characters, more than {MAX_ADDED} beyond its input"
        raise DataError(f"the chat template writes {much}")
    return text


def _failure(error: BaseException) -> str:
    letters = " ".join(str(error).split())
    words = shortened("".join(c if c.isprintable() else ascii(c)[1:-1] for c in letters))
    if isinstance(error, (TemplateError, ValueError)) and not isinstance(error, UnicodeError):
        text = f"refuses these messages: {words}"
    else:
        text = f"fails on these messages: {type(error).__name__}: {words}"
    frames = walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == SOURCE]
    if isinstance(error, TemplateSyntaxError):
        lines.append(error.lineno)
    return f"{text} (line {lines[-1]} of the template)" if lines else text


def renders_itself(tokenizer: Any) -> bool:
    base = importlib.import_module("transformers.tokenization_utils_base").PreTrainedTokenizerBase
    return any(getattr(type(tokenizer), name) is not getattr(base, name) for name in METHODS)


@dataclass(frozen=True)
class Chat:
    """A tokenizer with its chat template. options: of every rendering."""

    tokenizer: Any  # or None
    options: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, row: JsonRow, messages: list[Message], **options: bool) -> list[int]:
        given = self._options(row)
        with row.locating():
            text = render(self.tokenizer, messages, **given, **options)
        return cast("list[int]", self.tokenizer.encode(text, add_special_tokens=False))

    def _options(self, row: JsonRow) -> dict[str, Any]:
        tools = tools_of(row, self.tokenizer.chat_template)
        return {**self.options, **_template_options(row), "tools": tools}

    def conversation(self, row: JsonRow, messages: list[Message]) -> tuple[list[int], list[bool]]:
        """Ids, and a mask of assistant turns but those of weight 0.

        A turn is what the template marks as generated, else from the end of the generation prompt to its EOS, or its end.
        """
        marks = GENERATION.search(str(self.tokenizer.chat_template))
        if marks and self.tokenizer.is_fast and not renders_itself(self.tokenizer):
            return self._marked(row, messages)
        ids = self.encode(row, messages)
        mask = [False] * len(ids)
        end_id = self.tokenizer.eos_token_id
        for turn, message in enumerate(messages):
            if not _trains(message):
                continue
            through = self.encode(row, messages[: turn + 1])
            before = self._opening(row, messages[:turn], message, through)
            start = len(before)
            end = len(through)
            why = ""
            if ids[:end] != through:
                why = "writes this turn differently once more messages follow it"
            elif through[:start] != before:
                why = "opens a turn with a generation prompt that it does not write before this one"
            if why:
                raise row.error(
                    f"message {turn} (assistant): the chat template {why}, so its tokens cannot "
                    "be told apart; give one row a "
                    'turn: {"prompt": messages, "completion": text}'
                )
            if end_id in ids[start:end]:
                end -= ids[start:end][::-1].index(end_id)
            mask[start:end] = [True] * (end - start)
        return ids, _trained(row, mask)

    def _marked(self, row: JsonRow, messages: list[Message]) -> tuple[list[int], list[bool]]:
        given = self._options(row)
        with row.locating():
            text, spans = render_marked(self.tokenizer, messages, **given)
        trains = [_trains(message) for message in messages if message["role"] == "assistant"]
        if len(spans) != len(trains):
            raise row.error(
                f"the chat template marks {len(spans)} turns as generated, but the messages have "
                f"{len(trains)} of the "
                "assistant; give another template with data.chat_template"
            )
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        kept = [span for span, is_trained in zip(spans, trains, strict=True) if is_trained]
        places = encoded["offset_mapping"]
        mask = [any(start < span[1] and end > span[0] for span in kept) for start, end in places]
        return encoded["input_ids"], _trained(row, mask)

    def _opening(
        self, row: JsonRow, earlier: list[Message], message: Message, through: list[int]
    ) -> list[int]:
        """The ids of `through` before an assistant's text."""
        if earlier:
            return self.encode(row, earlier, add_generation_prompt=True)
        parts = isinstance(message["content"], list)
        texts: list[Any] = [[{"type": "text", "text": text}] if parts else text for text in "ab"]
        others = [self.encode(row, [{**message, "content": text}]) for text in texts]
        shared = takewhile(lambda ids: len(set(ids)) == 1, zip(through, *others, strict=False))
        return [ids[0] for ids in shared]


def messages_of(row: JsonRow, key: str) -> list[Message]:
    """The row's messages, each with a content and no other nulls."""
    messages = row.values[key]
    is_chat = (
        isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) for message in messages)
    )
    if not is_chat or not all(
        isinstance(message.get("role"), str) and ("content" in message or _says_more(message))
        for message in messages
    ):
        what = "a string or messages" if key == "prompt" else "messages"
        raise row.error(
            f'{key} must be {what} such as [{{"role": "user", "content": "Hi"}}], not '
            f"{json.dumps(messages, default=str):.80}"
        )
    for turn, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and _says_more(message)):
            raise row.error(
                f"message {turn} has the content {json.dumps(content, default=str):.80}; "
                "expected a string, a list of "
                "parts, or null with tool calls"
            )
        _check_weight(row, turn, message)
    known = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    for message in known:
        message.setdefault("content", None)
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [parsed_call(call) for call in calls]
    return [*known]


def parsed_call(call: Any) -> Any:
    """Returns a call whose arguments are an object, for templates; OpenAI's are its JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return (
        {**call, "function": {**function, "arguments": arguments}}
        if isinstance(arguments, dict)
        else call
    )


def _template_options(row: JsonRow) -> dict[str, Any]:
    """Returns arguments of the template from the row's columns, as TRL and verl name them."""
    options = row.values.get("chat_template_kwargs")
    thinking = row.values.get("enable_thinking")
    if options is not None and not isinstance(options, dict):
        raise row.error(
            f"chat_template_kwargs is {quoted(options)}; expected a mapping, as "
            f"{{enable_thinking: false}}"
        )
    given = {"enable_thinking": thinking, **(options or {})}
    return {key: value for key, value in given.items() if value is not None}


def _trained(row: JsonRow, mask: list[bool]) -> list[bool]:
    if not any(mask):
        raise row.error("messages without an assistant turn (of weight 1) train nothing; add one")
    return mask


def _says_more(message: Message) -> bool:
    return any(
        value
        for key, value in message.items()
        if key not in ("role", "content", "weight", "step_loss_mask")
    )


def _trains(message: Message) -> bool:
    if message["role"] != "assistant":
        return False
    return bool(_weight_of(message))


def _weight_of(message: Message) -> Any:
    """Returns what OpenAI calls weight and slime step_loss_mask."""
    return message.get("weight", message.get("step_loss_mask", 1))


def _check_weight(row: JsonRow, turn: int, message: Message) -> None:
    weight = _weight_of(message)
    if weight is not None and weight not in (0, 1):
        role = message["role"]
        expected = "expected 1, or 0 for not trained"
        raise row.error(f"message {turn} ({role}) has the weight {quoted(weight)}; {expected}")


def tools_of(row: JsonRow, template: Any) -> list[Any] | None:
    """The tools of a row of messages, which are a list or its JSON text as in TRL's tables.

    Raises DataError where there is no chat template, or where it does not write tools.
    """
    if not template:
        raise row.error(
            "messages need a chat template, and the tokenizer has none; name a Jinja file with "
            "data.chat_template, or write the prompt as a string"
        )
    column = row.values.get("tools")
    try:
        tools = json.loads(column or "null") if isinstance(column, str) else column
    except (ValueError, RecursionError):
        tools = column
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and (not is_list or is_deep(tools)):
        given = f"{json.dumps(column, default=str):.80}"
        raise row.error(
            'tools must be a list of JSON schemas such as [{"type": "function", "function": '
            f'{{"name": ...}}}}], or the JSON text of one, not {given}; rename the column if it is '
            "not for the chat template"
        )
    if tools and "tools" not in str(template):
        raise row.error(
            "the row has tools, which the model's chat template does not write; drop or rename the "
            "column, or name another template with data.chat_template"
        )
    return tools


def odd_turns(messages: Sequence[Message], template: Any) -> list[str]:
    """What is unusual in the messages of a prompt, as words behind `the prompt`."""
    found = []
    roles = [str(message["role"]) for message in messages]
    unknown = [role for role in roles if role not in ROLES and role not in str(template)]
    if unknown:
        found.append(
            f"has the role {quoted(unknown[0])}, which the chat template does not name; expected "
            f"one of {', '.join(ROLES)}"
        )
    if roles[-1] == "assistant":
        found.append(
            "ends with a turn of the assistant, which completions go on with; drop that turn where "
            "they are to be answers of their own"
        )
    return found
