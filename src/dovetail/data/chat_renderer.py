"""Chat templates, rendered by transformers in a process with limits of time and memory.

A template comes with the model: it is a program of a stranger's, which may fail, never end or fill the memory. A class of
tokenizers with a rendering of its own is Python code that the user has trusted, and runs in this process.
"""

import contextlib
import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from dovetail.data.chat_worker import answer
from dovetail.errors import DataError

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from dovetail.data.chat_worker import main; main()"
METHODS = ("apply_chat_template", "get_chat_template")


class Renderer:
    """Renders messages by tokenizers' templates. Its process starts with the first of them and ends with the outermost `with`.

    seconds: of processor time for one rendering. memory: bytes for all that templates make.
    """

    def __init__(self, *, seconds: float = 5.0, memory: int = 1 << 29) -> None:
        self.seconds, self.memory = seconds, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._setup = ""  # of the tokenizer that the process has
        self._depth = 0  # of `with` blocks

    def __enter__(self) -> Self:
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._process is not None and not self._depth:
            self._process.kill()
            self._end(self._process)

    def render(self, tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
        """What the tokenizer's `apply_chat_template` writes. Raises DataError where the template fails or exceeds a limit."""
        request = json.dumps({"messages": messages, "options": options}, default=_placeholder)
        found = answer(tokenizer, request) if _renders_itself(tokenizer) else self._ask(tokenizer, request)
        if "error" in found:
            raise DataError(f"the chat template {found['error']}")
        return found["text"]

    def _ask(self, tokenizer: Any, request: str) -> dict[str, str]:
        setup = json.dumps({"template": tokenizer.chat_template, "special_tokens": tokenizer.special_tokens_map})
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        lines = [request] if setup == self._setup else [setup, request]
        self._setup = setup
        with contextlib.suppress(BrokenPipeError):  # the end of a process shows below
            process.stdin.writelines(line.encode() + b"\n" for line in lines)
            process.stdin.flush()
        line = process.stdout.readline()
        if line.endswith(b"\n"):
            found: dict[str, str] = json.loads(line)
            return found
        code = self._end(process)
        if code >= 0:
            raise RuntimeError(f"the process that renders chat templates ended with exit code {code}")
        if code == -signal.SIGPROF:
            return {"error": f"takes more than {self.seconds:g} s of processor time for these messages"}
        return {"error": f"ends the process that renders it by signal {-code}"}

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), str(self.seconds), str(self.memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent
        )

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        process.communicate()
        self._process, self._setup = None, ""
        return process.returncode


def _renders_itself(tokenizer: Any) -> bool:
    base = importlib.import_module("transformers.tokenization_utils_base").PreTrainedTokenizerBase
    return any(getattr(type(tokenizer), name) is not getattr(base, name) for name in METHODS)


def _placeholder(value: object) -> str:
    """What transformers shows a template of a value that is no JSON, such as a date of a parquet file."""
    return f"<{type(value).__name__}>"
