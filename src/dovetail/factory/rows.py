"""Sources and rows of a recipe."""

import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dovetail.data.files import Source
from dovetail.errors import ConfigError
from dovetail.recipe.data import DataSection, SourceSection
from dovetail.recipe.reward import RewardSection
from dovetail.recipe.schema import Recipe
from dovetail.rewards.built_in import BUILT_IN

Example = TypeVar("Example")
Parts = tuple[tuple[int, float], ...]  # rows and weight of each part of a mixture
TEMPLATE = "chat_template.jinja"


def load_parts(
    data: DataSection, given: str | Sequence[str | SourceSection] | None, load: Callable[[Source], list[Example]]
) -> tuple[list[Example], Parts]:
    """All examples, and the parts if they have weights."""
    listed = [] if given is None else [given] if isinstance(given, str) else given
    parts = [SourceSection(path=part) if isinstance(part, str) else part for part in listed]
    weights = [part.weight for part in parts if part.weight is not None]  # all or none
    loaded = [load(_source(data, part, named=len(parts) > 1)) for part in parts]
    examples = [example for part in loaded for example in part]
    return examples, tuple(zip(map(len, loaded), weights, strict=True)) if weights else ()


def _source(data: DataSection, part: SourceSection, *, named: bool) -> Source:
    return Source(
        path=part.path,
        subset=part.subset,
        split=part.split,
        format=part.format or data.format,
        columns=data.columns if part.columns is None else part.columns,
        chat=data.apply_chat_template,
        prefix=f"{part.path}:" if named else "",
    )


def reads_answer(reward: RewardSection) -> bool:
    """Whether a built-in reward needs `answer`."""
    names = [part.name for part in reward.labelled().values() if part.name is not None]
    builtins = [BUILT_IN[name] for name in names if name in BUILT_IN]
    return any("answer" in inspect.signature(builtin).parameters for builtin in builtins)


def read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template {path} cannot be read: {error}; give a Jinja file") from error


def with_epochs(recipe: Recipe, num_rows: int) -> Recipe:
    trainer = recipe.trainer
    steps = math.ceil(num_rows * (recipe.data.epochs or 0) / trainer.prompts_per_step)
    changed: dict[str, Any] = {"trainer": trainer.model_copy(update={"steps": steps})}
    return recipe.model_copy(update=changed) if steps else recipe
