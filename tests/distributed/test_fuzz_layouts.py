"""Random models cut by random layouts: a clear refusal before any weight is read, or what one rank computes.

`make test` tries a few; `make soak` as many as `--draws` says, from `--draw-seed` on. Draw 17 of seed 3 again:
`pytest tests/distributed/test_fuzz_layouts.py --draws 18 --draw-seed 3 -k "many and 17"`.
"""

from pathlib import Path

import pytest

from tests.helpers.fuzz import Draw, draw, outcome, refusal, write, write_alone
from tests.helpers.harness import run
from tests.helpers.tolerances import GRAD_RATIO_FP32, SUM_ORDER

FEW = ("few-25", "few-41", "few-57")  # quick ones of many kinds; the last but one is refused
MORE = ("few-10", "few-26", "few-40")
PATIENCE = 300.0  # seconds for one draw on a busy machine


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "many" in metafunc.fixturenames:
        seed = metafunc.config.getoption("draw_seed")
        metafunc.parametrize(
            "many", [f"{seed}-{i}" for i in range(metafunc.config.getoption("draws"))]
        )


def attempt(given: Draw, folder: Path) -> str | float:
    """The common refusal of all ranks; the worst error where they compute what one rank does."""
    ranks = given.layout.num_ranks
    write(given, folder / "hollow", weights=False)
    told = run(ranks, refusal, str(folder / "hollow"), given, timeout=PATIENCE)
    assert len(set(told)) == 1, f"{given}: ranks refuse differently: {told}"
    if told[0]:
        return told[0]
    write(given, folder / "whole", weights=True)
    run(1, write_alone, str(folder / "whole"), given, timeout=PATIENCE)
    found = run(ranks, outcome, str(folder / "whole"), given, timeout=PATIENCE)
    if isinstance(found[0], str):
        assert set(found) == {found[0]}, f"{given}: ranks refuse differently: {found}"
        return found[0]
    for rank, figures in enumerate(found):
        assert not isinstance(figures, str), f"{given}: rank {rank} alone refuses: {figures}"
        assert figures.worst <= SUM_ORDER, f"{given} on rank {rank}: {figures}"
        assert figures.ratio <= GRAD_RATIO_FP32, f"{given} on rank {rank}: {figures}"
        assert figures.stray == 0.0, f"{given} on rank {rank}: {figures}"
    return max(figures.worst for figures in found if not isinstance(figures, str))


@pytest.mark.parametrize(
    "seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.soak) for seed in MORE)]
)
def test_a_few_draws(seed: str, tmp_path: Path) -> None:
    attempt(draw(seed), tmp_path)


@pytest.mark.soak
def test_many_draws(many: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.node.user_properties.append(("outcome", attempt(draw(many), tmp_path)))
