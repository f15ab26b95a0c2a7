"""Tokenizers, and which ids end a text."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dovetail.data import Tokenizer
from dovetail.errors import ModelError
from dovetail.weights.files import parse_json
from dovetail.weights.pretrained import Pretrained

GENERATION_CONFIG = "generation_config.json"


def load_tokenizer(source: Pretrained, *, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer. transformers is imported here, since most scoring needs no text."""
    if not source.has_tokenizer:
        raise ModelError(f"{source.path} has no tokenizer (tokenizer.json); give rows of input_ids, or copy it there")
    auto = importlib.import_module("transformers").AutoTokenizer
    with _Loading(source.path):
        found = auto.from_pretrained(str(source.path), trust_remote_code=trust_remote_code, local_files_only=True)
        found.encode("a", add_special_tokens=True)  # some settings are only read here
        return found


class _Loading:
    """Turns whatever a tokenizer's files provoke into a `ModelError`: its Rust half raises bare `Exception`s."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception):
            told = " ".join(str(error).split())
            hint = "; --trust-remote-code lets it run" if "trust_remote_code" in told else "; fetch its files again"
            raise ModelError(f"{self.path}: its tokenizer does not load: {told}{hint}") from error


def stop_ids(source: Pretrained, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a completion: of the generation config, of the config, and the tokenizer's EOS."""
    configs: list[Mapping[str, Any]] = [source.config]
    if GENERATION_CONFIG in source.sides:
        file = source.sides[GENERATION_CONFIG]
        configs.insert(0, parse_json(file.read_bytes(), str(file)))
    found: set[int] = set()
    for config in configs:
        given = config.get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if not all(type(i) is int for i in ids):
            raise ModelError(f"{source.path}: eos_token_id is {given!r}; expected a token id, a list of them, or null")
        found |= set(ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def text_of(ids: Sequence[int], stops: Sequence[int], tokenizer: Any) -> str:
    """A completion's text: without its stop token and other special ones; empty where there is no tokenizer."""
    kept = [i for i in ids if i not in stops]
    return "" if tokenizer is None else tokenizer.decode(kept, skip_special_tokens=True)
