"""Rows and files as other projects write them are read as those projects train them."""

import codecs
import csv
import gzip
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dovetail.data import examples
from dovetail.data.examples import Limits
from dovetail.data.files import Source
from dovetail.data.formats import FORMATS, rows_of
from dovetail.errors import DataError
from dovetail.recipe.data import DataSection
from dovetail.recipe.types import RowFormat
from tests.helpers.of_trl import of_trl
from tests.helpers.row_shapes import SHAPES, TEMPLATE, Shape, said
from tests.helpers.tokenizers import ASSISTANT, USER, make_tokenizer, spelled, write

TOKENIZER = make_tokenizer(template=TEMPLATE)
LIMITS = Limits(vocab_size=260)
ROWS = [{"prompt": "2+2=", "answer": "4"}, {"prompt": '\u00e9, "x"\n', "answer": "5"}]
LOADERS = {
    "sft": examples.load_sft,
    "rl": examples.load_prompts,
    "preference": examples.load_preferences,
    "score": examples.load_score,
}


def marked(ids: Sequence[int], mask: Sequence[bool] | None) -> str:
    """The text of ids, with [[ and ]] around what is trained."""
    text, inside = "", False
    for token, trained in zip(ids, mask or [False] * len(ids), strict=True):
        text += ("[[" if trained else "]]") if trained != inside else ""
        text, inside = text + TOKENIZER.decode([token]), trained
    return text + "]]" * inside


def read(shape: Shape, path: Path) -> Any:
    path.write_text(json.dumps(shape.row))
    said_lines: list[str] = []
    limits = Limits(vocab_size=260, warn=said_lines.append)
    more = {"answers": shape.label is not None} if shape.task == "rl" else {}
    source = Source(path=str(path), **shape.options)
    (example,) = LOADERS[shape.task](source, TOKENIZER, limits, **more)  # type: ignore[operator]  # of any kind
    line = f"rows of {path} are read as {FORMATS[shape.format][0]}"
    assert said_lines == ([] if shape.format == "trl" else [line]), "TRL's columns are ours"
    return example


