"""The section `rollout`."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from dovetail.bounds import MAX_NEW_TOKENS, MAX_SAMPLES
from dovetail.recipe.push import PushSection
from dovetail.recipe.types import (
    OwnLayout,
    PositiveFloat,
    Section,
    key,
)


class RolloutSection(Section):
    """How completions are sampled."""

    backend: Literal["native", "transformers"] = key("native", "the embedded sampler, or the model's generate per rank")
    layout: OwnLayout = key(None, "empty: tp 1, one sampler a rank")
    samples_per_prompt: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = key(8, "completions of each prompt")
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_NEW_TOKENS)] = key(64, "longest completion")
    temperature: PositiveFloat = key(1.0, "divides the logits, in sampling and in training")
    top_p: Annotated[float, Field(gt=0, le=1)] = key(1.0, "sample from the smallest set with this mass")
    top_k: NonNegativeInt = key(0, "sample from the k likeliest tokens; 0: all")
    router_replay: Literal["none", "trainer", "rollout"] = key(
        "none", "experts of the update: its own; those of the pass for old log-probs (R2); the sampler's (R3)"
    )
    mismatch_metrics: bool = key(False, "compare the policy's log-probs and routes with the sampler's; costs a pass")
    push: PushSection = key(PushSection(), "weights to engines: vllm and sglang")
