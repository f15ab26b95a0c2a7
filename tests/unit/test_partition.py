"""Layers to stages: none lost, none twice, the costliest stage as cheap as can be; and refusals that say what would do."""

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dovetail.arch.registry import spec_from_config
from dovetail.arch.spec import ArchSpec
from dovetail.errors import LayoutError
from dovetail.parallel.layout import Layout
from dovetail.pipeline.partition import SCHEDULES, check_pipeline, partition, stage_costs
from dovetail.recipe.types import LayoutSection


def model(depth: int, vocabulary: int = 64, width: int = 16) -> ArchSpec:
    """A layer's products have 16 x (64 + 96) = 2560 weights at width 16, a vocabulary of 160 as many."""
    return spec_from_config(
        {
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": depth,
            "num_attention_heads": 4,
            "vocab_size": vocabulary,
        }
    )


def sizes(spec: ArchSpec, layout: Layout) -> list[int]:
    return [len(layers) for layers in partition(spec, layout)]


def costliest(spec: ArchSpec, sizes: list[int]) -> int:
    return max(
        spec.layer_params[0] * size + (spec.width * spec.vocab_size if s == len(sizes) - 1 else 0)
        for s, size in enumerate(sizes)
    )


def test_weights_of_a_layer_and_of_the_head_make_those_of_the_model() -> None:
    spec = model(3, vocabulary=160)
    assert (spec.layer_params, spec.head_params, spec.linear_params) == (
        (2560,) * 3,
        2560,
        4 * 2560,
    )
    grouped = replace(spec.attention, num_kv_heads=2)
    assert replace(spec, mixers=(grouped,) * 3).layer_params == (2560 - 2 * 16 * 2 * 4,) * 3


@given(
    depth=st.integers(1, 90),
    pp=st.integers(1, 9),
    virtual=st.integers(1, 4),
    vocabulary=st.integers(2, 4000),
)
def test_every_layer_once_and_in_order(depth: int, pp: int, virtual: int, vocabulary: int) -> None:
    layout = Layout(pp=pp, virtual_stages=virtual if pp > 1 else 1)
    stages = pp * layout.virtual_stages
    if stages > depth:
        with pytest.raises(
            LayoutError, match=f"makes {stages} stages, but the model has {depth} layer"
        ):
            partition(model(depth, vocabulary), layout)
        return
    cut = partition(model(depth, vocabulary), layout)
    assert [layer for layers in cut for layer in layers] == list(range(depth))
    assert len(cut) == stages
    assert min(map(len, cut)) >= 1
    without_head = [len(layers) for layers in cut[:-1]]
    assert stages == 1 or max(without_head) - min(without_head) <= 1
    assert without_head == sorted(without_head)


@given(depth=st.integers(1, 11), stages=st.integers(1, 11), vocabulary=st.integers(2, 1500))
def test_no_other_cut_has_a_cheaper_costliest_stage(
    depth: int, stages: int, vocabulary: int
) -> None:
    stages = min(stages, depth)
    spec = model(depth, vocabulary)
    every_cut = [
        [after - before for before, after in pairwise((0, *ends, depth))]
        for ends in combinations(range(1, depth), stages - 1)
    ]
    best = min(costliest(spec, cut) for cut in every_cut)
    assert costliest(spec, sizes(spec, Layout(pp=stages))) == best


@pytest.mark.parametrize(
    ("depth", "vocabulary", "pp", "expected"),
    [
        (61, 2, 8, [7, 7, 8, 8, 8, 8, 8, 7]),  # hardly a head
        (
            61,
            160 * 4,
            8,
            [8, 8, 8, 8, 8, 8, 9, 4],
        ),  # a head of four layers; rather 9 than 5 layers beside it
        (61, 160 * 2, 8, [8, 8, 8, 8, 8, 8, 8, 5]),
        (8, 160 * 2, 2, [5, 3]),
        (4, 160 * 99, 4, [1, 1, 1, 1]),
        (6, 160 * 99, 3, [2, 3, 1]),
        (5, 2, 1, [5]),
    ],
)
def test_cuts_by_hand(depth: int, vocabulary: int, pp: int, expected: list[int]) -> None:
    assert sizes(model(depth, vocabulary), Layout(pp=pp)) == expected


def test_virtual_stages_share_the_layers_evenly() -> None:
    assert partition(model(7), Layout(pp=2, virtual_stages=2)) == (
        range(2),
        range(2, 4),
        range(4, 6),
        range(6, 7),
    )


def test_a_given_split_is_taken_as_it_is() -> None:
    layout = Layout(pp=2, virtual_stages=2, pp_split=(1, 4, 1, 2), schedule="interleaved")
    assert partition(model(8), layout) == (range(1), range(1, 5), range(5, 6), range(6, 8))


