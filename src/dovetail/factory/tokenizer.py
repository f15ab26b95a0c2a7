"""Tokenizers, processors, stop ids and banned ids."""

import contextlib
import fcntl
import importlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils.hub import HF_MODULES_CACHE

from dovetail.arch.common import is_id
from dovetail.data.encode import Tokenizer
from dovetail.data.media import pillow
from dovetail.data.processor import Processor
from dovetail.errors import ModelError, quoted
from dovetail.hf.kimi import KimiImages, published
from dovetail.hf.transformers_model import known_config
from dovetail.hf.vision import FAMILIES
from dovetail.jsonl import parse_json
from dovetail.weights.hf_directory import Pretrained
from dovetail.weights.safe_paths import refuse_without_tokenizer

GENERATION_CONFIG = "generation_config.json"
PREPROCESSOR_CONFIG = "preprocessor_config.json"
LOCK = ".dovetail.lock"


def load_tokenizer(source: Pretrained, *, trust_remote_code: bool = False) -> Any:
    """Imports transformers late: most scoring needs no text."""
    refuse_without_tokenizer(source.path, source.auxiliary)
    auto = importlib.import_module("transformers").AutoTokenizer
    with _loading(source.path, "tokenizer", trusted=trust_remote_code):
        tokenizer = auto.from_pretrained(
            str(source.path), trust_remote_code=trust_remote_code, local_files_only=True
        )
        tokenizer.encode("a", add_special_tokens=True)  # reads the remaining settings
        words = tokenizer.get_vocab()
        if len(words) > 1 and len(set(words.values())) == 1:
            raise ModelError(f"all its {len(words)} words have the same id")
        return tokenizer


def load_processor(source: Pretrained, *, trust_remote_code: bool = False) -> Processor | None:
    """None for a text model. Files are read at the first image or video."""
    if FAMILIES.get(source.spec.family) is None:
        return None
    config = known_config(source.config)

    def load(kind: str) -> Any:
        pillow("Image")
        if kind == "AutoImageProcessor" and PREPROCESSOR_CONFIG in source.auxiliary:
            file = source.auxiliary[PREPROCESSOR_CONFIG]
            settings = published(parse_json(file.read_bytes(), str(file)))
            if settings is not None:
                return KimiImages(settings)
        transformers = importlib.import_module("transformers")
        with _loading(source.path, "processor of images and videos", trusted=trust_remote_code):
            auto = getattr(transformers, kind)
            return auto.from_pretrained(
                str(source.path), trust_remote_code=trust_remote_code, local_files_only=True
            )

    images = partial(load, "AutoImageProcessor")
    both = partial(load, "AutoProcessor")
    return Processor(config.image_token_id, config.video_token_id, images, both)


@contextlib.contextmanager
def _loading(path: Path, what: str, *, trusted: bool) -> Iterator[None]:
    """Any exception becomes ModelError: tokenizers raises bare ones. Trusted code is copied to a cache, so one at a time."""
    try:
        with contextlib.ExitStack() as stack:
            if trusted:
                cache = Path(HF_MODULES_CACHE)
                cache.mkdir(parents=True, exist_ok=True)
                fcntl.flock(stack.enter_context(open(cache / LOCK, "w")), fcntl.LOCK_EX)
            yield
    except Exception as error:
        cause = " ".join(str(error).split())
        hint = "; fetch its files again"
        if "trust_remote_code" in cause:
            hint = "; --trust-remote-code lets it run"
        elif "torchvision" in cause.lower():
            hint = "; pip install 'dovetail-rl[video]'"
        raise ModelError(f"{path}: its {what} does not load: {cause}{hint}") from error


def stop_ids(source: Pretrained, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the ids of generation_config.json, config.json and the tokenizer."""
    configs: list[Mapping[str, Any]] = [source.config]
    if GENERATION_CONFIG in source.auxiliary:
        file = source.auxiliary[GENERATION_CONFIG]
        configs.insert(0, parse_json(file.read_bytes(), str(file)))
    ids_found: set[int] = set()
    for config in configs:
        eos = config.get("eos_token_id")
        ids: list[Any] = eos if isinstance(eos, list) else [eos]
        if eos is None:
            ids = []
        size = source.spec.vocab_size
        if not all(is_id(i, size) for i in ids):
            expected = f"expected an id below vocab_size={size}, a list of them, or null"
            raise ModelError(f"{source.path}: eos_token_id is {quoted(eos)}; {expected}")
        ids_found |= set(ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids_found.add(tokenizer.eos_token_id)
    return tuple(sorted(ids_found))


def banned_ids(
    source: Pretrained, tokenizer: Any, processor: Processor | None, stops: Sequence[int]
) -> tuple[int, ...]:
    """Placeholders of images and videos, and ids without text."""
    vocab_size = source.spec.vocab_size
    banned = set[int]()
    if tokenizer is not None:
        known = set(tokenizer.get_vocab().values())  # ids may share a text
        known = known if len(known) >= len(tokenizer) else set(range(len(tokenizer)))
        banned = set(range(vocab_size)) - known - set(stops)
    if processor is not None:
        banned |= {i for i in processor.placeholder_ids if i < vocab_size}
    return tuple(sorted(banned))


def text_of(ids: Sequence[int], stops: Sequence[int], tokenizer: Any) -> str:
    kept = [i for i in ids if i not in stops]
    return "" if tokenizer is None else tokenizer.decode(kept, skip_special_tokens=True)
