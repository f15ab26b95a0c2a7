"""Rows with images through the commands: the numbers of plain transformers, for every family and layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dovetail.parallel.layout import Layout
from tests.helpers.eyes import (
    FAMILIES,
    MIXTURES,
    SEEN,
    Peer,
    base64_of,
    encoded,
    picture,
    said,
    save_seeing,
    user,
)
from tests.helpers.program import here, on_ranks, read_rows, refusal, write_rows
from tests.helpers.tolerances import MODEL_FP32

TALL, WIDE, SMALL = picture(37, 14, 1), picture(9, 33, 2), picture(8, 8, 3)
LAYOUT = "cp=2,dp=2"


class Written(dict[str, Path]):
    """The directory of each family, written when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, family: str) -> Path:
        self[family] = save_seeing(family, self.folder / family)
        return self[family]


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("seeing"))


def trust(family: str) -> list[str]:
    """Kimi's directory has an image processor in a file of code."""
    return ["--trust-remote-code"] if family == "kimi_k25" else []


def score_rows(folder: Path) -> list[tuple[dict[str, Any], str, list[Image.Image]]]:
    """Every form of row, the text that it stands for, and its images."""
    (folder / "tall.png").write_bytes(encoded(TALL))
    (folder / "wide.bmp").write_bytes(encoded(WIDE, "BMP"))
    parts = [
        user({"type": "image", "image": "tall.png"}, "What?"),
        user(
            "A ", {"type": "image", "base64": base64_of(encoded(SMALL))}, " or ", {"type": "image"}
        ),
    ]
    uri = f"data:image/png;base64,{base64_of(encoded(SMALL))}"
    return [
        ({"prompt": parts[0], "completion": "a cat"}, said(SEEN, "What?") + "a cat", [TALL]),
        ({"prompt": "two", "completion": " words"}, "two words", []),
        (
            {"prompt": parts[1], "images": [str(folder / "wide.bmp")], "completion": "!"},
            said("A ", SEEN, " or ", SEEN) + "!",
            [SMALL, WIDE],
        ),
        ({"prompt": f"see {SEEN}", "images": [uri], "completion": "it"}, f"see {SEEN}it", [SMALL]),
    ]


SCORED = {
    "qwen2_vl": "dp=1",
    "qwen2_5_vl": LAYOUT,
    "qwen3_vl": "cp=2",
    "glm4v": "dp=1",
    "kimi_k25": "dp=1",
}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *SCORED.items(),
        *(
            pytest.param(name, LAYOUT, marks=pytest.mark.soak)
            for name in (*FAMILIES, *MIXTURES)
            if SCORED.get(name) != LAYOUT
        ),
    ],
)
def test_scores_are_those_of_transformers(
    seeing: dict[str, Path], family: str, layout: str, tmp_path: Path
) -> None:
    peer = Peer(family, seeing[family])
    wanted = score_rows(tmp_path)
    ids = peer.inputs(f"{SEEN}ids", [TALL])["input_ids"][0].tolist()
    wanted.append(({"input_ids": ids, "images": ["tall.png"]}, f"{SEEN}ids", [TALL]))
    data, out = (
        write_rows(tmp_path / "rows.jsonl", [row for row, _, _ in wanted]),
        tmp_path / "out.jsonl",
    )
    flags = ["--layout", layout, "--tokens-per-batch", "64", *trust(family)]
    world = Layout.parse(layout).num_ranks
    ended = on_ranks(
        world, "score", "--model", seeing[family], "--data", data, "--out", out, *flags
    )
    assert {each.well for each in ended} == {True}
    for row, (_, text, images) in zip(read_rows(out), wanted, strict=True):
        log_probs, entropy = peer.log_probs(text, images)
        for a, b in zip(row["log_probs"] + row["entropy"], log_probs + entropy, strict=True):
            assert abs(a - b) <= MODEL_FP32 * max(1.0, abs(b))


def generated(folder: Path, model: Path, world: int, *flags: str) -> list[dict[str, Any]]:
    """Samples of a prompt with an image, one without, and one with two, in one wave or in several."""
    (folder / "tall.png").write_bytes(encoded(TALL))
    (folder / "wide.png").write_bytes(encoded(WIDE))
    rows = [
        {"prompt": user({"type": "image", "image": "tall.png"}, "What?")},
        {"prompt": user("no picture")},
        {"prompt": f"{SEEN} or {SEEN}", "images": ["wide.png", "tall.png"]},
    ]
    data, out = write_rows(folder / "prompts.jsonl", rows), folder / "out.jsonl"
    options = [
        "--samples",
        "2",
        "--max-new-tokens",
        "6",
        "--seed",
        "5",
        "--temperature",
        "1.0",
        *flags,
    ]
    ended = on_ranks(world, "generate", "--model", model, "--data", data, "--out", out, *options)
    assert {each.well for each in ended} == {True}
    return read_rows(out)


@pytest.mark.parametrize(
    ("family", "world"),
    [("qwen2_5_vl", 2), ("kimi_k25", 1)]
    + [
        pytest.param(name, 2, marks=pytest.mark.soak)
        for name in ("kimi_k25", "qwen2_vl", "qwen3_vl", "glm4v", *MIXTURES)
    ],
)
def test_generated_log_probs_are_those_of_the_model(
    seeing: dict[str, Path], family: str, world: int, tmp_path: Path
) -> None:
    """On one rank and on two, whose waves are others."""
    found = generated(tmp_path, seeing[family], 1, *trust(family))
    if world > 1:
        again = generated(
            tmp_path, seeing[family], world, "--layout", f"dp={world}", *trust(family)
        )
        assert [row["token_ids"] for row in again] == [row["token_ids"] for row in found]
    peer = Peer(family, seeing[family])
    prompts = [
        (said(SEEN, "What?"), [TALL]),
        (said("no picture"), []),
        (f"{SEEN} or {SEEN}", [WIDE, TALL]),
    ]
    for row, (text, images) in zip(
        found, [prompt for prompt in prompts for _ in range(2)], strict=True
    ):
        expected = peer.follow(text, images, row["token_ids"])
        for a, b in zip(row["log_probs"], expected, strict=True):
            assert abs(a - b) <= MODEL_FP32 * max(1.0, abs(b))


def test_a_processor_of_another_family_is_refused(seeing: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(seeing["qwen2_5_vl"], model)
    (model / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "CLIPImageProcessor"})
    )
    (tmp_path / "a.png").write_bytes(encoded(SMALL))
    data = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": SEEN, "images": ["a.png"], "completion": "x"}]
    )
    told = refusal(here("score", "--model", model, "--data", data, "--out", tmp_path / "out.jsonl"))
    assert "rows.jsonl:1: preprocessor_config.json names CLIPImageProcessor" in told
