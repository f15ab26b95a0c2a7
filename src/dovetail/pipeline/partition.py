"""Layers of pipeline stages, balanced by cost."""

from functools import lru_cache
from itertools import accumulate

from dovetail.arch.transformers_spec import AnySpec
from dovetail.errors import LayoutError
from dovetail.parallel.layout import Layout
from dovetail.pipeline.schedule import Costs

SCHEDULES = ("1f1b", "interleaved", "gpipe", "zero_bubble")  # of training


def partition(spec: AnySpec, layout: Layout) -> tuple[range, ...]:
    """Layers by `pp_split`, or so that the costliest stage costs least."""
    check_pipeline(spec, layout)
    split = layout.pp_split
    sizes = _balanced(spec, layout.pp * layout.virtual_stages) if isinstance(split, str) else split
    ends = [sum(sizes[: stage + 1]) for stage in range(len(sizes))]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))


def stage_costs(spec: AnySpec, layout: Layout) -> Costs:
    """Weights of products. The last forward includes the head."""
    layers = tuple(
        float(sum(spec.layer_params[layer] for layer in stage)) for stage in partition(spec, layout)
    )
    return Costs(
        forward=(*layers[:-1], layers[-1] + 3.0 * spec.head_params), input=layers, weight=layers
    )


def check_pipeline(spec: AnySpec, layout: Layout) -> None:
    pp = layout.pp
    virtual = layout.virtual_stages
    schedule = layout.schedule
    if schedule not in SCHEDULES:
        raise LayoutError(
            f"layout: schedule={schedule!r} is not known; use one of {', '.join(SCHEDULES)}"
        )
    problem = ""
    if pp == 1 and (virtual, layout.pp_split, schedule) != (1, "auto", "1f1b"):
        keys = f"virtual_stages={virtual}, pp_split={layout.pp_split} and schedule={schedule}"
        problem = f"{keys} say how to cut by pp; leave them out at pp=1"
    elif schedule == "interleaved" and virtual == 1:
        problem = "schedule=interleaved needs several stages a rank, but virtual_stages=1; set virtual_stages=2, or schedule=1f1b"
    elif schedule == "zero_bubble" and virtual > 1:
        needs = f"schedule=zero_bubble has one stage a rank, but virtual_stages={virtual}"
        problem = f"{needs}; set virtual_stages=1, or schedule=interleaved"
    elif pp * virtual > spec.depth:
        stages = f"pp={pp} x virtual_stages={virtual} makes {pp * virtual} stages"
        layers = f"{spec.depth} layer{'s' * (spec.depth > 1)}"
        problem = f"{stages}, but the model has {layers}; use {_nearest(spec.depth, layout)}"
    elif layout.pp_split != "auto" and (reason := _split_problem(spec, layout)):
        example = f"use for example pp_split={list(_balanced(spec, pp * virtual))}, or auto"
        shown = list(layout.pp_split) if isinstance(layout.pp_split, tuple) else layout.pp_split
        problem = f"pp_split={shown} says how many layers each stage has, but {reason}; {example}"
    if problem:
        raise LayoutError(f"layout {layout}: {problem}")


def _split_problem(spec: AnySpec, layout: Layout) -> str:
    split = layout.pp_split
    stages = layout.pp * layout.virtual_stages
    if not isinstance(split, tuple) or not all(type(size) is int and size >= 1 for size in split):
        return "it is neither auto nor whole numbers of 1 or more"
    wrong = [f"it has {len(split)} numbers for {stages} stages (pp x virtual_stages)"] * (
        len(split) != stages
    )
    wrong += [f"it adds up to {sum(split)}, but the model has {spec.depth} layers"] * (
        sum(split) != spec.depth
    )
    return " and ".join(wrong)


def _nearest(depth: int, layout: Layout) -> str:
    if depth // layout.virtual_stages > 1:
        return f"pp={depth // layout.virtual_stages}"
    if depth // layout.pp > 1:
        return f"virtual_stages={depth // layout.pp}"
    return f"pp={min(layout.pp, depth)}, virtual_stages=1 and schedule=1f1b"


@lru_cache(maxsize=64)
def _balanced(spec: AnySpec, stages: int) -> tuple[int, ...]:
    """Dynamic programs over (stage, layers so far). Among equals: least variance, fewest last layers, more in later stages."""
    totals = [0, *accumulate(spec.layer_params)]
    depth = spec.depth
    totals[-1] += spec.head_params

    def ends(stage: int) -> range:
        return range(stage, depth - stages + stage + 1)

    worst = {0: 0}
    for stage in range(1, stages + 1):
        worst = {
            end: min(
                max(cost, totals[end] - totals[start])
                for start, cost in worst.items()
                if start < end
            )
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
                    options, key=lambda o: (o[0], o[1][-1] if stage == stages else 0, o[1])
                )
        cuts = longer
    return cuts[depth][1]
