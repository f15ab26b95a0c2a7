"""Judges and reward models behind an address."""

import asyncio
import hashlib
import http.client
import json
import os
import re
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dovetail.rewards.built_in import compiled, numbers

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0  # seconds between attempts
MAX_THREADS = 256


@dataclass(kw_only=True)
class Address:
    """A server. The key is sent to `url` and written nowhere."""

    url: str
    key_env: str | None  # the environment variable with the key
    retries: int
    request_seconds: float
    _key: str = field(init=False, repr=False)
    _threads: ThreadPoolExecutor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._key = os.environ.get(self.key_env, "") if self.key_env else ""
        self._threads = ThreadPoolExecutor(MAX_THREADS)
        if self.key_env and not self._key:
            raise LookupError(
                f"the environment variable {self.key_env}, which key_env names, is not set"
            )

    async def post(self, path: str, body: bytes) -> Any:
        loop = asyncio.get_running_loop()
        wait = FIRST_WAIT
        for attempt in range(self.retries + 1):
            answer, error, again = await loop.run_in_executor(self._threads, self._post, path, body)
            if answer is not None:
                return answer
            if not again or attempt == self.retries:
                break
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        attempts = f" ({attempt + 1} attempts)" if attempt else ""
        raise ConnectionError(f"the server at {self.url}: {error}{attempts}")

    def _post(self, path: str, body: bytes) -> tuple[Any, str, bool]:
        """The answer, or the error; whether to try again."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            request = urllib.request.Request(self.url.rstrip("/") + path, body, headers)
            with urllib.request.urlopen(request, timeout=self.request_seconds) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            text = error.read(300).decode(errors="replace")
            return None, self.without_key(f"HTTP {error.code}: {text}"), error.code in RETRIED
        except (
            OSError,
            http.client.HTTPException,
        ) as error:  # refused, reset, timed out, cut short
            return None, f"{error}", True
        try:
            return json.loads(answer), "", False
        except ValueError:
            return None, self.without_key(f"the answer is no JSON: {answer[:200]!r}"), False

    def without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


class Judge:
    """A model at an address that ends in /v1; the reward is the number in its reply over `scale`.

    prompt: as `fill`. pattern: its first group is the number (None: the last one). request: model, max_tokens, temperature.
    """

    def __init__(
        self,
        prompt: str,
        pattern: str | None,
        scale: float,
        cache: str | None,
        request: Mapping[str, Any],
        **address: Any,
    ) -> None:
        self._prompt = prompt
        self._scale = scale
        self._request = dict(request)
        self.pattern = None if pattern is None else compiled(pattern, "reward.judge.pattern")
        self._address = Address(**address)
        self._replies = None if cache is None else _Cache(Path(cache))

    async def score(self, sample: Mapping[str, Any]) -> float:
        message = {"role": "user", "content": fill(self._prompt, sample)}
        request = json.dumps({**self._request, "messages": [message]}).encode()
        reply = self._replies.get(request) if self._replies else None
        if reply is None:
            answer = await self._address.post("/chat/completions", request)
            try:
                reply = str(answer["choices"][0]["message"]["content"] or "")
            except (LookupError, TypeError):
                raise ValueError(
                    self._address.without_key(f"the judge gave no completion: {answer!r:.200}")
                ) from None
            if self._replies:
                self._replies.put(request, reply)
        return self._number(reply) / self._scale

    def _number(self, reply: str) -> float:
        if self.pattern is None:
            values = numbers(reply)
            if values:
                return float(values[-1])
        elif match := self.pattern.search(reply):
            return float(match.group(1))
        raise ValueError(
            f"the judge's reply holds no number{' that matches' * bool(self.pattern)}: "
            f"{reply!r:.200}"
        )


class RemoteModel:
    """A reward model behind an address, as OpenRLHF's: POST {query, prompts, labels} -> {rewards}."""

    def __init__(self, **address: Any) -> None:
        self._address = Address(**address)

    async def score(self, samples: Sequence[Mapping[str, Any]]) -> list[float]:
        prompts = [as_text(sample["prompt"]) for sample in samples]
        query = [
            prompt + sample["completion"] for prompt, sample in zip(prompts, samples, strict=True)
        ]
        body = {
            "query": query,
            "prompts": prompts,
            "labels": [sample["answer"] for sample in samples],
        }
        answer = await self._address.post("", json.dumps(body).encode())
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list):
            raise ValueError(f"the reward model answered without a list `rewards`: {answer!r:.200}")
        return [
            reward[0] if isinstance(reward, list) and len(reward) == 1 else reward
            for reward in rewards
        ]


def as_text(prompt: Any) -> str:
    if isinstance(prompt, list):
        return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt)
    return str(prompt)


def fill(template: str, sample: Mapping[str, Any]) -> str:
    """`template` with {prompt}, {completion}, {answer} and {COLUMN} replaced; other braces stay."""
    own = {
        "prompt": as_text(sample["prompt"]),
        "completion": sample["completion"],
        "answer": sample["answer"],
    }
    values = {**sample["columns"], **own}
    return re.sub(
        r"\{(\w+)\}", lambda match: str(values.get(match.group(1), match.group())), template
    )


class _Cache:
    """Shared by worker processes. The first request makes the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _db(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self._path, timeout=60.0, isolation_level=None)
        db.execute(
            "CREATE TABLE IF NOT EXISTS replies (request BLOB PRIMARY KEY, reply TEXT) WITHOUT "
            "ROWID"
        )
        return db

    def get(self, request: bytes) -> str | None:
        key = hashlib.sha256(request).digest()
        row = self._db.execute("SELECT reply FROM replies WHERE request = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, request: bytes, reply: str) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO replies VALUES (?, ?)",
            (hashlib.sha256(request).digest(), reply),
        )
