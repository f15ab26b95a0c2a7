"""The section `data` of a recipe."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, ValidationError

from dovetail.errors import quoted
from dovetail.recipe.types import Options, PathText, RowFormat, Section, key


class SourceSection(Section):
    """A part of the rows: keys of one entry of data.train or data.eval."""

    path: PathText
    weight: PositiveFloat | None = None
    subset: str | None = None
    split: str = "train"
    format: RowFormat | None = None
    columns: Mapping[str, str] | None = None


def _checked(given: Any) -> Any:
    """One message; a union would give one per kind."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(
            f"{quoted(given)} is no path, and no list of paths or of {{path: PATH, weight: 1.0}}"
        )
    for part in given:
        if not isinstance(part, str | SourceSection):
            try:
                SourceSection.model_validate(part)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"])) or "a part"
                keys = ", ".join(SourceSection.model_fields)
                raise ValueError(
                    f"{where} is {quoted(first['input'])}: {first['msg']} (keys: {keys})"
                ) from None
    weights = [part.get("weight") for part in given if isinstance(part, Mapping)]
    if any(weights) and (None in weights or len(weights) < len(given)):
        raise ValueError(
            "some parts have a weight, and some have none; give every part a weight, or none"
        )
    return given


Parts = Annotated[tuple[PathText | SourceSection, ...], Field(strict=False, min_length=1)]
Sources = Annotated[PathText | Parts, BeforeValidator(_checked)]


class DataSection(Section):
    """Rows to learn from."""

    train: Sources = Field(
        description="file, directory, glob, hub name (name@revision), a list of them, or a mixture: a list of "
        "{path, weight, subset, split, format, columns}"
    )
    eval: Sources | None = key(None, "held-out rows, named as those of data.train")
    format: RowFormat = key("auto", "whose rows they are; auto: by their columns")
    columns: Mapping[str, str] = key({}, "names of columns: {prompt: theirs, answer: theirs.inner}")
    apply_chat_template: bool = key(False, "a prompt that is a string becomes a user's message")
    chat_template: PathText | None = key(None, "Jinja file that replaces the model's chat template")
    chat_template_kwargs: Options = key(
        {}, "arguments of the chat template, such as enable_thinking"
    )
    max_prompt_length: PositiveInt | None = key(
        None, "most tokens of a prompt; null: what fits a step"
    )
    max_length: PositiveInt | None = key(
        None, "most tokens of a row of sft and preferences; null: what fits a step"
    )
    truncate: Literal["left", "right"] | None = key(
        None, "side to cut rows that are too long; null: overlong_rows decides"
    )
    overlong_rows: Literal["error", "drop"] = key(
        "error",
        "what to do with rows over trainer.tokens_per_batch, data.max_length or "
        "data.max_prompt_length",
    )
    epochs: PositiveInt | None = key(None, "passes over the rows, instead of trainer.steps")
    shuffle: bool = key(True, "new order every pass, from trainer.seed; false: the file's order")
