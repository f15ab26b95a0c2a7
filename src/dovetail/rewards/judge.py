"""A language model as judge, behind an OpenAI-compatible address."""

import asyncio
import hashlib
import json
import os
import re
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.rewards.built_in import numbers

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between attempts
MOST_THREADS = 256


@dataclass(kw_only=True)
class Judge:
    """Asks `model` at `url` (which ends in /v1) for a number.

    prompt: a template; {prompt}, {completion}, {answer} and any column in braces are replaced.
    pattern: a regular expression whose first group is the number; None: the last number of the reply.
    The reward is the number over `scale`. A reply without a number is an error of that sample.
    key_env: the environment variable with the key; the key is sent to `url` and written nowhere.
    cache: a file that keeps replies by request; a resumed run does not ask again.
    """

    url: str
    model: str
    prompt: str
    pattern: str | None
    scale: float
    max_tokens: int
    temperature: float
    key_env: str | None
    retries: int
    request_seconds: float
    cache: str | None
    _key: str = field(init=False, repr=False)
    _replies: "_Cache | None" = field(init=False, repr=False)
    _threads: ThreadPoolExecutor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        key = os.environ.get(self.key_env, "") if self.key_env else ""
        if self.key_env and not key:
            raise LookupError(f"the environment variable {self.key_env}, which reward.judge.key_env names, is not set")
        self._key, self._threads = key, ThreadPoolExecutor(MOST_THREADS)
        self._replies = None if self.cache is None else _Cache(Path(self.cache))

    async def score(self, sample: Mapping[str, Any]) -> float:
        message = {"role": "user", "content": fill(self.prompt, sample)}
        body = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "messages": [message],
        }
        request = json.dumps(body).encode()
        reply = self._replies.get(request) if self._replies else None
        if reply is None:
            reply = await self._ask(request)
            if self._replies:
                self._replies.put(request, reply)
        return self._number(reply) / self.scale

    async def _ask(self, request: bytes) -> str:
        loop, wait = asyncio.get_running_loop(), FIRST_WAIT
        for attempt in range(self.retries + 1):
            reply, error, again = await loop.run_in_executor(self._threads, self._post, request)
            if reply is not None:
                return reply
            if not again or attempt == self.retries:
                break
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        attempts = f" ({attempt + 1} attempts)" if attempt else ""
        raise ConnectionError(f"the judge at {self.url}: {error}{attempts}")

    def _post(self, body: bytes) -> tuple[str | None, str, bool]:
        """The reply; else the error, and whether another attempt may help."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            request = urllib.request.Request(self.url.rstrip("/") + "/chat/completions", body, headers)
            with urllib.request.urlopen(request, timeout=self.request_seconds) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            text = error.read(300).decode(errors="replace")
            return None, self._without_key(f"HTTP {error.code}: {text}"), error.code in RETRIED
        except OSError as error:  # refused, reset, timed out
            return None, f"{error}", True
        try:
            return str(json.loads(answer)["choices"][0]["message"]["content"] or ""), "", False
        except (ValueError, LookupError, TypeError):
            return None, self._without_key(f"no chat completion: {answer[:200]!r}"), False

    def _number(self, reply: str) -> float:
        if self.pattern is None:
            values = numbers(reply)
            if values:
                return float(values[-1])
        elif match := re.search(self.pattern, reply, re.DOTALL):
            return float(match.group(1))
        raise ValueError(
            f"the judge's reply holds no number{' that matches' * (self.pattern is not None)}: {reply!r:.200}"
        )

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def fill(template: str, sample: Mapping[str, Any]) -> str:
    """`template` with {prompt}, {completion}, {answer} and {COLUMN} replaced; other braces stay."""
    prompt = sample["prompt"]
    if isinstance(prompt, list):
        prompt = "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt)
    values = {**sample["columns"], "prompt": prompt, "completion": sample["completion"], "answer": sample["answer"]}
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match.group(1), match.group())), template)


class _Cache:
    """Replies by request, shared by worker processes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, timeout=60.0, isolation_level=None)
        self._db.execute("CREATE TABLE IF NOT EXISTS replies (request BLOB PRIMARY KEY, reply TEXT) WITHOUT ROWID")

    def get(self, request: bytes) -> str | None:
        row = self._db.execute("SELECT reply FROM replies WHERE request = ?", (_digest(request),)).fetchone()
        return None if row is None else str(row[0])

    def put(self, request: bytes, reply: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (_digest(request), reply))


def _digest(request: bytes) -> bytes:
    return hashlib.sha256(request).digest()
