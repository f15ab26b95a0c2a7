"""Layers of pipeline stages, balanced by cost."""

from functools import lru_cache
from itertools import accumulate

from dovetail.arch.transformers_spec import AnySpec
from dovetail.errors import LayoutError
from dovetail.parallel.layout import Layout
from dovetail.pipeline.schedule import Costs

SCHEDULES = ("1f1b", "interleaved", "gpipe", "zero_bubble")  # of training


def partition(spec: AnySpec, layout: Layout) -> tuple[range, ...]:
    """By `pp_split`, or so that the costliest costs least."""
    check_pipeline(spec, layout)
    split = layout.pp_split
    sizes = _balanced(spec, layout.pp * layout.virtual_stages) if isinstance(split, str) else split
    ends = [sum(sizes[: stage + 1]) for stage in range(len(sizes))]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def stage_costs(spec: AnySpec, layout: Layout) -> Costs:
    """By weights of products. The last forward has the head."""
    layers = tuple(float(sum(spec.layer_params[layer] for layer in stage)) for stage in partition(spec, layout))
    return Costs(forward=(*layers[:-1], layers[-1] + 3.0 * spec.head_params), input=layers, weight=layers)


def check_pipeline(spec: AnySpec, layout: Layout) -> None:
    pp, virtual, schedule = layout.pp, layout.virtual_stages, layout.schedule
    if schedule not in SCHEDULES:
        raise LayoutError(f"layout: schedule={schedule!r} is not known; use one of {', '.join(SCHEDULES)}")
    if pp == 1 and (virtual, layout.pp_split, schedule) != (1, "auto", "1f1b"):
        raise LayoutError(
            f"layout {layout}: virtual_stages={virtual}, pp_split={layout.pp_split} and schedule={schedule} say how to "
            "cut by pp; leave them out at pp=1"
        )
    if schedule == "interleaved" and virtual == 1:
        raise LayoutError(
            f"layout {layout}: schedule=interleaved needs several stages a rank, but virtual_stages=1; "
            "set virtual_stages=2, or schedule=1f1b"
        )
    if schedule == "zero_bubble" and virtual > 1:
        raise LayoutError(
            f"layout {layout}: schedule=zero_bubble has one stage a rank, but virtual_stages={virtual}; "
            "set virtual_stages=1, or schedule=interleaved"
        )
    if pp * virtual > spec.depth:
        raise LayoutError(
            f"layout {layout}: pp={pp} x virtual_stages={virtual} makes {pp * virtual} stages, but the model has "
            f"{spec.depth} layer{'s' * (spec.depth > 1)}; use {_nearest(spec.depth, layout)}"
        )
    if layout.pp_split != "auto":
        _check_split(spec, layout)


def _check_split(spec: AnySpec, layout: Layout) -> None:
    split, stages = layout.pp_split, layout.pp * layout.virtual_stages
    shown = list(split) if isinstance(split, tuple) else split
    reasons = []
    if not isinstance(split, tuple) or not all(type(size) is int and size >= 1 for size in split):
        reasons = ["it is neither auto nor whole numbers of 1 or more"]
    else:
        if len(split) != stages:
            reasons += [f"it has {len(split)} numbers for {stages} stages (pp x virtual_stages)"]
        if sum(split) != spec.depth:
            reasons += [f"it adds up to {sum(split)}, but the model has {spec.depth} layers"]
    if reasons:
        raise LayoutError(
            f"layout {layout}: pp_split={shown} says how many layers each stage has, but {' and '.join(reasons)}; "
            f"use for example pp_split={list(_balanced(spec, stages))}, or auto"
        )


def _nearest(depth: int, layout: Layout) -> str:
    if depth // layout.virtual_stages > 1:
        return f"pp={depth // layout.virtual_stages}"
    if depth // layout.pp > 1:
        return f"virtual_stages={depth // layout.pp}"
    return f"pp={min(layout.pp, depth)}, virtual_stages=1 and schedule=1f1b"


@lru_cache(maxsize=64)
def _balanced(spec: AnySpec, stages: int) -> tuple[int, ...]:
    """By dynamic programs over (stage, layers so far). Of equals: least variance, fewest last layers, more in later stages."""
    totals, depth = [0, *accumulate(spec.layer_params)], spec.depth
    totals[-1] += spec.head_params

    def ends(stage: int) -> range:  # a layer for each later stage
        return range(stage, depth - stages + stage + 1)

    worst = {0: 0}
    for stage in range(1, stages + 1):
        worst = {
            end: min(max(cost, totals[end] - totals[start]) for start, cost in worst.items() if start < end)
            for end in ends(stage)
        }
    bound = worst[depth]
    cuts: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, stages + 1):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for end in ends(stage) if stage < stages else (depth,):
            options = [
                (squares + (totals[end] - totals[start]) ** 2, (*sizes, end - start))
                for start, (squares, sizes) in cuts.items()
                if start < end and totals[end] - totals[start] <= bound
            ]
            if options:
                longer[end] = min(
                    options, key=lambda option: (option[0], option[1][-1] if stage == stages else 0, option[1])
                )
        cuts = longer
    return cuts[depth][1]