def test_messages_written_as_text_are_messages(tmp_path: Path) -> None:
    """As in a table's cell."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    loaded = []
    for n, row in enumerate(({"messages": turns}, {"messages": json.dumps(turns)})):
        (tmp_path / f"{n}.jsonl").write_text(json.dumps(row))
        limits = Limits(vocab_size=260)
        (example,) = examples.load_sft(tmp_path / f"{n}.jsonl", TOKENIZER, limits)
        loaded.append(marked(example.ids, example.mask))
    assert loaded[0] == loaded[1] and "[[" in loaded[0]


def test_the_table_has_at_least_forty_shapes_of_every_format() -> None:
    assert len(SHAPES) >= 40 and len({shape.name for shape in SHAPES}) == len(SHAPES)
    assert {shape.format for shape in SHAPES} == FORMATS.keys()
    assert {"auto", *FORMATS} == set(RowFormat.__args__), "data.format names them all"  # type: ignore[attr-defined]  # a Literal
    assert DataSection(train="x").format == "auto"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name.replace(" ", "-"))
def test_a_row_is_read_as_its_project_trains_it(shape: Shape, tmp_path: Path) -> None:
    example = read(shape, tmp_path / "rows.jsonl")
    if shape.task == "preference":
        pair = (example.chosen, example.rejected)
        assert tuple(each and marked(each.ids, each.mask) for each in pair) == shape.expected
    else:
        assert marked(example.ids, vars(example).get("mask")) == shape.expected
    if shape.task == "rl":
        assert example.answer == shape.label
        assert {"data_source", "ability", "extra_info"} & shape.row.keys() <= example.columns.keys()


@pytest.fixture(scope="module")
def trl() -> Mapping[str, Any]:
    return of_trl("trl_rows")


@pytest.mark.parametrize(
    "shape", [s for s in SHAPES if s.trl], ids=lambda shape: shape.name.replace(" ", "-")
)
def test_ids_and_masks_are_those_of_trl(
    shape: Shape, trl: Mapping[str, Any], tmp_path: Path
) -> None:
    example, theirs = read(shape, tmp_path / "rows.jsonl"), trl[shape.name]
    ours = [example.chosen, example.rejected] if shape.task == "preference" else [example]
    assert [each and list(each.ids) for each in ours] == [each and each[0] for each in theirs]
    if shape.task != "rl":
        assert [each and list(each.mask) for each in ours] == [each and each[1] for each in theirs]


def write_rows(path: Path) -> Path:
    """ROWS in the file format of the name."""
    text = "\n".join(map(json.dumps, ROWS)).encode()
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".json"):
        text = codecs.BOM_UTF8 * (path.suffix == ".gz") + json.dumps(ROWS, indent=1).encode()
    if name.endswith(".csv"):
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            out = csv.DictWriter(file, ["prompt", "answer"])
            out.writeheader()
            out.writerows(ROWS)
        text = path.read_bytes()
    if name.endswith((".parquet", ".pq", ".arrow", ".feather")):
        arrow = pytest.importorskip("pyarrow")
        table = arrow.Table.from_pylist(ROWS)
        if name.endswith((".parquet", ".pq")):
            importlib.import_module("pyarrow.parquet").write_table(table, path)
        else:
            new = arrow.ipc.new_stream if name.endswith(".arrow") else arrow.ipc.new_file
            with new(str(path), table.schema) as sink:
                sink.write_table(table, max_chunksize=1)
        return path
    if path.suffix == ".zst":
        text = pytest.importorskip("pyarrow").compress(text, codec="zstd", asbytes=True)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return path


FILES = (
    "rows.jsonl", "rows.json", "rows.ndjson", "rows", "rows.csv", "rows.jsonl.gz", "rows.json.gz", "rows.csv.gz",
    "rows.jsonl.zst", "rows.parquet", "rows.pq", "rows.arrow", "rows.feather",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_any_kind_has_the_same_rows(name: str, tmp_path: Path) -> None:
    source = str(write_rows(tmp_path / name))
    assert [dict(row.given) for row in rows_of(source, lambda _: None)] == ROWS


def test_directories_and_globs_are_read_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    (folder / "inner").mkdir(parents=True)
    (folder / ".cache").mkdir()
    for number, name in enumerate(("b.jsonl", "a.jsonl.gz", "inner/c.csv", ".cache/d.jsonl")):
        path = write_rows(folder / name)
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        changed = text.replace(b"2+2=", f"{number}".encode())
        path.write_bytes(gzip.compress(changed, mtime=0) if path.suffix == ".gz" else changed)
    for name in ("README.md", "dataset_info.json"):
        (folder / name).write_text("{}")

    def prompts(source: str) -> list[str]:
        return [row.values["prompt"] for row in rows_of(source, lambda _: None)][::2]

    assert prompts(str(folder)) == ["1", "0", "2"]
    assert prompts(f"{folder}/*.jsonl") == ["0"]
    assert prompts(f"{folder}/**/*.csv") == ["2"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.json", b'{"text": "a"}\n{', r"rows\.json:2: not JSON"),
        ("rows.json", b"[1]", r"rows\.json:1: a int, not a JSON object"),
        ("rows.json", b"[{]", r"rows\.json: not JSON .*expected a list of JSON objects"),
        ("rows.csv", b"a,b\n1\n", r"rows\.csv:2: more or fewer cells than the 2"),
        ("rows.csv", b"a;b\n1;2\n", r"rows\.csv: cells are separated by ';'; expected commas"),
        ("rows.csv", b"a,a\n1,2\n", r"rows\.csv: several columns are named 'a'"),
        ("rows.csv", b'a,b\n1,"2\n', r"rows\.csv: not readable"),
        ("rows.jsonl.gz", b"no gzip", r"rows\.jsonl\.gz: not readable \(Not a gzipped file"),
        ("rows.jsonl.gz", gzip.compress(b"{}" * 999, mtime=0)[:-9], r"rows\.jsonl\.gz: not readable"),
        ("rows.md", b"", "no rows"),
        ("rows.jsonl", b'{"x": 1, "y": null}', r"jsonl:1: the row's columns \('x', 'y'\) are of no known .*data.columns="),
        ("rows.jsonl", b'{"conversations": [{"from": "me", "value": "a"}]}', "message 0 is from 'me'; expected one of human"),
        ("rows.jsonl", b'{"chosen": 1, "rejected": 2}', ":1: the row is not written as TRL's are"),
        ("rows.jsonl", b'{"input": ["a"]}', ":1: the row is not written as OpenRLHF's are"),
        ("rows.jsonl", b'{"instruction": "a", "output": "b", "history": [1]}', ":1: the row is not written as Alpaca's are"),
        ("rows.jsonl", b'{"conversations": [], "chosen": "a", "rejected": "b"}', ":1: the row is not written as ShareGPT's"),
        ("rows.csv", b"prompt\n[{'role': 'user'}]\n", r"rows\.csv:2: prompt looks like .* but is not JSON \(Expecting"),
        ("rows.jsonl", b'{"conversations": "a"}', r":1: conversations is 'a'; expected"),
        ("rows.jsonl", b'{"conversations": [{"from": "function_call", "value": "f"}]}', "message 0 calls 'f'; expected"),
        ("rows.jsonl", b'{"prompt": "a", "reward_model": "4"}', r":1: reward_model is '4'; expected \{style, ground_truth\}"),
        ("rows.jsonl", b'{"prompt": "a", "chosen": "b", "rejected": "c"}', r":1: .*which algorithm sft does not train"),
        ("rows.jsonl", b'{"text": 3}', r":1: text must be a string, not 3"),
        ("rows.jsonl", b'{"input_ids": [5, 6], "labels": [6, 7]}', r":1: labels\[0\] is 6, but input_ids\[0\] is 5"),
        ("rows.jsonl", b'{"input_ids": [5, 6], "labels": [5]}', r":1: labels must be a list of 2 numbers"),
        ("rows.jsonl", b'{"input_ids": [5], "labels": [-100]}', r":1: labels and masks leave nothing to train"),
        ("rows.jsonl", b'{"prompt": "a", "completion": [{"role": "user", "content": "b"}]}', "must be .*need a prompt"),
        ("rows.jsonl", b'{"messages": [], "chat_template_kwargs": 3}', "messages must be messages"),
    ],
)  # fmt: skip
def test_mistakes_name_file_and_row(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        examples.load_sft(tmp_path / name, TOKENIZER, LIMITS)


def test_places_of_images_become_content_parts(tmp_path: Path) -> None:
    """<image> in verl's and ShareGPT's texts, where the row has images, and OpenAI's addresses."""
    text, parts = "<image>Which?", [{"type": "image"}, {"type": "text", "text": "Which?"}]
    address = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    rows: tuple[tuple[dict[str, Any], Any], ...] = (
        (
            {
                "prompt": [{"role": "user", "content": text}],
                "reward_model": {},
                "images": ["a.png"],
            },
            parts,
        ),
        ({"prompt": [{"role": "user", "content": text}], "reward_model": {}, "images": None}, text),
        ({"conversations": [{"from": "human", "value": text}], "images": ["a.png"]}, parts),
        (
            {"messages": [{"role": "user", "content": [address]}]},
            [{"type": "image", "url": "data:image/png;base64,AA=="}],
        ),
    )
    for row, expected in rows:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        (read_row,) = rows_of(tmp_path / "rows.jsonl", lambda _: None)
        assert read_row.values["prompt"][0]["content"] == expected


