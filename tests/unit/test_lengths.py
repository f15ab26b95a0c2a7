"""How many positions a model has by its config, and what is refused that would pass the last one."""

from typing import Any, Literal

import pytest

from dovetail.errors import ConfigError
from dovetail.factory.layouts import check_positions, max_positions


@pytest.mark.parametrize(
    ("config", "native", "other"),
    [
        ({}, None, None),
        ({"max_position_embeddings": 64}, 64, 64),
        ({"n_positions": 64}, 64, 64),
        ({"text_config": {"max_position_embeddings": 64}}, 64, 64),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 256, 256),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 64, 128),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            256,
            256,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
            64,
            64,
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None}}, 64, 64),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 16,
                }
            },
            64,
            64,
        ),
        (
            {
                "rope_scaling": {"type": "longrope", "factor": 32.0},
                "original_max_position_embeddings": 2,
            },
            2,
            64,
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 8}},
            8,
            64,
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "model_type": "gemma3_text"},
            64,
            64,
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, 64, 64),
    ],
)
def test_positions_with_rope_scaling(
    config: dict[str, Any], native: int | None, other: int | None
) -> None:
    known = (
        {"max_position_embeddings": 64, **config}
        if any(key.startswith("rope") for key in config)
        else config
    )
    assert (max_positions(known, "native"), max_positions(known)) == (native, other)


@pytest.mark.parametrize(
    ("prompts", "new", "edit"),
    [
        ([5, 40], 24, ""),
        ([5, 40], 25, "lower K to at most 24"),
        ([64], 1, "shorten the prompts below 64 tokens"),
    ],
)
def test_a_completion_beyond_the_last_position_is_refused(
    prompts: list[int], new: int, edit: str
) -> None:
    backend: Literal["native"] = "native"
    if not edit:
        check_positions({"max_position_embeddings": 64}, backend, prompts, new, "K")
        return
    total = f"K is {new} and the longest prompt has {max(prompts)} tokens, {max(prompts) + new} together, .* 64 positions"
    with pytest.raises(ConfigError, match=f"{total} .*; {edit}$"):
        check_positions({"max_position_embeddings": 64}, backend, prompts, new, "K")
