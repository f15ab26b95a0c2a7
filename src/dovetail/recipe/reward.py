"""The section `reward` of a recipe."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from dovetail.errors import quoted
from dovetail.recipe.functions import FunctionName
from dovetail.recipe.types import Options, OwnLayout, PathText, Section, key

KINDS = ("name", "import", "judge", "model")
JUDGE_SECONDS = 300.0  # for a judge or reward server, with retries


def _valid_url(text: str) -> str:
    if not re.match(r"https?://[^/]", text):
        raise ValueError(f"{quoted(text)}; expected a URL such as http://HOST:PORT/v1")
    return text


def _valid_prompt(text: str) -> str:
    if "{completion}" not in text:
        known = "{prompt}, {completion}, {answer} and {COLUMN} of the rows are replaced"
        raise ValueError(
            f"{quoted(text)} has no {{completion}}, so that the judge would not see it; {known}"
        )
    return text


class AddressSection(Section):
    """A server that is asked over HTTP."""

    url: Annotated[str, pydantic.AfterValidator(_valid_url)] = Field(
        description="where it is: http://HOST:PORT/v1"
    )
    key_env: str | None = key(None, "environment variable with the key, which is written nowhere")
    retries: NonNegativeInt = key(4, "more attempts after a failure that may pass")
    request_seconds: PositiveFloat = key(60.0, "for one attempt")

    @model_validator(mode="after")
    def _no_key_in_url(self) -> "AddressSection":
        if "@" in self.url.partition("://")[2].partition("/")[0]:
            raise ValueError(
                "the url holds a user or a key; put it into an environment variable, named by "
                "key_env"
            )
        return self


class JudgeSection(AddressSection):
    """A language model that judges completions."""

    model: str = Field(description="its name there")
    prompt: Annotated[str, pydantic.AfterValidator(_valid_prompt)] = Field(
        description="what it is asked; {prompt}, {completion}, {answer} and {COLUMN} are replaced"
    )
    pattern: str | None = key(
        None, "regular expression whose first group is the number; null: the reply's last number"
    )
    scale: PositiveFloat = key(1.0, "the reward is the number over this")
    max_tokens: PositiveInt = key(512, "of a reply")
    temperature: NonNegativeFloat = key(0.0, "of its sampling")
    cache: bool = key(True, "keep replies in run_dir by request")


class RewardModelSection(Section):
    """A reward model: on this run's devices, or a server that answers as OpenRLHF's."""

    path: PathText | None = key(None, "HF directory of a sequence classifier with one label")
    layout: OwnLayout = key(None, "its layout; default: the policy's")
    server: AddressSection | None = key(
        None, "instead of path: POST {query, prompts, labels} -> {rewards}"
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> "RewardModelSection":
        if (self.path is None) == (self.server is None):
            raise ValueError("give path or server, and not both")
        return self


class RewardPart(Section):
    """What a completion is worth."""

    name: str | None = key(None, "a built-in reward; exact_match where nothing else is given")
    function: FunctionName | None = Field(
        None, alias="import", description="a function of yours: module:function"
    )
    judge: JudgeSection | None = key(None, "a language model behind an OpenAI-compatible address")
    model: RewardModelSection | None = key(None, "a reward model")
    options: Options = key({}, "keyword arguments for the reward")
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = key(1.0, "factor of this reward in the sum")
    batch: Literal["sample", "group", "step"] = key(
        "sample", "completions that one call of a function gets"
    )
    concurrency: Annotated[int, Field(ge=1, le=256)] = key(
        16, "async function or judge calls at a time, per process"
    )
    timeout_seconds: PositiveFloat = key(
        10.0, "a reward that takes longer drops its sample; for a judge 300"
    )
    workers: Annotated[int, Field(ge=1, le=256)] = key(
        2, "reward processes, on the host of the first rank"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_kind(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("parts"):
            return given
        kinds = [kind for kind in KINDS if given.get(kind) is not None]
        if len(kinds) > 1:
            raise ValueError(
                f"give {' or '.join(kinds)}, not both (drop the other with reward.{kinds[0]}=null)"
            )
        given = (
            dict(given)
            if kinds or given.get("function") is not None
            else {**given, "name": "exact_match"}
        )
        if kinds in (["judge"], ["model"]) and "timeout_seconds" not in given:
            given["timeout_seconds"] = JUDGE_SECONDS
        return given

    @property
    def label(self) -> str:
        if self.function is not None:
            return self.function.rpartition(":")[2]
        return self.name or ("judge" if self.judge is not None else "model")


class RewardSection(RewardPart):
    """What a completion is worth. A list of these sections is a weighted sum."""

    parts: Annotated[tuple[RewardPart, ...], Field(strict=False)] = key(
        (), "several rewards, each with a weight"
    )

    @model_validator(mode="after")
    def _parts_alone(self) -> "RewardSection":
        if self.parts and (self.name or self.function or self.judge or self.model):
            raise ValueError("give one reward, or parts, not both")
        return self

    def labelled(self) -> dict[str, RewardPart]:
        """Rewards by unique labels."""
        named: dict[str, RewardPart] = {}
        for part in self.parts or (self,):
            number = sum(other.label == part.label for other in named.values())
            named[part.label if not number else f"{part.label}_{number + 1}"] = part
        return named


def _as_parts(given: Any) -> Any:
    if isinstance(given, str):
        raise ValueError(
            f"{quoted(given)}; write {{{'import' if ':' in given else 'name'}: {quoted(given)}}}"
        )
    if not isinstance(given, list | tuple):
        return given
    if not given:
        raise ValueError(
            "the list is empty; give one reward or more, or leave the key out for exact_match"
        )
    return {"parts": given}


Rewards = Annotated[RewardSection, pydantic.BeforeValidator(_as_parts)]
