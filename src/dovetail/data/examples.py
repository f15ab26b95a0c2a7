"""Rows of data files -> token sequences, with their images and videos."""

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from dovetail.batch.packed import Media, Sequence
from dovetail.data.chat import Chat
from dovetail.data.columns import extra_columns, is_pair, prompt_column, score_column, sft_column
from dovetail.data.encode import RowEncoder, Tokenizer, labelled
from dovetail.data.files import Source, as_source
from dovetail.data.formats import no_rows, rows_of
from dovetail.data.media import MediaRef
from dovetail.data.processor import Processor
from dovetail.data.rows import JsonRow
from dovetail.errors import DataError, quoted

Example = TypeVar("Example")


@dataclass(frozen=True)
class Limits:
    vocab_size: int
    max_tokens: int | None = None
    overlong: Literal["error", "drop"] = "error"
    remedy: str = "raise trainer.tokens_per_batch, or set data.overlong_rows=drop"
    warn: Callable[[str], None] = lambda _: None
    truncate: Literal["left", "right"] | None = None  # the side that is cut
    together: int | None = None  # tokens of a pair


@dataclass(frozen=True, kw_only=True)
class Prompt:
    id: Any
    ids: tuple[int, ...]
    media: Media | None = None
    prompt: str | list[dict[str, Any]] = ""
    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)  # the row's other keys


@dataclass(frozen=True)
class Preference:
    """Sequences of prompt and completion: a pair, or a single good or bad one."""

    id: Any
    chosen: Sequence | None
    rejected: Sequence | None


Rows = Source | Path | str


def sequences_of(example: Any) -> list[Any]:
    return (
        [example]
        if hasattr(example, "ids")
        else [x for x in vars(example).values() if hasattr(x, "ids")]
    )


class Reading(TypedDict, total=False):
    processor: Processor | None  # of a model that reads media
    template_options: Mapping[str, Any]


def _encoder(tokenizer: Tokenizer | None, reading: Reading) -> RowEncoder:
    chat = Chat(tokenizer, reading.get("template_options") or {})
    return RowEncoder(chat, reading.get("processor"))


def load_prompts(
    source: Rows,
    tokenizer: Tokenizer | None,
    limits: Limits,
    *,
    answers: bool = True,
    **reading: Unpack[Reading],
) -> list[Prompt]:
    """RL rows {"prompt": str | messages, "answer": any, "id"?, ...}; without `answers` also {"input_ids"}."""
    encode = _encoder(tokenizer, reading)

    def example(index: int | str, row: JsonRow) -> Prompt:
        column = prompt_column(row, answers=answers)
        columns = extra_columns(row)
        prompt: Any = ""
        if column == "input_ids":
            ids, media = encode.input_ids(row)
        else:
            prompt, shown = encode.read(row, "prompt")
            ids, _, media = encode.expand(row, encode.prompt(row, prompt), None, shown)
        answer = row.values.get("answer")
        return Prompt(
            id=row.id(index),
            ids=tuple(ids),
            media=media,
            prompt=prompt,
            answer=answer,
            columns=columns,
        )

    return _load(source, example, limits, encode)


def load_sft(
    source: Rows, tokenizer: Tokenizer, limits: Limits, **reading: Unpack[Reading]
) -> list[Sequence]:
    """Rows {"prompt", "completion"}, {"messages"}, {"text"}, or {"input_ids", "labels"}."""
    encode = _encoder(tokenizer, reading)

    def example(_: int | str, row: JsonRow) -> Sequence:
        sequence = read(row)
        trained = sequence.mask or [True] * len(sequence.ids)
        if not any(trained[1:]):
            what = "no token follows another one and is trained"
            raise row.error(f"nothing to train: {what}; add text to the row, or leave it out")
        return sequence

    def read(row: JsonRow) -> Sequence:
        column = sft_column(row)
        if column == "completion":
            return encode.pair(row, column)
        if column == "input_ids":
            ids, media = encode.input_ids(row)
            return Sequence(*labelled(row, ids), media=media)
        if column == "messages":
            messages, shown = encode.read(row, column)
            ids, mask = encode.chat.conversation(row, messages)
        else:
            ids, mask = encode.text(row)
            shown = MediaRef()
        all_ids, all_mask, media = encode.expand(row, ids, mask, shown)
        return Sequence(all_ids, mask=all_mask, media=media)

    return _load(source, example, limits, encode)


def load_preferences(
    source: Rows,
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    paired: bool = False,
    **reading: Unpack[Reading],
) -> list[Preference]:
    """Rows {"prompt", "chosen", "rejected"}, or, unless `paired`, {"prompt", "completion", "label": bool}."""
    encode = _encoder(tokenizer, reading)

    def example(index: int | str, row: JsonRow) -> Preference:
        if is_pair(row, paired=paired):
            return Preference(
                row.id(index), encode.pair(row, "chosen"), encode.pair(row, "rejected")
            )
        sequence = encode.pair(row, "completion")
        good = row.values["label"]
        return Preference(row.id(index), sequence if good else None, None if good else sequence)

    return _load(source, example, limits, encode)