def test_a_recipe_may_name_every_schedule() -> None:
    for schedule in SCHEDULES:
        options = {
            "schedule": schedule,
            "pp": 2,
            "virtual_stages": 2 if schedule == "interleaved" else 1,
        }
        check_pipeline(model(8), LayoutSection.model_validate(options).to_layout())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual_stages": 2}, "virtual_stages=2, .*say how to cut by pp; leave them out at pp=1"),
        ({"pp_split": (8,)}, "leave them out at pp=1"),
        ({"schedule": "gpipe"}, "schedule=gpipe say how to cut by pp; leave them out at pp=1"),
        (
            {"pp": 2, "schedule": "1F1B"},
            "'1F1B' is not known; use one of 1f1b, interleaved, gpipe, zero_bubble",
        ),
        (
            {"pp": 2, "schedule": "interleaved"},
            "virtual_stages=1; set virtual_stages=2, or schedule=1f1b",
        ),
        (
            {"pp": 2, "schedule": "zero_bubble", "virtual_stages": 3},
            "virtual_stages=3; set virtual_stages=1, or",
        ),
        (
            {"pp": 9},
            "pp=9 x virtual_stages=1 makes 9 stages, but the model has 8 layers; use pp=8$",
        ),
        ({"pp": 5, "virtual_stages": 2}, "makes 10 stages, but the model has 8 layers; use pp=4$"),
        (
            {"pp": 2, "virtual_stages": 7},
            "makes 14 stages, but the model has 8 layers; use virtual_stages=4$",
        ),
        ({"pp": 5, "virtual_stages": 7}, "8 layers; use pp=5, virtual_stages=1 and schedule=1f1b$"),
        (
            {"pp": 3, "pp_split": (4, 4)},
            r"pp_split=\[4, 4\] .* has 2 numbers for 3 stages .*pp_split=\[3, 3, 2\], or auto",
        ),
        (
            {"pp": 2, "pp_split": (4, 5)},
            r"adds up to 9, but the model has 8 layers; use .* pp_split=\[4, 4\], or auto",
        ),
        ({"pp": 2, "pp_split": (2, 2, 2)}, "has 3 numbers for 2 stages .* and it adds up to 6"),
        ({"pp": 2, "pp_split": (0, 8)}, "neither auto nor whole numbers of 1 or more"),
        ({"pp": 2, "pp_split": (2.5, 5.5)}, "neither auto nor whole numbers of 1 or more"),
        ({"pp": 2, "pp_split": "even"}, "neither auto nor whole numbers of 1 or more"),
    ],
)
def test_refusals_name_what_would_do(options: dict[str, Any], message: str) -> None:
    for refuse in (check_pipeline, partition):
        with pytest.raises(LayoutError, match=message):
            refuse(model(8), Layout(**options))


@given(depth=st.integers(1, 20), pp=st.integers(2, 20), virtual=st.integers(1, 20))
def test_what_a_refusal_for_too_many_stages_proposes_is_accepted(
    depth: int, pp: int, virtual: int
) -> None:
    layout = Layout(
        pp=pp, virtual_stages=virtual, schedule="interleaved" if virtual > 1 else "zero_bubble"
    )
    try:
        check_pipeline(model(depth), layout)
    except LayoutError as refusal:
        proposal = str(refusal).rpartition("use ")[2].replace(" and ", ", ").split(", ")
        pairs = [change.split("=") for change in proposal]
        changes: dict[str, Any] = {
            name: int(value) if value.isdigit() else value for name, value in pairs
        }
        check_pipeline(model(depth), replace(layout, **changes))


def test_61_layers_are_a_pipeline_of_8_and_one_layer_is_none() -> None:
    check_pipeline(model(61), Layout(pp=8))
    with pytest.raises(
        LayoutError, match="the model has 1 layer; use pp=1, virtual_stages=1 and schedule=1f1b"
    ):
        check_pipeline(model(1), Layout(pp=2))


def test_costs_of_stages_are_their_layers_and_the_whole_head_in_the_last_forward() -> None:
    spec = model(6, vocabulary=160)
    costs = stage_costs(spec, Layout(pp=3, pp_split=(3, 2, 1)))
    assert [costs.of("forward", stage) for stage in range(3)] == [3 * 2560, 2 * 2560, 4 * 2560]
    assert [costs.of("backward", stage) for stage in range(3)] == [6 * 2560, 4 * 2560, 2 * 2560]
    assert costs.of("input", 0) == costs.of("weight", 0) == 3 * 2560
