"""`dovetail generate`: row forms, the output's keys and order, and noise that depends on no layout."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from dovetail.sampler.base import SamplingParams, TokenPrompt
from dovetail.sampler.native import NativeSampler
from dovetail.sampler.turn import Turn
from tests.helpers.program import (
    here,
    make_model,
    on_ranks,
    read_rows,
    refusal,
    refused_on,
    write_rows,
)
from tests.helpers.tolerances import MODEL_FP32

ROWS = [
    {"prompt": "ab", "id": "first"},
    {"input_ids": [9, 10, 11]},
    {"prompt": [{"role": "user", "content": "hi"}], "answer": "unused"},
    {"input_ids": [5]},
]
FLAGS = ["--samples", 3, "--max-new-tokens", 5, "--seed", 11]


@pytest.fixture(scope="module")
def sampled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("generate")
    data, out = write_rows(folder / "rows.jsonl", ROWS), folder / "out.jsonl"
    assert here("generate", "--model", model, "--data", data, "--out", out, *FLAGS).well
    return read_rows(out)


def test_one_row_for_each_sample(sampled: list[dict[str, object]]) -> None:
    assert [(row["id"], row["sample"]) for row in sampled] == [
        (i, s) for i in ("first", 1, 2, 3) for s in range(3)
    ]
    for row in sampled:
        assert list(row) == ["id", "sample", "completion", "token_ids", "log_probs", "finish"]
        ids = row["token_ids"]
        assert isinstance(ids, list)
        assert len(ids) == len(row["log_probs"])  # type: ignore[arg-type]
        assert row["finish"] == ("stop" if ids[-1] == 3 else "length")
        assert len(ids) == 5 or row["finish"] == "stop"


@pytest.mark.parametrize("layout", ["tp=2", "dp=2"])
def test_the_same_tokens_on_every_layout(
    layout: str, model: Path, sampled: list[dict[str, object]], tmp_path: Path
) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    ended = on_ranks(
        2, "generate", "--model", model, "--data", data, "--out", out, *FLAGS, "--layout", layout
    )
    assert {each.well for each in ended} == {True}
    for ours, one in zip(read_rows(out), sampled, strict=True):
        assert {k: v for k, v in ours.items() if k != "log_probs"} == {
            k: v for k, v in one.items() if k != "log_probs"
        }


def test_rows_are_written_as_they_are_sampled(
    model: Path, sampled: list[dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In portions, with the tokens of one; what ends the command in the third leaves the first two."""
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    monkeypatch.setattr("dovetail.cli.generate.ON_CPU", 1)
    argv = ["generate", "--model", model, "--data", data, "--out", out, *FLAGS]
    assert here(*argv).well
    assert [row["token_ids"] for row in read_rows(out)] == [row["token_ids"] for row in sampled]
    out.unlink()
    whole = NativeSampler.sample

    def breaks(
        self: NativeSampler, prompts: Sequence[TokenPrompt], params: SamplingParams
    ) -> list[Turn]:
        assert prompts[0].row < 2
        return whole(self, prompts, params)

    monkeypatch.setattr(NativeSampler, "sample", breaks)
    ended = here(*argv)
    (part,) = tmp_path.glob("out.jsonl.*")
    assert ended.code == 1
    assert ended.err.startswith(
        f"dovetail: not finished; the first 6 rows are in {part}\ndovetail: this is a defect"
    )
    assert [row["token_ids"] for row in read_rows(part)] == [
        row["token_ids"] for row in sampled[:6]
    ]


