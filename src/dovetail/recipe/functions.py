"""Losses and advantages by name or import."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dovetail.errors import quoted
from dovetail.recipe.types import Options, Section, key


def _valid_function(text: str) -> str:
    module, _, name = text.partition(":")
    if module.endswith(".py") or not all(
        part.isidentifier() for part in (*module.split("."), name)
    ):
        example = "such as mine:score for mine.py in the directory of the recipe"
        raise ValueError(f"{quoted(text)}; expected module:function, {example}")
    return text


FunctionName = Annotated[str, AfterValidator(_valid_function)]


class FunctionSection(Section):
    """A function of yours."""

    function: FunctionName = Field(
        alias="import", description="module:function, from the directory of the recipe"
    )
    options: Options = key({}, "keyword arguments for it")


class LossSection(Section):
    """The policy-gradient term, without KL penalty and entropy bonus."""

    name: Literal["ppo", "cispo", "gmpo", "sapo"] | None = key(
        None, "a built-in term; null: ppo, or the import"
    )
    function: FunctionName | None = Field(
        None, alias="import", description="a function of yours: module:function"
    )
    options: Options = key(
        {}, "keyword arguments: of the function, or of sapo tau_positive and tau_negative"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "LossSection":
        if self.name is not None and self.function is not None:
            raise ValueError("give name or import, not both")
        known = ("tau_positive", "tau_negative") if self.name == "sapo" else ()
        for option, value in self.options.items() if self.function is None else ():
            if option not in known:
                takes = f"takes {' and '.join(known)}" if known else "has no options"
                raise ValueError(
                    f"options has {quoted(option)}, but the loss {self.name or 'ppo'} {takes}"
                )
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ValueError(
                    f"options.{option} is {value!r}; expected a number above 0, as in 1.05"
                )
        return self


CustomFunction = FunctionSection | None
PolicyTerm = Annotated[
    LossSection, BeforeValidator(lambda given: {"name": given} if isinstance(given, str) else given)
]
