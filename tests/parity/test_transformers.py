"""Outputs and gradients equal transformers', for every family and option, cut over tp, pp, cp and dp.

`make test` runs every variant on one rank and on some layout with pp or cp, on tp=2 those whose weights or heads are others
(angles and windows are of whole heads), and the others of the product where they differ in kind (copies of key-value
heads, padded vocabulary, ties, biases), and plants defects in some of them;
`make soak` runs the whole product, and plants them in all.
"""

from itertools import product

import pytest

from tests.helpers.parity_checks import VALUES, References, check
from tests.helpers.parity_configs import PADS, tiny_configs
from tests.helpers.parity_reference import make_batch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "apertus")
CRITICS = tuple(VALUES + name for name in FAMILIES)
HARMED = ("apertus", "llama", "llama_biases", "llama_one_kv_head", "qwen2_tied", CRITICS[2])

WHOLE_HEADS = (
    *(
        "llama_linear",
        "llama_dynamic",
        "llama_longrope",
        "llama_llama3",
        "llama_yarn",
        "llama_partial",
    ),
    *("qwen2_yarn", "qwen2_window", "qwen3_window"),
)
SQUARE = ("llama", "qwen2")  # on tp=2,dp=2 instead of tp=2
LIKE_OTHERS = (  # cut by tp as others are
    *(
        "apertus_biases",
        "llama_all_kv_heads",
        "llama_head_dim",
        "mistral",
        "mistral_window",
        "qwen3",
        "qwen3_tied",
    ),
)
QUICK = {
    "tp=1,dp=1": (*tiny_configs(), CRITICS[0]),
    "tp=2,dp=1": (
        *(name for name in tiny_configs() if name not in (*WHOLE_HEADS, *SQUARE, *LIKE_OTHERS)),
        CRITICS[0],
    ),
    "tp=2,dp=2": (*SQUARE, CRITICS[3]),
    "pp=2": (
        *(
            "apertus_biases",
            "llama",
            "llama_all_kv_heads",
            "llama_biases",
            "llama_dynamic",
            "llama_linear",
        ),
        *("qwen2", "qwen3_biases", "qwen3_tied", *CRITICS[1:3], CRITICS[4]),
    ),
    "cp=2": (
        *(
            "apertus",
            "llama_tied",
            "llama_head_dim",
            "llama_partial",
            "llama_one_kv_head",
            "llama_longrope",
        ),
        *(
            "llama_llama3",
            "llama_yarn",
            "mistral_window",
            "qwen2_window",
            "qwen2_yarn",
            "qwen3",
            "qwen3_window",
        ),
        CRITICS[0],
    ),
    "pp=2,dp=2": ("mistral", "qwen2_tied", CRITICS[3]),
}
# tp=8,dp=2 included, the widest; with pp and cp up to 8 ranks. Most models have two layers.
PRODUCT = tuple(
    f"tp={tp},pp={pp},cp={cp},dp={dp}"
    for tp, pp, cp, dp in product((1, 2, 4, 8), (1, 2), (1, 2, 4, 8), (1, 2, 4))
    if tp * pp * cp * dp <= 8 or (pp, cp, dp) == (1, 1, 2)
)


ALL = tuple(title + name for title in ("", VALUES) for name in tiny_configs())


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("layout", QUICK)
def test_parity(references: References, layout: str) -> None:
    check(
        {name: references[name] for name in QUICK[layout]},
        layout,
        unharmed={*ALL} - {*HARMED},
    )


@pytest.mark.soak
@pytest.mark.parametrize("layout", PRODUCT)
@pytest.mark.parametrize("family", FAMILIES)
def test_parity_of_the_whole_product(references: References, family: str, layout: str) -> None:
    check(
        {name: references[name] for name in ALL if name.removeprefix(VALUES).startswith(family)},
        layout,
    )


def test_the_batch_has_the_ids_whose_rows_are_not_trained() -> None:
    assert set(PADS) < set(make_batch().tokens.tolist())


def test_every_variant_meets_pp_or_cp() -> None:
    layouts = [layout for layout in QUICK if "pp" in layout or "cp" in layout]
    met = {name for layout in layouts for name in QUICK[layout]}
    assert met == {*tiny_configs(), *CRITICS}