@pytest.mark.parametrize("out", ["/proc/out.jsonl", "x" * 250])
def test_a_place_that_cannot_be_written_is_found_before_any_weight_is_read(
    out: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.setattr("os.access", lambda *_: True)
    monkeypatch.setattr(NativeSampler, "load", None)
    told = refusal(here("generate", "--model", model, "--data", data, "--out", tmp_path / out))
    assert told.startswith(f"--out {tmp_path / out} cannot be written: "), told


def test_log_probs_are_those_of_score(
    model: Path, sampled: list[dict[str, object]], tmp_path: Path
) -> None:
    ids = [9, 10, 11]
    rows = [{"input_ids": ids + row["token_ids"]} for row in sampled if row["id"] == 1]  # type: ignore[operator]
    data, out = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
    assert here("score", "--model", model, "--data", data, "--out", out).code == 0
    for row, scored in zip([row for row in sampled if row["id"] == 1], read_rows(out), strict=True):
        expected = scored["log_probs"][len(ids) - 1 :]
        for a, b in zip(row["log_probs"], expected, strict=True):  # type: ignore[call-overload]
            assert abs(a - b) <= MODEL_FP32 * max(1.0, abs(b))


def test_every_flag_reaches_the_sampler(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SamplingParams] = []

    def record(
        _self: NativeSampler, _prompts: Sequence[TokenPrompt], params: SamplingParams
    ) -> list[Turn]:
        seen.append(params)
        return []

    monkeypatch.setattr(NativeSampler, "sample", record)
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    flags = [
        "--samples",
        2,
        "--max-new-tokens",
        7,
        "--temperature",
        0.5,
        "--top-p",
        0.9,
        "--top-k",
        11,
        "--seed",
        13,
    ]
    assert here("generate", "--model", model, "--data", data, "--out", out, *flags).code == 0
    ((samples, length, *rest),) = {
        (p.samples, p.max_new_tokens, p.temperature, p.top_p, p.top_k, p.seed) for p in seen
    }
    assert (samples, length, rest) == (2, 7, [0.5, 0.9, 11, 13])


def test_the_seed_and_greedy_sampling(
    model: Path, sampled: list[dict[str, object]], tmp_path: Path
) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "out.jsonl"
    argv = [
        "generate",
        "--model",
        model,
        "--data",
        data,
        "--out",
        out,
        "--samples",
        3,
        "--max-new-tokens",
        5,
    ]
    assert here(*argv, "--seed", 12).code == 0
    assert [row["token_ids"] for row in read_rows(out)] != [row["token_ids"] for row in sampled]
    for flags in (["--temperature", 0], ["--top-k", 1], ["--top-p", 1e-9]):
        assert here(*argv, *flags).code == 0
        ids = [tuple(row["token_ids"]) for row in read_rows(out)]
        assert all(len(set(ids[i : i + 3])) == 1 for i in range(0, 12, 3)), (
            "the likeliest tokens, three times"
        )


def test_ids_need_no_tokenizer(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tokenizer=False)
    data, out = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5]}]), tmp_path / "out.jsonl"
    assert (
        here("generate", "--model", model, "--data", data, "--out", out, "--max-new-tokens", 2).code
        == 0
    )
    assert [(row["completion"], len(row["token_ids"])) for row in read_rows(out)] == [("", 2)]
    write_rows(data, [{"prompt": "a"}])
    assert "has no tokenizer" in refusal(
        here("generate", "--model", model, "--data", data, "--out", out)
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--top-p", "1.5"], "--top-p: 1.5 is more than 1"),
        (["--top-p", "0"], "--top-p: 0 is not more than 0"),
        (["--samples", "0"], "--samples: 0 is not more than 0"),
        (["--max-new-tokens", "x"], "--max-new-tokens: invalid whole number value: 'x'"),
        (["--temperature", "-1"], "--temperature: -1 is less than 0"),
        (["--temperature", "inf"], "argument --temperature: inf is not finite"),
        (
            ["--max-new-tokens", "250"],
            "--max-new-tokens is 250 and the longest prompt has 21 tokens, 271 together, but the model has 256 pos",
        ),
        (["--layout", "dp=2,ep=2"], "ep=2 cuts experts, and this llama model has none; set ep=1"),
    ],
)
def test_options_out_of_range(flags: list[str], words: str, model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    world = 2 if "--layout" in flags else 1
    assert words in refused_on(
        world, "generate", "--model", model, "--data", data, "--out", tmp_path / "o", *flags
    )
