"""docs/parallelism.md says what the code does: its timelines, cuts and figures are made again and compared."""

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import yaml

from dovetail.arch.qwen import qwen2_spec
from dovetail.arch.spec import ArchSpec
from dovetail.batch.micro import ContextShard
from dovetail.factory.layouts import check_layout, sampling_layout
from dovetail.nn.context_parallel import cut_chunks
from dovetail.parallel.layout import Layout
from dovetail.pipeline.schedule import Costs, Plan, make_plan, simulate
from dovetail.recipe.schema import make_recipe
from tests.helpers.traffic import (
    DOC,
    EACH_MICRO_BATCH,
    ONCE_A_STEP,
    Step,
    expected,
    table,
    value_of,
)

TOKENS = 32768
HALVED = Costs(0.5, 0.5, 0.5)  # of a stage half as large
UNIT = Costs()
CELL = 4  # characters of a forward
LAYOUTS = (
    Layout(dp=8),
    Layout(tp=2, dp=4),
    Layout(tp=4, dp=2),
    Layout(tp=4, pp=2),
    Layout(pp=4, dp=2),
    Layout(cp=8),
    Layout(cp=8, cp_mode="gather"),
    Layout(tp=2, cp=4),
    Layout(tp=4, cp=2),
    Layout(tp=2, pp=2, cp=2),
)


def qwen(width: int, depth: int, ffn: int, heads: int, kv_heads: int) -> ArchSpec:
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "intermediate_size": ffn,
        "vocab_size": 152064,
    }
    return qwen2_spec({**sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads})


SEVEN = qwen(3584, 28, 18944, 28, 4)
MODELS = {
    "Qwen2.5-3B": qwen(2048, 36, 11008, 16, 2),
    "Qwen2.5-7B": SEVEN,
    "Qwen2.5-32B": qwen(5120, 64, 27648, 40, 8),
}


def one_micro_batch(spec: ArchSpec, layout: Layout, micros: int = 1, rank: int = 0) -> Step:
    return Step(
        spec, layout, TOKENS, micros, counted=TOKENS // layout.cp, all_counted=TOKENS, rank=rank
    )


def in_the_example(row: dict[str, str]) -> str:
    """The last column of the two tables of formulas."""
    formula = row["elements, each way"] if "elements, each way" in row else row["elements"]
    letters = one_micro_batch(SEVEN, Layout(tp=2, cp=4)).letters
    return shown(value_of(formula, letters) * int(row["bytes"]), 10**6)


def shown(size: Fraction | int, unit: int) -> str:
    return f"{float(size) / unit:.2f}" if 0 < size < unit else f"{float(size) / unit:.1f}"


def heads() -> Iterator[tuple[str, ...]]:
    """What attention sends each way by mode."""
    yield ("model", "H, G", "gather", "product", "ulysses")
    for name, spec in MODELS.items():
        cells = []
        for mode in ("gather", "product", "ulysses"):
            layout = Layout(cp=8, cp_mode=mode)
            try:
                step = one_micro_batch(spec, layout)
                u = step.letters["u"]
            except ValueError:
                cells.append("-")
                continue
            rows = [row for row in table(EACH_MICRO_BATCH) if row["axis"] in ("ulysses", "gather")]
            size = sum(
                value_of(row["elements, each way"], step.letters) * int(row["bytes"])
                for row in rows
            )
            cells.append(f"{shown(size, 10**6)} ({u})")
        yield (name, f"{spec.attention.num_heads}, {spec.attention.num_kv_heads}", *cells)


