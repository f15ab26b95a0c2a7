"""The section `eval` of a recipe."""

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, NonNegativeFloat, model_validator

from dovetail.bounds import MAX_SAMPLES
from dovetail.errors import quoted
from dovetail.recipe.data import Sources
from dovetail.recipe.types import Listed, NotStrict, OneOrMore, Section, key

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)  # of a folder, and in names of metrics
BUILT_IN = re.compile(r"(?:avg|pass|maj)@([1-9]\d{0,5})", re.ASCII)
OWN = re.compile(r"[^\W\d][\w.]*:([^\W\d]\w*)")


class EvalSetSection(Section):
    """One set of prompts; for sft one of rows, whose loss is taken."""

    name: str = Field(
        description="in names of metrics, eval/NAME/..., and of the folder of its completions"
    )
    data: Sources = Field(description="its rows, named as those of data.train")
    samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = key(1, "completions of each prompt")
    temperature: NonNegativeFloat = key(0.0, "of its sampling; 0: always the likeliest token")
    metrics: Annotated[tuple[str, ...], Listed, NotStrict] = key(
        (), "avg@K, pass@K, maj@K, or module:function; empty: avg, pass and maj of all samples"
    )

    @model_validator(mode="after")
    def _possible(self) -> "EvalSetSection":
        if not NAME.fullmatch(self.name):
            expected = "letters, digits, '_', '-' and '.' (at most 64), of which the first is a letter or a digit"
            raise ValueError(f"name is {quoted(self.name)}; expected {expected}: it names a folder")
        check_metrics(self.metrics, self.samples, self.temperature)
        return self


def check_metrics(metrics: Sequence[str], samples: int, temperature: float) -> None:
    """Raises ValueError."""
    if samples > 1 and temperature == 0:
        same = "at which all samples of a prompt are the same"
        raise ValueError(
            f"samples is {samples} and temperature 0, {same}; set temperature above 0, or "
            "samples to 1"
        )
    labels = [label(metric) for metric in metrics]
    for metric, name in zip(metrics, labels, strict=True):
        built_in = BUILT_IN.fullmatch(metric)
        if not built_in and not OWN.fullmatch(metric):
            raise ValueError(
                f"metrics has {quoted(metric)}; expected avg@K, pass@K, maj@K, or module:function"
            )
        if built_in and int(built_in[1]) > samples:
            raise ValueError(
                f"metrics has {metric}, but samples is {samples}; raise samples, or lower K"
            )
        if labels.count(name) > 1:
            raise ValueError(f"metrics has {name} twice; leave one out, or rename the function")


def default_metrics(samples: int) -> tuple[str, ...]:
    return tuple(
        f"{kind}@{samples}" for kind in (("avg", "pass", "maj") if samples > 1 else ("avg", "pass"))
    )


def label(metric: str) -> str:
    return metric.rpartition(":")[2]


class EvalSection(Section):
    """What is evaluated before training, every trainer.eval_every steps, and after it (evaluation.md)."""

    sets: Annotated[tuple[EvalSetSection, ...], OneOrMore, NotStrict] = key(
        (),
        "sets, each a mapping of the keys below; data.eval is one more, greedy, with metrics "
        "eval_*",
    )

    @model_validator(mode="after")
    def _named_once(self) -> "EvalSection":
        names = [each.name.casefold() for each in self.sets]
        if twice := next(
            (each.name for each in self.sets if names.count(each.name.casefold()) > 1), None
        ):
            raise ValueError(
                f"two sets are named {quoted(twice)}, in upper or lower case; rename one"
            )
        return self
