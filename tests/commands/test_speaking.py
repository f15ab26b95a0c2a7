"""What commands say: the header of a run and its log, progress, and closing lines."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest

import dovetail
from dovetail.cli import header as lines
from dovetail.engine.native import Engine
from dovetail.factory.notes import rows_line
from dovetail.sampler.native import NativeSampler
from tests.helpers.program import here, program, read_rows, start, write_recipe, write_rows

HEADER_SECONDS = 5.0  # until the header; the machine of a test may be busy, so the CPU time of the process counts
RL_ROWS = [{"prompt": "ab", "answer": "c"}, {"prompt": "a longer one", "answer": "h"}]


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    rows = write_rows(tmp_path / "rows.jsonl", RL_ROWS)
    return write_recipe(
        tmp_path / "r.yaml", model, rows, algorithm={"name": "grpo", "kl_coef": 0.1}
    )


def test_a_run_begins_with_its_header_and_keeps_what_it_said(
    recipe: Path, model: Path, tmp_path: Path
) -> None:
    ended = here("train", recipe, "--device", "cpu")
    assert (ended.code, ended.err) == (0, "")
    parameters = lines.count_parameters(model)
    cores = len(os.sched_getaffinity(0))
    assert ended.out.splitlines()[:9] == [
        f"dovetail {dovetail.__version__}: grpo",
        f"model    {model} (llama, {parameters / 1e3:.3g} k parameters), float32",
        "layout   tp=1 (1 rank)",
        f"devices  cpu, {cores} cores",
        f"data     {tmp_path}/rows.jsonl",
        "steps    2 of 2 rows with 2 samples of at most 4 tokens",
        f"memory   about {parameters * 24 / 2**30:.2g} GiB a rank for weights, gradients, moments, sampler's weights; "
        "activations come on top",
        f"run_dir  {tmp_path}/run",
        "rows     2 of 2 to 12 tokens (median 7); 0 held out",
    ]
    assert (tmp_path / "run/console.log").read_text() == ended.out


def test_parameters_are_those_of_the_files(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model)
    assert lines.count_parameters(model) == sum(tensor.numel() for tensor in whole.parameters())
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 99)
    assert lines.count_parameters(tmp_path) == lines.count_parameters(tmp_path / "none") == 0


def test_lengths_of_rows() -> None:
    assert rows_line([5, 1, 9], 4) == "rows     3 of 1 to 9 tokens (median 5); 4 held out"


def test_a_dry_run_prints_the_recipe_alone(recipe: Path) -> None:
    ended = here("train", recipe, "--dry-run")
    assert ended.code == 0 and ended.out.startswith("model:\n")


@pytest.mark.parametrize("layout", ["dp=1", "dp=2"])
def test_the_header_appears_at_once(layout: str, recipe: Path) -> None:
    """Before torch is imported."""
    process = start("train", recipe, "--layout", layout, "--device", "cpu", executed=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("dovetail ")
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        assert sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") < HEADER_SECONDS
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text() or layout == "dp=1"
    finally:
        process.kill()
        process.communicate()


def test_the_header_is_written_by_one_process(recipe: Path) -> None:
    ended = program("train", recipe, "--layout", "dp=2", "--device", "cpu")
    assert ended.code == 0
    assert ended.out.startswith("dovetail ")
    assert ended.out.count("run_dir  ") == ended.out.count("rows     ") == 1
    logs = sorted((recipe.parent / "run/logs").glob("rank-*"))
    texts = [log.read_text() for log in logs]
    assert [log.name for log in logs] == ["rank-0.log", "rank-1.log"]
    assert texts[0].count(ended.out) == 1
    assert all(f": rank {rank} of 2 on " in text.splitlines()[0] for rank, text in enumerate(texts))


ROWS = [{"input_ids": [5 + i % 50, 6, 7, *range(8, 8 + i % 9)]} for i in range(40)]


def score(model: Path, data: Path, out: Path) -> list[object]:
    return ["score", "--model", model, "--data", data, "--out", out, "--tokens-per-batch", 32]


@pytest.mark.parametrize("cut", ["between parts", "in a row", "nothing", "other data"])
def test_a_score_that_was_killed_goes_on_with_the_same_command(
    cut: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    whole = here(*score(model, data, tmp_path / "whole.jsonl"))
    assert (whole.code, whole.err, whole.out) == (
        0,
        "",
        f"wrote 40 rows to {tmp_path}/whole.jsonl\n",
    )
    passes, at_most, infer = [], 6, Engine.score

    def counted(self: Engine, *batch: Any) -> Any:
        passes.append(batch)
        if len(passes) == at_most:
            raise KeyboardInterrupt
        return infer(self, *batch)

    monkeypatch.setattr(Engine, "score", counted)
    out = tmp_path / "out.jsonl"
    assert here(*score(model, data, out)).code == 130
    (part,) = tmp_path.glob("out.jsonl.*.part")
    kept = len(read_rows(part))
    assert 0 < kept < 40 and not out.exists()
    if cut == "in a row":
        part.write_bytes(part.read_bytes()[:-9])
    if cut == "nothing":
        part.write_bytes(b"")
    if cut == "other data":
        write_rows(data, [*ROWS[1:], ROWS[0]])
    at_most, first = 0, len(passes)
    ended = here(*score(model, data, out))
    assert ended.code == 0 and ended.out == f"wrote 40 rows to {out}\n"
    going_on = re.search(r"going on after (\d+) rows of an earlier start, kept in ", ended.err)
    if cut in ("nothing", "other data"):
        assert going_on is None and len(read_rows(out)) == 40
    else:
        assert going_on is not None and int(going_on[1]) == kept - (cut == "in a row") * (
            kept - int(going_on[1])
        )
        assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes(), (
            "the same bits as in one go"
        )
    assert len(list(tmp_path.glob("out.jsonl.*.part"))) == (cut == "other data")
    assert first == 6


def test_a_generate_that_was_killed_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.cli.generate.ON_CPU", 8)
    data = write_rows(tmp_path / "rows.jsonl", ROWS[:12])
    argv = ["generate", "--model", model, "--data", data, "--samples", 2, "--max-new-tokens", 4]
    assert (
        here(*argv, "--out", tmp_path / "whole.jsonl").out
        == f"wrote 24 rows to {tmp_path}/whole.jsonl\n"
    )
    draw, out, calls = NativeSampler.sample, tmp_path / "out.jsonl", []

    def sample(self: NativeSampler, *given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return draw(self, *given)

    monkeypatch.setattr(NativeSampler, "sample", sample)
    assert here(*argv, "--out", out).code == 130
    ended = here(*argv, "--out", out)
    assert ended.code == 0 and "going on after 16 rows" in ended.err and len(calls) == 4
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_convert_ends_with_what_it_wrote(model: Path, tmp_path: Path) -> None:
    ended = here("convert", model, tmp_path / "sharded", "--to", "sharded")
    assert (
        re.fullmatch(rf"wrote \d+ files \([\d.e-]+ GB\) to {tmp_path}/sharded\n", ended.out)
        and ended.err == ""
    )


SLOW = """
import time
def reward(prompts, completions, **columns):
    time.sleep(0.3)
    return [float(len(text)) for text in completions]
"""


def test_a_terminal_shows_what_goes_on(recipe: Path) -> None:
    """The phases of a step with their counts; a pipe shows none."""
    (recipe.parent / "slow.py").write_text(SLOW)
    master, terminal = os.openpty()
    process = start(
        "train",
        recipe,
        "reward.import=slow:reward",
        "rollout.max_new_tokens=100",
        stdout=terminal,
        stderr=terminal,
        env={"TERM": "xterm"},
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while data := os.read(master, 1 << 16):
            shown += data
    assert process.wait(300) == 0, shown
    for word in (
        b"rows     2 of",
        b"training",
        b"rollout",
        b"reward",
        b"tokens/s",
        b"2/4",
        b"step 2/2",
    ):
        assert word in shown, word


def test_a_run_whose_rewards_were_all_equal_says_so_in_its_summary(recipe: Path) -> None:
    (recipe.parent / "equal.py").write_text(
        "def reward(prompts, completions, **columns): return [0.5] * len(prompts)"
    )
    ended = here("train", recipe, "reward.import=equal:reward")
    assert ended.code == 0
    words = "learned            nothing: every group of samples had equal rewards, in every step; take prompts that the model"
    assert words in ended.out