def layouts() -> Iterator[tuple[str, ...]]:
    """What the busiest rank sends in a step of eight micro-batches, by axis."""
    axes = {
        "tp": ("tp",),
        "cp": ("ulysses", "gather", "cp"),
        "pp": ("to_next", "to_previous"),
        "fsdp": ("fsdp",),
    }
    yield ("layout", *axes, "in all")
    for layout in LAYOUTS:
        assert layout.dp is not None
        steps = [one_micro_batch(SEVEN, layout, 8 // layout.dp, rank) for rank in range(layout.pp)]
        sent = max((expected(step) for step in steps), key=lambda found: sum(found.values()))
        cells = [
            sum(size for key, size in sent.items() if key.split()[0] in names)
            for names in axes.values()
        ]
        mode = "" if layout.cp_mode == "auto" else f", {layout.cp_mode}"
        yield (
            f"{layout}{mode}",
            *(shown(size, 10**9) if size else "-" for size in cells),
            shown(sum(cells), 10**9),
        )


def schedules() -> Iterator[tuple[str, ...]]:
    """Time and live micro-batches of each schedule."""
    names = ("gpipe", "1f1b", "interleaved", "zero_bubble")
    yield ("pp, m", *names)
    for ranks, micros in ((4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32)):
        cells = []
        for name in names:
            halved = name == "interleaved"
            done = simulate(make_plan(name, ranks, 1 + halved, micros), HALVED if halved else UNIT)
            cells.append(f"{done.total:g} ({done.live[0]}, {done.live[-1]})")
        yield (f"{ranks}, {micros}", *cells)


def timelines() -> str:
    """Three schedules of four micro-batches on four ranks."""
    kinds = {"1f1b": (1, UNIT), "interleaved": (2, HALVED), "zero_bubble": (1, UNIT)}
    found = [
        f"{name:12}rank {rank}  {line}".rstrip()
        for name, (virtual, costs) in kinds.items()
        for rank, line in enumerate(drawn(make_plan(name, 4, virtual, 4), costs))
    ]
    return "\n".join("\n".join(found[i : i + 4]) + "\n" for i in range(0, len(found), 4)).rstrip()


def drawn(plan: Plan, costs: Costs) -> Iterator[str]:
    """Each rank's time as a line: what it computes, with dashes to its end; dots where it waits."""
    done = simulate(plan, costs)
    for actions, start, finish in zip(plan, done.start, done.finish, strict=True):
        line = ""
        for action, begin, end in zip(actions, start, finish, strict=True):
            letter = action.kind[0].upper() if action.stage >= len(plan) else action.kind[0]
            line = line.ljust(round(begin * CELL), ".")
            line += f"{letter}{action.micro}".ljust(round((end - begin) * CELL), "-")
        yield line.ljust(round(done.total * CELL), ".")


def chunks() -> str:
    """How three packed sequences are cut over two ranks."""
    lengths, found = (5, 8, 3), []
    for rank in range(2):
        share = ContextShard(rank, 2)
        for number, chunk in zip(
            share.chunks, cut_chunks(lengths, share, torch.device("cpu")), strict=True
        ):
            at = share.order(sum(lengths))[chunk.queries].tolist()
            queries, keys = (
                " + ".join(map(str, chunk.q_spans.lengths)),
                " + ".join(map(str, chunk.k_spans.lengths)),
            )
            found.append(
                f"   rank {rank}  chunk {number}: queries {at[0]:2} .. {at[-1]:2} see keys {chunk.keys.start:2} .. "
                f"{chunk.keys.stop - 1:2}; by sequence {queries} queries, {keys} keys"
            )
    return "\n".join(found)


def as_table(rows: Iterator[tuple[str, ...]]) -> str:
    first, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([first, "|---" * (first.count(" | ") + 1) + "|", *rest])


@pytest.mark.parametrize("made", [timelines, chunks], ids=["timelines", "chunks"])
def test_pictures(made) -> None:
    assert f"```\n{made()}\n```" in DOC.read_text(), made()


def test_the_pictures_of_cp_show_who_holds_which_chunk() -> None:
    lines = [line.replace("|", " ") for line in DOC.read_text().splitlines()]
    shown_ranks = [line.split()[1:] for line in lines if re.fullmatch(r" +rank( +\d)+ *", line)]
    for ulysses, ranks in zip((1, 2), shown_ranks, strict=True):
        holders = {
            int(token): rank
            for rank in range(4)
            for token in ContextShard(rank, 4, ulysses).order(8)
        }
        step = 8 // len(ranks)
        assert [str(holders[token]) for token in range(0, 8, step)] == ranks
        assert [str(holders[token]) for token in range(step - 1, 8, step)] == ranks


@pytest.mark.parametrize("rows", [schedules, heads, layouts])
def test_figures(rows) -> None:
    assert f"\n\n{as_table(rows())}\n\n" in DOC.read_text(), as_table(rows())


@pytest.mark.parametrize("heading", [EACH_MICRO_BATCH, ONCE_A_STEP])
def test_the_example(heading: str) -> None:
    for row in table(heading):
        assert row["example, MB"] == in_the_example(row), (row, in_the_example(row))


def test_when_gather_sends_less_than_ulysses() -> None:
    """The inequality of the docs, for whole heads of any number."""
    rows = {row["axis"]: row["elements, each way"] for row in table(EACH_MICRO_BATCH)}
    for cp in (2, 4, 8):
        for g in (1, 2, 4, 8):
            for h in range(max(g, cp), 65, max(g, cp)):
                letters = {"cp": cp, "tp": 1, "t": 1, "h": h, "g": g, "C": 1}
                gather = value_of(rows["gather"], letters | {"u": 1})
                ulysses = value_of(rows["ulysses"], letters | {"u": cp})
                assert (gather < ulysses) == (cp * g < h + max(g, cp))


def test_the_recipe_of_several_layouts() -> None:
    found = re.search(r"```yaml\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert found
    recipe = make_recipe(yaml.safe_load(found[1]))
    spec = replace(SEVEN, depth=4)
    for section in (recipe.layout, recipe.critic.layout, recipe.reference.layout):
        assert section is not None
        check_layout(spec, section.to_layout().resolve(8))
    assert recipe.rollout.layout is not None
    sampling_layout(spec, recipe.rollout.layout.to_layout().resolve(8))
    assert sampling_layout(spec, Layout(tp=2, pp=2, cp=2)) == Layout(tp=4, dp=2)
