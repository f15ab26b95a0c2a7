"""The rows that a recipe names, and what is checked of them before a run. Imports no torch."""

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.data.chat import Message, messages_of, odd_turns, tools_of
from dovetail.data.columns import is_pair, prompt_column, sft_column
from dovetail.data.files import Source
from dovetail.data.formats import first_rows
from dovetail.data.rows import JsonRow
from dovetail.errors import ConfigError
from dovetail.recipe.data import DataSection, SourceSection
from dovetail.recipe.reward import RewardSection
from dovetail.recipe.schema import Recipe
from dovetail.rewards.built_in import BUILT_IN
from dovetail.weights.safe_paths import TOKENIZER_FILES

TEMPLATE = "chat_template.jinja"
SETTINGS = "tokenizer_config.json"
OWN_CODE = "auto_map"  # in SETTINGS: the tokenizer is code of the model
ELSEWHERE = "tekken.json"  # a tokenizer whose template is in none of these files
Given = str | Sequence[str | SourceSection] | None  # data.train, data.eval or a set's data
Columns = Callable[[JsonRow], str]  # the column of a row that is read; DataError


@dataclass(frozen=True)
class Template:
    """The chat template of a tokenizer. is_known: False where only loading it would tell."""

    text: str
    is_known: bool = True

    @classmethod
    def of(cls, folder: Path, given: str | None) -> "Template":
        """given: the file that replaces the template of the model in `folder`."""
        if given is not None:
            return cls(read_template(given))
        with suppress(OSError, ValueError):  # which loading it will name
            if (folder / TEMPLATE).is_file():
                return cls((folder / TEMPLATE).read_text(encoding="utf-8"))
            settings: Any = {}
            if (folder / SETTINGS).is_file():
                settings = json.loads((folder / SETTINGS).read_bytes())
            is_plain = any((folder / name).is_file() for name in TOKENIZER_FILES)
            if is_plain and not (folder / ELSEWHERE).exists() and OWN_CODE not in settings:
                return cls(str(settings.get("chat_template") or ""))
        return cls.unknown()

    @classmethod
    def unknown(cls) -> "Template":
        return cls("", is_known=False)


@dataclass(frozen=True)
class RowCheck:
    """What is known of rows without a tokenizer. is_prompt: completions are sampled for them."""

    columns: Columns
    template: Template
    is_prompt: bool = False

    def first_of(self, source: Source, say: Callable[[str], None]) -> list[JsonRow]:
        """The first rows of `source`. DataError for the first bad one."""
        rows = list[JsonRow]()
        noted = set[str]()
        for row in first_rows(source):
            rows.append(row)
            for note in self._notes(row):
                if note not in noted:
                    say(f"{row.path}:{row.line}: the prompt {note}")
                noted.add(note)
        return rows

    def _notes(self, row: JsonRow) -> list[str]:
        messages = self._messages(row)
        if not messages or not self.template.is_known:
            return []
        tools_of(row, self.template.text)
        return odd_turns(messages, self.template.text) if self.is_prompt else []

    def _messages(self, row: JsonRow) -> list[Message]:
        column = self.columns(row)
        name = "messages" if column == "messages" else "prompt"
        if column in ("text", "input_ids") or isinstance(row.values[name], str):
            return []
        return messages_of(row, name)


def columns_of(recipe: Recipe) -> Columns:
    """Returns what finds the column that is read of a row."""
    algorithm = recipe.algorithm
    if algorithm.rows == "completion":
        return sft_column
    if algorithm.rows == "prompt":
        answers = algorithm.rewarded and reads_answer(recipe.reward)
        return partial(prompt_column, answers=answers)
    paired = algorithm.rows == "pair"
    return lambda row: "chosen" if is_pair(row, paired=paired) else "completion"


def sources_of(data: DataSection, given: Given) -> Iterator[Source]:
    parts = listed(given)
    for part in parts:
        yield Source(
            path=part.path,
            subset=part.subset,
            split=part.split,
            format=part.format or data.format,
            columns=data.columns if part.columns is None else part.columns,
            chat=data.apply_chat_template,
            prefix=f"{part.path}:" if len(parts) > 1 else "",
        )


def listed(given: Given) -> list[SourceSection]:
    if given is None:
        return []
    parts = [given] if isinstance(given, str) else given
    return [SourceSection(path=part) if isinstance(part, str) else part for part in parts]


def reads_answer(reward: RewardSection) -> bool:
    """Whether a built-in reward needs `answer`."""
    return read_answer(part.name for part in reward.labelled().values() if part.name is not None)


def read_answer(names: Iterable[str]) -> bool:
    """names: of rewards."""
    builtins = [BUILT_IN[name] for name in names if name in BUILT_IN]
    return any("answer" in inspect.signature(builtin).parameters for builtin in builtins)


def read_template(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"data.chat_template {path} cannot be read: {error}; give a Jinja file"
        raise ConfigError(problem) from error