def load_score(
    source: Rows, tokenizer: Tokenizer | None, limits: Limits, **reading: Unpack[Reading]
) -> list[Prompt]:
    """Rows {"input_ids"}, or {"prompt", "completion"}, scored without an EOS."""
    encode = _encoder(tokenizer, reading)

    def example(index: int | str, row: JsonRow) -> Prompt:
        if score_column(row) == "input_ids":
            ids, media = encode.input_ids(row)
        else:
            sequence = encode.pair(row, "completion", ends=False)
            ids = list(sequence.ids)
            media = sequence.media
        return Prompt(id=row.id(index), ids=tuple(ids), media=media)

    return _load(source, example, limits, encode)


def _load(
    source: Rows, make: Callable[[int | str, JsonRow], Example], limits: Limits, encoder: RowEncoder
) -> list[Example]:
    placeholders = (
        frozenset[int]() if encoder.processor is None else encoder.processor.placeholder_ids
    )
    source = as_source(source)
    examples = list[Example]()
    path = source.path
    count = 0
    cut = 0
    for count, row in enumerate(rows_of(source, limits.warn), start=1):
        example = make(f"{source.prefix}{count - 1}" if source.prefix else count - 1, row)
        lengths = [
            _checked_length(row, each.ids, limits, placeholders) for each in sequences_of(example)
        ]
        if limits.max_tokens is not None and max(lengths) > limits.max_tokens:
            shorter = _truncated(row, example, limits)
            if shorter is None and limits.overlong == "drop":
                continue
            if shorter is None:
                most = f"at most {limits.max_tokens} fit"
                raise row.error(
                    f"{max(lengths)} tokens, but {most}; shorten the row, {limits.remedy}"
                )
            example = shorter
            cut = cut + 1
        total = sum(len(each.ids) for each in sequences_of(example))
        if limits.together is not None and total > limits.together:
            if limits.overlong == "drop":
                continue
            raise row.error(
                f"the pair has {total} tokens, but at most {limits.together} fit, since both "
                "share a micro-batch; raise "
                "trainer.tokens_per_batch, set data.max_length with data.truncate=right, or "
                "data.overlong_rows=drop"
            )
        examples.append(example)
    if not count:
        raise no_rows(path)
    if not examples:
        raise DataError(
            f"{path}: all {count} rows are longer than {limits.max_tokens} tokens and dropped by "
            "data.overlong_rows=drop; "
            "raise trainer.tokens_per_batch"
        )
    if len(examples) < count:
        limits.warn(
            f"data.overlong_rows=drop leaves out {count - len(examples)} of {count} rows of "
            f"{path}: they have more than "
            f"{limits.max_tokens} tokens"
        )
    if cut:
        limits.warn(
            f"data.truncate={limits.truncate} shortens {cut} of {count} rows of {path} to "
            f"{limits.max_tokens} tokens"
        )
    return examples


def _checked_length(
    row: JsonRow, ids: Seq[int], limits: Limits, placeholders: frozenset[int]
) -> int:
    if not ids:
        raise row.error("the row has no tokens; it needs at least one")
    outside = next(
        (i for i in ids if not 0 <= i < limits.vocab_size and i not in placeholders), None
    )
    if outside is not None:
        raise row.error(
            f"token id {quoted(outside)} lies outside the model's vocabulary of "
            f"{limits.vocab_size} "
            f"(0 to {limits.vocab_size - 1}); use this model's own tokenizer"
        )
    return len(ids)


def _truncated(row: JsonRow, example: Example, limits: Limits) -> Example | None:
    """None where nothing is to be cut, or nothing to train is left."""
    if limits.truncate is None or limits.max_tokens is None:
        return None
    fields: dict[str, Any] = vars(example)
    if isinstance(example, Preference):
        long = {
            name: x
            for name, x in fields.items()
            if hasattr(x, "ids") and len(x.ids) > limits.max_tokens
        }
        shorter = {name: _truncated(row, x, limits) for name, x in long.items()}
        return None if None in shorter.values() else type(example)(**{**fields, **shorter})
    if fields["media"] is not None:
        raise row.error(
            "a row with images or videos cannot be truncated; shorten it, or set "
            "data.overlong_rows=drop"
        )
    kept = (
        slice(-limits.max_tokens, None) if limits.truncate == "left" else slice(limits.max_tokens)
    )
    mask = fields.get("mask")
    if mask is not None and not any(mask[kept]):
        return None
    return type(example)(
        **{**fields, "ids": fields["ids"][kept], **({} if mask is None else {"mask": mask[kept]})}
    )
