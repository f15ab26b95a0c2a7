"""Mixtures of experts and latent attention equal transformers', router and every expert included, cut over all axes.

`make test` runs every variant on one rank and every family on experts cut over two ranks, and plants defects where copies or
halves of tensors are summed; `make soak` runs the product, and plants them in all.
"""

from itertools import product

import pytest

from tests.helpers.parity_checks import VALUES, References, check
from tests.helpers.parity_configs import moe_configs

QUICK = {
    "tp=1,dp=1": (*moe_configs(), VALUES + "qwen3_moe"),
    "dp=2,ep=2": ("deepseek_v2", VALUES + "deepseek_v3"),
    "cp=2,ep=2": ("deepseek_v3_halves", "mixtral_window"),
    "tp=2,dp=2,ep=2": ("qwen3_moe",),
    "pp=2,cp=2,ep=2": ("qwen2_moe",),
}
HARMED = ("qwen3_moe", "qwen2_moe_tied", VALUES + "deepseek_v3")
ALL = (*moe_configs(), *(VALUES + name for name in ("qwen3_moe", "deepseek_v3")))
PRODUCT = (
    *(
        f"tp={tp},pp={pp},cp={cp},dp={dp},ep={ep}"
        for tp, pp, cp, dp, ep in product((1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2, 4))
        if 1 < tp * pp * cp * dp <= 8 and (cp * dp) % ep == 0
    ),
    "cp=4,ep=4",
)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("layout", QUICK)
def test_parity(references: References, layout: str) -> None:
    check({name: references[name] for name in QUICK[layout]}, layout, unharmed={*ALL} - {*HARMED})


@pytest.mark.soak
@pytest.mark.parametrize("layout", PRODUCT)
def test_parity_of_the_whole_product(references: References, layout: str) -> None:
    check({name: references[name] for name in ALL}, layout)
