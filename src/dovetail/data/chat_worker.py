"""The process of `chat.Renderer`. JSON lines: a template and its special tokens, or a rendering by the last one."""

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from traceback import walk_tb
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError

from dovetail.errors import Caught, shortened
from dovetail.system import die_with_parent, limit_memory

MAX_ADDED = 1 << 22  # characters of output beyond those of the input
SOURCE = "<template>"  # jinja2's name


def answer(tokenizer: Any, line: str | bytes) -> dict[str, Any]:
    """{"text", "spans": of characters} or {"error"}."""
    text = ""
    spans = list[tuple[int, int]]()
    with Caught() as caught:
        request: Mapping[str, Any] = json.loads(line)
        if request["spans"]:
            text, spans = _marked(tokenizer, request["messages"], **request["options"])
        else:
            text = tokenizer.apply_chat_template(
                request["messages"], tokenize=False, **request["options"]
            )
        text.encode()  # refuses half of a surrogate pair
    if caught.error is not None:
        return {"error": _described(caught.error)}
    if len(text) > len(line) + MAX_ADDED:
        return {"error": f"writes {len(text)} characters, more than {MAX_ADDED} beyond its input"}
    return {"text": text, "spans": spans}


def _described(error: BaseException) -> str:
    words = " ".join(str(error).split())
    words = shortened(
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    )
    if isinstance(error, MemoryError):
        text = "needs too much memory for these messages"
    elif isinstance(error, (TemplateError, ValueError)) and not isinstance(error, UnicodeError):
        text = f"refuses these messages: {words}"
    else:
        text = f"fails on these messages: {type(error).__name__}: {words}"
    lines = [
        line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == SOURCE
    ]
    line = lines[-1] if lines else None
    if isinstance(error, TemplateSyntaxError):
        line = error.lineno
    return text if line is None else f"{text} (line {line} of the template)"


def _marked(
    tokenizer: Any, messages: list[Mapping[str, Any]], **options: Any
) -> tuple[str, list[tuple[int, int]]]:
    """As `apply_chat_template`, with the spans of {% generation %}."""
    known = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    texts, spans = importlib.import_module(
        "transformers.utils.chat_template_utils"
    ).render_jinja_template(
        conversations=[known],
        chat_template=tokenizer.get_chat_template(None, options.get("tools")),
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **options},
    )
    return texts[0], spans[0]


def main() -> NoReturn:
    """Arguments: seconds of a rendering, bytes of memory."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = float(sys.argv[2])
    memory = int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    base = importlib.import_module("transformers.tokenization_utils_base").PreTrainedTokenizerBase
    tokenizer = None
    limit_memory(memory)
    for line in sys.stdin.buffer:
        if line.startswith(b'{"template"'):
            setup = json.loads(line)
            tokenizer = base(
                chat_template=setup["template"],
                model_specific_special_tokens=setup["special_tokens"],
            )
            continue
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = json.dumps(answer(tokenizer, line)) + "\n"
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answers.write(reply)
        answers.flush()
    os._exit(0)
