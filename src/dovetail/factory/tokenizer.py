"""Tokenizers and processors, and which ids end a text or never belong to one."""

import contextlib
import fcntl
import importlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers.utils.hub import HF_MODULES_CACHE

from dovetail.arch.transformers_spec import TransformersSpec
from dovetail.data.examples import Tokenizer
from dovetail.data.media import pillow
from dovetail.data.processor import Processor
from dovetail.errors import ModelError, quoted
from dovetail.hf.kimi_images import KimiImages, published
from dovetail.hf.transformers_model import known_config
from dovetail.hf.vision import FAMILIES
from dovetail.weights.hf_directory import Pretrained
from dovetail.weights.safetensors import parse_json

GENERATION_CONFIG, PREPROCESSOR_CONFIG = "generation_config.json", "preprocessor_config.json"
LOCK = ".dovetail.lock"


def load_tokenizer(source: Pretrained, *, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer. transformers is imported here, since most scoring needs no text."""
    if not source.has_tokenizer:
        raise ModelError(f"{source.path} has no tokenizer (tokenizer.json); give rows of input_ids, or copy it there")
    auto = importlib.import_module("transformers").AutoTokenizer
    with _Loading(source.path, "tokenizer"), _turn(trusted=trust_remote_code):
        found = auto.from_pretrained(str(source.path), trust_remote_code=trust_remote_code, local_files_only=True)
        found.encode("a", add_special_tokens=True)  # some settings are only read here
        return found


def load_processor(source: Pretrained, *, trust_remote_code: bool = False) -> Processor | None:
    """How the model sees; None for one that reads text only. Its files are read when the first image or video comes."""
    if not isinstance(source.spec, TransformersSpec) or FAMILIES.get(source.spec.family) is None:
        return None
    config = known_config(source.config)

    def load(kind: str) -> Any:
        pillow("Image")
        if kind == "AutoImageProcessor" and PREPROCESSOR_CONFIG in source.sides:
            file = source.sides[PREPROCESSOR_CONFIG]
            settings = published(parse_json(file.read_bytes(), str(file)))
            if settings is not None:
                return KimiImages(settings)
        transformers = importlib.import_module("transformers")
        with _Loading(source.path, "processor of images and videos"), _turn(trusted=trust_remote_code):
            auto = getattr(transformers, kind)
            return auto.from_pretrained(str(source.path), trust_remote_code=trust_remote_code, local_files_only=True)

    return Processor(
        config.image_token_id,
        config.video_token_id,
        partial(load, "AutoImageProcessor"),
        partial(load, "AutoProcessor"),
    )


@contextlib.contextmanager
def _turn(*, trusted: bool) -> Iterator[None]:
    """One process of a host: transformers copies code into its cache to import it, and half a file does not import."""
    if not trusted:
        yield
        return
    cache = Path(HF_MODULES_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Loading:
    """Turns whatever a tokenizer's or a processor's files provoke into a `ModelError`: a tokenizer's Rust half raises
    bare `Exception`s."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception):
            told = " ".join(str(error).split())
            hint = "; fetch its files again"
            if "trust_remote_code" in told:
                hint = "; --trust-remote-code lets it run"
            elif "torchvision" in told.lower():
                hint = "; pip install 'dovetail[video]'"
            raise ModelError(f"{self.path}: its {self.what} does not load: {told}{hint}") from error


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
            raise ModelError(
                f"{source.path}: eos_token_id is {quoted(given)}; expected a token id, a list of them, or null"
            )
        found |= set(ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def banned_ids(
    source: Pretrained, tokenizer: Any, processor: Processor | None, stops: Sequence[int]
) -> tuple[int, ...]:
    """Ids that no completion may have: those that stand for images and videos, and those that the tokenizer lacks."""
    vocab_size, found = source.spec.vocab_size, set[int]()
    if tokenizer is not None:
        known = set(tokenizer.get_vocab().values())  # with holes, perhaps; or fewer, where several ids have one text
        known = known if len(known) >= len(tokenizer) else set(range(len(tokenizer)))
        found = set(range(vocab_size)) - known - set(stops)
    if processor is not None:
        found |= {i for i in processor.stand_ins if i < vocab_size}
    return tuple(sorted(found))


def text_of(ids: Sequence[int], stops: Sequence[int], tokenizer: Any) -> str:
    """A completion's text: without its stop token and other special ones; empty where there is no tokenizer."""
    kept = [i for i in ids if i not in stops]
    return "" if tokenizer is None else tokenizer.decode(kept, skip_special_tokens=True)