def test_a_row_of_another_format_than_the_first_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"question": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}'
    )
    words = r"rows\.jsonl:2: the row is written as TRL's are, but the first one \(.*rows\.jsonl:1\) as GSM8K's; put"
    with pytest.raises(DataError, match=words):
        list(rows_of(str(tmp_path / "rows.jsonl"), lambda _: None))


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl")
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: the row lacks 'question', which data\.columns names"
    ):
        list(rows_of(Source(path=str(path), columns={"prompt": "question"}), lambda _: None))


@pytest.mark.parametrize(("side", "kept"), [("left", "-4="), ("right", "1+2")])
def test_long_rows_lose_one_side(side: Any, kept: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "1+2+3-4=", "answer": "2"}\n{"prompt": "1", "answer": "1"}'
    )
    notes: list[str] = []
    limits = Limits(vocab_size=260, max_tokens=3, truncate=side, warn=notes.append)
    cut, short = examples.load_prompts(tmp_path / "rows.jsonl", TOKENIZER, limits)
    assert (marked(cut.ids, None), marked(short.ids, None)) == (kept, "1")
    assert f"data.truncate={side} shortens 1 of 2 rows" in notes[-1]


def test_an_sft_row_whose_completion_is_cut_away_is_refused_or_dropped(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "1+2+3", "completion": "=6"}\n{"prompt": "1", "completion": "2"}'
    )
    limits = Limits(vocab_size=260, max_tokens=4, truncate="right")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 8 tokens, but at most 4 fit"):
        examples.load_sft(tmp_path / "rows.jsonl", TOKENIZER, limits)
    dropping = Limits(vocab_size=260, max_tokens=4, truncate="right", overlong="drop")
    assert len(examples.load_sft(tmp_path / "rows.jsonl", TOKENIZER, dropping)) == 1
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2+3", "completion": "=6"}')
    (row,) = examples.load_sft(tmp_path / "rows.jsonl", TOKENIZER, Limits(260, 4, truncate="left"))
    assert marked(row.ids, row.mask) == "3[[=6<|im_end|>]]"


def test_options_of_the_template_reach_it(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": [{"role": "user", "content": "a"}], "answer": 1})
    )
    (row,) = examples.load_prompts(
        tmp_path / "rows.jsonl", TOKENIZER, LIMITS, template_options={"enable_thinking": False}
    )
    assert marked(row.ids, None) == said("user", "a") + "<|im_start|>assistant\n(no thoughts)"


def test_a_template_that_marks_what_is_generated_says_what_is_trained(tmp_path: Path) -> None:
    """Also where it rewrites earlier turns, or trains more than EOS."""
    content = "{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}"
    marked = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% if loop.last %}<think></think>{% endif %}"
        + content
        + "{% else %}{{ m['content'] }}<|im_end|>{% endif %}"
        "{% endfor %}"
    )
    silent = {**ASSISTANT, "content": "No", "weight": 0}
    path = write(tmp_path, {"messages": [USER, ASSISTANT, USER, silent, USER, ASSISTANT]})
    (row,) = examples.load_sft(path, make_tokenizer(template=marked), LIMITS)
    assert spelled(row.ids, row.mask) == "It is 4<|im_end|>\nIt is 4<|im_end|>\n"
    assert spelled(row.ids).count("<think></think>") == 1
    once = marked.replace("m['role'] == 'assistant'", "loop.last")
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: the chat template marks 1 turns as generated, .* have 3"
    ):
        examples.load_sft(path, make_tokenizer(template=once), LIMITS)
    with pytest.raises(DataError, match="without an assistant turn"):
        examples.load_sft(
            write(tmp_path, {"messages": [USER, silent]}),
            make_tokenizer(template=marked),
            LIMITS,
        )
