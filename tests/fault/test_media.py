"""Hostile rows of images and videos: one message with the row's place, exit code 2, before any step where that can be."""

import importlib
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from dovetail.data.media import MAX_PIXELS
from tests.helpers.eyes import IMAGE_ID, SEEN, VIDEO_ID, encoded, picture, save_seeing, user
from tests.helpers.program import here, read_rows, refusal, write_recipe, write_rows

SIDE = 30000


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


def png_of(height: int, width: int) -> bytes:
    """A tiny file that says to be an image of any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    good = encoded(picture(24, 16))
    (tmp_path / "good.png").write_bytes(good)
    (tmp_path / "cut.png").write_bytes(good[: len(good) // 2])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "script.eps").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(run) system\n"
    )
    (tmp_path / "bomb.png").write_bytes(png_of(SIDE, SIDE))
    (tmp_path / "large.png").write_bytes(png_of(1, MAX_PIXELS + 1))
    (tmp_path / "thin.png").write_bytes(encoded(picture(2, 900)))
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    return tmp_path


def shows(source: Any, kind: str = "image") -> dict[str, Any]:
    return {"prompt": user({"type": kind, kind: source}, "?"), "completion": "x"}


def test_rows_are_refused_where_they_stand(seeing: Path, folder: Path) -> None:
    bare = user({"type": "image"})
    cases: list[tuple[dict[str, Any], str]] = [
        (
            shows("missing.png"),
            f"image 0: '{folder}/missing.png' is no file; paths are relative to the folder of the data",
        ),
        (shows("pipe.png"), "pipe.png' is no file"),
        (shows("folder.png"), "folder.png' is no file"),
        (
            shows("text.png"),
            f"image 0 ({folder}/text.png) is no image that can be read (one of PNG, JPEG",
        ),
        (shows("script.eps"), "script.eps) is no image that can be read"),
        (
            shows("http://example.com/a.png"),
            "is the address http://example.com/a.png; nothing is fetched",
        ),
        (shows("ftp://example.com/a.png"), "nothing is fetched"),
        (shows("a\0b"), "a\\x00b' is no file"),
        (shows("x" * 5000), "is no path"),
        (shows(17), "image 0 is 17; expected a path, bytes, or base64"),
        (shows(""), "image 0 is ''; expected a path"),
        (shows("data:image/png;base64,!!"), "image 0 is not base64"),
        (shows("data:image/png;base64,aGk="), "image 0 is no image that can be read"),
        (shows("bomb.png"), "decompression bomb"),
        (shows("large.png"), f"pixels, more than {MAX_PIXELS}; give a smaller image"),
        (
            shows("thin.png"),
            "the model's processor refuses it: absolute aspect ratio must be smaller than 200",
        ),
        (
            {"prompt": user({"type": "audio"}), "completion": ""},
            "a content part is {'type': 'audio'}; expected",
        ),
        (
            {"prompt": user({"type": "text"}), "completion": ""},
            "a content part is {'type': 'text'}; expected",
        ),
        ({"prompt": bare, "completion": ""}, "the row's column images has no entry left"),
        (
            {"prompt": bare, "images": "good.png", "completion": ""},
            "images is 'good.png'; expected a list",
        ),
        (
            {"prompt": bare, "images": ["good.png"] * 2, "completion": ""},
            "1 of its images have no place in the messages",
        ),
        (
            {"prompt": user({"type": "image", "path": "a", "url": "b"}), "completion": ""},
            "has path and url; give one",
        ),
        (
            {"prompt": "?", "images": ["good.png"], "completion": ""},
            "has 0 image tokens (id 260), but the row has 1 images",
        ),
        (
            {"prompt": SEEN, "completion": ""},
            "has 1 image tokens (id 260), but the row has 0 images",
        ),
        (
            {"prompt": "?", "completion": SEEN},
            "has 1 image tokens (id 260), but the row has 0 images",
        ),
        (
            {"input_ids": [5, IMAGE_ID], "images": ["good.png"]},
            "in runs of [1], but the row's images have 6 rows of",
        ),
        (
            {"input_ids": [IMAGE_ID] * 2},
            "input_ids have 2 image tokens (id 260), in runs of [2], but the row's images have 0",
        ),
        (
            {"input_ids": [IMAGE_ID, 4, *[IMAGE_ID] * 5], "images": ["good.png"]},
            "in runs of [1, 5]",
        ),
        ({"input_ids": [5], "videos": [["good.png"]]}, "input_ids with videos"),
        (
            shows(["good.png", "thin.png"], "video"),
            "video 0 has 2 frames of 2 sizes; expected frames of one size",
        ),
        (shows([], "video"), "video 0 has 0 frames of 0 sizes"),
        (
            {"prompt": user({"type": "video", "video": ["good.png"], "fps": 0}), "completion": ""},
            "fps is 0; expected",
        ),
        (
            {"prompt": SEEN * 2100, "images": ["good.png"] * 2100, "completion": ""},
            "tokens, but at most 16384 fit",
        ),
    ]
    fine = shows("good.png")
    for row, words in cases:
        data = write_rows(folder / "rows.jsonl", [fine, row])
        told = refusal(here("score", "--model", seeing, "--data", data, "--out", folder / "o"))
        assert told.startswith(f"{folder}/rows.jsonl:2: "), told
        assert words in told, told
        assert len(told) < 1000
        assert not (folder / "o").exists()


def test_an_image_that_breaks_behind_its_header(seeing: Path, folder: Path) -> None:
    """Found when it is read: the row and the file are named, and nothing is written."""
    data = write_rows(folder / "rows.jsonl", [shows("good.png"), shows("cut.png")])
    told = refusal(here("score", "--model", seeing, "--data", data, "--out", folder / "o"))
    assert told.startswith(f"{folder}/rows.jsonl:2: image 0 ({folder}/cut.png) cannot be decoded: ")
    assert not (folder / "o").exists()


def test_a_file_that_changes_after_the_rows_were_loaded(
    seeing: Path, folder: Path, monkeypatch: Any
) -> None:
    score = importlib.import_module("dovetail.cli.score")
    make = score.make_engine

    def late(*args: Any) -> Any:
        (folder / "good.png").write_bytes(encoded(picture(8, 8)))
        return make(*args)

    monkeypatch.setattr(score, "make_engine", late)
    data = write_rows(folder / "rows.jsonl", [shows("good.png")])
    told = refusal(here("score", "--model", seeing, "--data", data, "--out", folder / "o"))
    assert (
        "rows.jsonl:1: its images have (1,) rows of features, but (6,) when rows were loaded"
        in told
    )


def test_without_pillow_one_message_names_the_extra(
    seeing: Path, folder: Path, monkeypatch: Any
) -> None:
    found = importlib.import_module

    def without(name: str) -> Any:
        if name.startswith("PIL"):
            raise ImportError("No module named 'PIL'")
        return found(name)

    data = write_rows(folder / "rows.jsonl", [shows("good.png")])
    monkeypatch.setattr(importlib, "import_module", without)
    told = refusal(here("score", "--model", seeing, "--data", data, "--out", folder / "o"))
    assert "images need pillow: pip install 'dovetail-rl[vision]'" in told


def test_processors_that_do_not_load(
    seeing: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """None there, code without the flag, and one of videos, which needs torchvision and a decoder."""
    data = write_rows(folder / "rows.jsonl", [shows("good.png")])
    blind = tmp_path_factory.mktemp("blind")
    for file in seeing.iterdir():
        if file.name != "preprocessor_config.json":
            (blind / file.name).write_bytes(file.read_bytes())
    told = refusal(here("score", "--model", blind, "--data", data, "--out", folder / "o"))
    assert "its processor of images and videos does not load" in told

    kimi = save_seeing("kimi_k25", tmp_path_factory.mktemp("kimi"))
    told = refusal(here("score", "--model", kimi, "--data", data, "--out", folder / "o"))
    assert told.endswith("; pip install 'dovetail-rl[video]'\n"), (
        told
    )  # its own code stays where it is

    data = write_rows(folder / "rows.jsonl", [shows("text.png", "video")])
    told = refusal(here("score", "--model", seeing, "--data", data, "--out", folder / "o"))
    assert (
        "; pip install 'dovetail-rl[video]'" in told or "rows.jsonl:1: video 0" in told
    )  # where torchvision is there


def test_a_model_that_reads_text_only(model: Path, folder: Path) -> None:
    for row in (
        shows("good.png"),
        {"prompt": "?", "completion": "", "images": ["good.png"]},
        shows("a", "video"),
    ):
        data = write_rows(folder / "rows.jsonl", [row])
        told = refusal(here("score", "--model", model, "--data", data, "--out", folder / "o"))
        assert "but this model reads text only; drop them, or give one that sees" in told


def test_a_run_stops_before_its_first_step(seeing: Path, folder: Path) -> None:
    data = write_rows(
        folder / "rl.jsonl",
        [{"prompt": user({"type": "image", "path": "missing.png"}), "answer": 0}],
    )
    recipe = write_recipe(
        folder / "r.yaml",
        seeing,
        data,
        algorithm={"name": "grpo"},
        rollout={"backend": "transformers"},
    )
    assert "rl.jsonl:1: image 0" in refusal(here("train", recipe))
    assert not (folder / "run").exists()


def test_ids_of_videos_are_no_text(seeing: Path, folder: Path) -> None:
    data = write_rows(folder / "rows.jsonl", [{"input_ids": [5, VIDEO_ID]}, {"input_ids": [5, 6]}])
    assert "rows.jsonl:1: input_ids have 0 image tokens" in refusal(
        here("score", "--model", seeing, "--data", data, "--out", folder / "o")
    )
    data = write_rows(folder / "rows.jsonl", [{"input_ids": [5, 6]}])
    assert here("score", "--model", seeing, "--data", data, "--out", folder / "o").code == 0
    assert len(read_rows(folder / "o")) == 1
