"""A model's numbers on many layouts."""

from pathlib import Path

import pytest

from dovetail.parallel.layout import Layout
from tests.helpers.harness import run
from tests.helpers.matrix import (
    Case,
    compare,
    path_of,
    write_alone,
    write_models,
    written,
)
from tests.helpers.tolerances import GRAD_RATIO_FP32, SUM_ORDER

QUICK = (
    (Layout(), Case("llama", "ragged", "sft", 3)),
    (Layout(tp=2), Case("qwen3_window", "ragged", "ppo"), Case("llama", "few", "sft", 3)),
    (Layout(dp=2), Case("mistral", "ones", "ppo"), Case("qwen3", "ragged", "sft", 3)),
    (Layout(cp=2), Case("qwen3_window", "giant", "value"), Case("llama_dynamic", "ones", "ppo", 3)),
    (
        Layout(cp=2, cp_mode="gather"),
        Case("llama", "ragged", "ppo"),
        Case("qwen3", "ones", "gspo", 3),
    ),
    (Layout(pp=2), Case("mistral", "ragged", "grpo"), Case("qwen2_tied", "giant", "value", 3)),
    (
        Layout(pp=2, pp_split=(1, 8)),
        Case("qwen3_window", "giant", "sft"),
        Case("qwen2_tied", "few", "grpo", 3),
    ),
    (
        Layout(pp=2, schedule="zero_bubble"),
        Case("qwen3_window", "ones", "gspo"),
        Case("llama_dynamic", "ragged", "grpo", 3),
    ),
    (
        Layout(pp=2, virtual_stages=2, schedule="interleaved"),
        Case("llama_odd", "few", "sft"),
        Case("qwen2_tied", "ones", "gspo", 3),
    ),
    (Layout(tp=4), Case("llama", "ragged", "grpo", 3)),
    (Layout(cp=4), Case("llama_odd", "ragged", "gspo"), Case("mistral", "few", "grpo", 3)),
    (Layout(cp=4, cp_mode="ulysses"), Case("qwen2_tied", "few", "sft", 3)),
    (Layout(cp=4, cp_mode="product"), Case("qwen3_window", "few", "grpo")),
    (Layout(pp=4, schedule="zero_bubble"), Case("llama", "few", "value")),
    (Layout(tp=2, dp=2), Case("llama_odd", "ones", "grpo", 3)),
    (Layout(tp=2, cp=2), Case("llama_dynamic", "giant", "gspo")),
    (Layout(cp=2, dp=2), Case("qwen2_tied", "ragged", "value", 3)),
    (Layout(pp=2, cp=2), Case("qwen3", "giant", "grpo")),
    (Layout(pp=2, cp=2, schedule="gpipe"), Case("llama_dynamic", "ragged", "gspo", 3)),
    (Layout(pp=2, dp=2, virtual_stages=2, schedule="gpipe"), Case("llama", "few", "ppo", 3)),
    (
        Layout(tp=2, pp=2, schedule="zero_bubble"),
        Case("mistral", "giant", "value"),
        Case("qwen3", "ones", "ppo", 3),
    ),
    (Layout(pp=2, dp=2, schedule="zero_bubble"), Case("llama_dynamic", "giant", "sft", 3)),
    (Layout(pp=2, cp=2, schedule="zero_bubble"), Case("qwen2_tied", "few", "gspo")),
    (
        Layout(tp=2, pp=2, virtual_stages=2, schedule="interleaved"),
        Case("llama_dynamic", "giant", "value", 3),
    ),
    (
        Layout(pp=2, dp=2, virtual_stages=2, schedule="interleaved"),
        Case("qwen3_window", "few", "gspo", 3),
    ),
    (Layout(pp=2, cp=2, virtual_stages=2, schedule="interleaved"), Case("mistral", "ones", "sft")),
    (Layout(tp=2, pp=2, dp=2), Case("qwen2_tied", "few", "value")),
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are written when a case first asks for them, and what one rank gives for it."""
    return tmp_path_factory.mktemp("matrix")


def check(folder: Path, layout: Layout, cases: tuple[Case, ...]) -> None:
    for case in cases:
        if not path_of(folder, case.model, case.depth).exists():
            write_models(folder, [case.model], case.depth)
    alone = tuple(dict.fromkeys(case.alone for case in cases if not written(folder, case.alone)))
    run(1, write_alone, str(folder), alone)
    for rank, found in enumerate(run(layout.num_ranks, compare, str(folder), layout, cases)):
        for case, figures in found.items():
            told = f"{case} on rank {rank}: {figures}"
            assert figures.worst <= SUM_ORDER, told
            assert figures.ratio <= GRAD_RATIO_FP32, told
            assert figures.stray == 0.0, told
