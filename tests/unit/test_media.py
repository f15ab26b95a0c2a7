"""What rows show: every way to name an image or a video, the tokens that it takes, and how and when it is read."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dovetail.data.examples import Limits, Prompt, load_prompts, load_score, load_sft
from dovetail.data.media import MediaLocator, MediaRef, Picture
from dovetail.data.processor import AHEAD, FileMedia, MediaCache, Processor
from dovetail.errors import DataError
from dovetail.run.state import rows_fingerprint
from tests.helpers.eyes import (
    IMAGE_ID,
    SEEN,
    VIDEO_ID,
    VOCAB,
    base64_of,
    encoded,
    picture,
    said,
    seeing_tokenizer,
    user,
)

LIMITS = Limits(VOCAB)
TOKENIZER = seeing_tokenizer()
SIZE = (24, 16)  # three rows of two features


class Squares:
    """An image processor of 4 x 4 patches that resizes nothing: what is used of transformers' ones."""

    merge_size = 2

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.threads: set[str] = set()

    def get_number_of_image_patches(self, height: int, width: int, _: dict[str, Any]) -> int:
        if height > 20 * width:
            raise ValueError("absolute aspect ratio must be smaller than 20")
        return height // 4 * (width // 4)

    def __call__(self, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        self.seen += [(image.height, image.width) for image in images]
        self.threads.add(threading.current_thread().name)
        grids = [(1, image.height // 4, image.width // 4) for image in images]
        patches = sum(h * w for _, h, w in grids)
        return {
            "pixel_values": torch.zeros(patches, 96),
            "image_grid_thw": torch.tensor(grids),
            "other": None,
        }


class Film:
    """A whole processor: a mark, two tokens for each pair of frames, and how fast they follow each other."""

    tokenizer = TOKENIZER

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(
        self, videos: list[Any], text: list[str] | None = None, **options: Any
    ) -> dict[str, Any]:
        self.asked.append({"videos": videos, "text": text, **options})
        pairs = 1 if isinstance(videos[0], str) else len(videos[0]) // 2
        return {
            "input_ids": torch.tensor([[5, *[VIDEO_ID] * (2 * pairs)]]),
            "pixel_values_videos": torch.ones(8 * pairs, 96),
            "video_grid_thw": torch.tensor([[pairs, 2, 4]]),
            "second_per_grid_ts": [0.5],
        }


def processor() -> tuple[Processor, Squares, Film]:
    squares, film = Squares(), Film()
    return Processor(IMAGE_ID, VIDEO_ID, lambda: squares, lambda: film), squares, film


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture(*SIZE)))
    return path


def test_every_way_to_name_an_image(image: Path) -> None:
    data = image.read_bytes()
    ways: list[dict[str, Any]] = [
        {"image": "a.png"},
        {"path": "a.png"},
        {"path": str(image)},
        {"url": f"file://{image}"},
        {"image": f"data:image/png;base64,{base64_of(data)}"},
        {"url": f"data:image/png;base64,{base64_of(data)}"},
        {"base64": base64_of(data)},
        {"bytes": data},
        {"image": {"bytes": data, "path": None}},
        {"image": {"bytes": None, "path": "a.png"}, "text": None, "video": None},
    ]
    for way in ways:
        finder = MediaLocator({}, image.parent)
        assert finder.messages(user({"type": "image", **way}, "?")) == user({"type": "image"}, "?")
        (found,) = finder.in_messages().images
        assert (found.height, found.width) == SIZE
        assert found.source in (image, data)


def test_columns_fill_the_places_in_order(image: Path) -> None:
    """A part with a source of its own takes none; what is left over is an error."""
    other = image.parent / "b.png"
    other.write_bytes(encoded(picture(8, 8)))
    bare, own = {"type": "image"}, {"type": "image", "path": "a.png"}
    finder = MediaLocator({"images": ["b.png", str(image)]}, image.parent)
    finder.messages(user(bare, own, bare))
    assert [found.source for found in finder.in_messages().images] == [other, image, image]
    finder = MediaLocator({"images": ["b.png"]}, image.parent)
    finder.messages(user("nothing"))
    with pytest.raises(DataError, match="1 of its images have no place in the messages"):
        finder.in_messages()


def test_an_image_is_upright_and_of_three_colors(tmp_path: Path) -> None:
    """Turned by its EXIF tag, with transparency, by a palette, gray: its size is known from the header."""
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(8, 24).save(tmp_path / "turned.jpg", exif=exif)
    picture(8, 24).convert("RGBA").save(tmp_path / "clear.webp", lossless=True)
    picture(8, 24).convert("P").save(tmp_path / "palette.gif")
    picture(8, 24).convert("L").save(tmp_path / "gray.bmp")
    names = ["turned.jpg", "clear.webp", "palette.gif", "gray.bmp"]
    made, squares, _ = processor()
    path = write(tmp_path, {"prompt": SEEN * 4, "images": names, "answer": 0})
    (prompt,) = load_prompts(path, TOKENIZER, LIMITS, processor=made)
    assert squares.seen == [], "nothing is decoded while rows are loaded"
    assert prompt.media is not None
    assert prompt.media["image_grid_thw"].tolist() == [[1, 6, 2], [1, 2, 6], [1, 2, 6], [1, 2, 6]]
    assert squares.seen == [(24, 8), (8, 24), (8, 24), (8, 24)]
    assert squares.threads != {"MainThread"}


def test_tokens_make_room(image: Path) -> None:
    """Prompts, conversations and given ids: six tokens for an image, trained nowhere; what a reward sees."""
    made, _, _ = processor()
    question = user({"type": "image", "path": "a.png"}, "?")
    row: dict[str, Any] = {"prompt": question, "answer": 1, "images": [], "level": 2}
    (prompt,) = load_prompts(write(image.parent, row), TOKENIZER, LIMITS, processor=made)
    text = said(SEEN.replace("<|image_pad|>", "<|image_pad|>" * 6), "?")
    assert list(prompt.ids) == TOKENIZER.encode(text)
    assert (prompt.prompt, prompt.columns) == (user({"type": "image"}, "?"), {"level": 2})

    answered = [*question, {"role": "assistant", "content": "it"}]
    for row in ({"messages": answered}, {"prompt": question, "completion": "it"}):
        (sequence,) = load_sft(write(image.parent, row), TOKENIZER, LIMITS, processor=made)
        assert list(sequence.ids)[: len(prompt.ids)] == list(prompt.ids)
        assert sequence.mask is not None
        assert [
            i for i, m in zip(sequence.ids, sequence.mask, strict=True) if m
        ] == TOKENIZER.encode("it<|im_end|>")
        assert sequence.media is not None

    given: dict[str, Any] = {"input_ids": [5, *[IMAGE_ID] * 6, 7], "images": ["a.png"]}
    (scored,) = load_score(write(image.parent, given), None, LIMITS, processor=made)
    assert scored.ids == tuple(given["input_ids"])
    (plain,) = load_score(write(image.parent, {"input_ids": [5, 6]}), None, LIMITS, processor=made)
    assert plain.media is None


def test_edge_case_15_a_row_that_its_image_makes_too_long(image: Path) -> None:
    made, _, _ = processor()
    rows = [{"prompt": SEEN, "images": ["a.png"], "answer": 0}, {"prompt": "b", "answer": 0}]
    path = write(image.parent, *rows)
    with pytest.raises(DataError, match=r"rows.jsonl:1: 8 tokens, but at most 7 fit"):
        load_prompts(path, TOKENIZER, Limits(VOCAB, max_tokens=7), processor=made)
    kept = load_prompts(
        path, TOKENIZER, Limits(VOCAB, max_tokens=7, overlong="drop"), processor=made
    )
    assert [prompt.id for prompt in kept] == [1]


def video_prompt(folder: Path, video: Any, **part: Any) -> tuple[Prompt, Film]:
    made, _, film = processor()
    row = {"prompt": user({"type": "video", "video": video, **part}, "?"), "answer": 0}
    (prompt,) = load_prompts(write(folder, row), TOKENIZER, LIMITS, processor=made)
    return prompt, film


def test_a_video_is_what_its_processor_makes_of_it(image: Path) -> None:
    """Frames with their rate, or a file; its tokens are the processor's, whatever they are."""
    prompt, film = video_prompt(image.parent, ["a.png"] * 4, fps=4)
    text = TOKENIZER.encode(said("<|vision_start|>", "\0", "<|vision_end|>", "?"))
    (place,) = [at for at, token in enumerate(text) if token == TOKENIZER.encode("\0")[0]]
    assert list(prompt.ids) == [*text[:place], 5, *[VIDEO_ID] * 4, *text[place + 1 :]]
    assert prompt.media is not None
    assert prompt.media["video_grid_thw"].tolist() == [[2, 2, 4]]
    assert prompt.media["second_per_grid_ts"].tolist() == [0.5]
    assert [asked["text"] for asked in film.asked] == [["<|video_pad|>"], None]
    assert film.asked[1]["video_metadata"] == [
        {"total_num_frames": 4, "fps": 4.0, "frames_indices": [0, 1, 2, 3]}
    ]
    assert [frame.size for frame in film.asked[1]["videos"][0]] == [SIZE[::-1]] * 4

    (image.parent / "film.mp4").write_bytes(b"any")
    _, film = video_prompt(image.parent, "film.mp4")
    assert film.asked[0]["videos"] == [str(image.parent / "film.mp4")]


def test_a_resumed_run_knows_its_rows(image: Path) -> None:
    """The same images have the same fingerprint, and others another."""
    other = encoded(picture(*SIZE, 9))
    told = []
    for source in (base64_of(image.read_bytes()), base64_of(image.read_bytes()), base64_of(other)):
        rows = write(
            image.parent, {"prompt": user({"type": "image", "base64": source}), "answer": 0}
        )
        told.append(
            rows_fingerprint(load_prompts(rows, TOKENIZER, LIMITS, processor=processor()[0]))
        )
    assert told[0] == told[1] != told[2]


def cache_of(count: int, capacity: int) -> tuple[MediaCache, list[FileMedia], list[str]]:
    """A cache and media of 400 bytes each; who was read, in order."""
    read: list[str] = []

    def make(media: FileMedia) -> dict[str, torch.Tensor]:
        read.append(media.where)
        if media.where == "bad":
            raise DataError("bad: broken")
        return {"pixel_values": torch.zeros(100)}

    cache = MediaCache(make, capacity)
    shown = MediaRef((Picture(b"", "image 0", 4, 4),))
    return cache, [FileMedia(shown, (1,), str(i), cache) for i in range(count)], read


def test_what_was_read_last_is_kept() -> None:
    _, (a, b, c), read = cache_of(3, 800)
    for media in (a, b, a, c, a, b):
        assert len(media["pixel_values"]) == 100
    assert read == ["0", "1", "2", "1"], "b was asked for least recently when c came"
    assert (list(a), len(a), a != b) == (["pixel_values"], 1, True)


def test_reading_ahead_is_bounded_and_an_error_waits_for_its_row() -> None:
    cache, many, read = cache_of(3 * AHEAD, 1 << 20)
    for media in many:
        media.start()
    assert [int(media["pixel_values"].sum()) for media in many[:AHEAD]] == [0] * AHEAD
    assert sorted(map(int, read)) == list(range(AHEAD))
    bad = FileMedia(many[0].shown, (1,), "bad", cache)
    bad.start()
    for _ in range(2):
        with pytest.raises(DataError, match="bad: broken"):
            bad["pixel_values"]
