"""A disk that is full for a while: the run goes on, and what it could not write is there in the end, whole and in order."""

import errno
import os
import resource
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail import jsonl
from dovetail.checkpoint.retention import saved_steps
from dovetail.cli.common import RowFile, portions
from dovetail.errors import CheckpointError, MachineError
from dovetail.parallel.mesh import Mesh
from dovetail.rl.tasks import RLTask
from dovetail.run import directory, metrics
from dovetail.run.metrics import MAX_WAITING, Records
from dovetail.weights.atomic import replace_file
from dovetail.weights.hf_reader import HFReader
from dovetail.weights.safetensors import TensorFileWriter
from dovetail_tools.cli import report
from tests.helpers.program import failure, here, read_rows, write_recipe, write_rows

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
usage = namedtuple("usage", "total used free")


def test_rows_samples_and_events_wait_while_the_disk_is_full(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third step to the fifth; the save of the fourth fails."""
    full = [False]

    def or_fail(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if full[0]:
                raise FULL
            return original(*args, **kwargs)

        return call

    def step(self: RLTask, number: int, *rest: Any) -> Any:
        full[0] = 2 <= number < 5
        return original(self, number, *rest)

    original = RLTask.step
    monkeypatch.setattr(RLTask, "step", step)
    for module in (metrics, directory):
        monkeypatch.setattr(module, "append", or_fail(jsonl.append))
    monkeypatch.setattr(directory, "write_samples", or_fail(metrics.write_samples))
    monkeypatch.setattr(TensorFileWriter, "close", or_fail(TensorFileWriter.close))
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "answer": "c"}])
    trainer = {
        "steps": 8,
        "save_every": 2,
        "keep_last": 9,
        "prompts_per_step": 1,
        "async_save": False,
    }
    recipe = write_recipe(
        tmp_path / "r.yaml", model, rows, algorithm={"name": "grpo"}, trainer=trainer
    )
    ended = here("train", recipe)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count("THE DISK IS FULL, the run goes on") == 1
    assert [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")] == list(range(1, 9))
    assert all(
        read_rows(tmp_path / f"run/rollouts/step_{number:06}.jsonl") for number in range(1, 9)
    )
    assert [event["kind"] for event in read_rows(tmp_path / "run/events.jsonl")] == ["save_failed"]
    assert [saved.step for saved in saved_steps(tmp_path / "run/checkpoints")[0]] == [8, 6, 2]


def test_what_waits_is_done_in_order_and_other_errors_are_raised() -> None:
    done: list[int] = []
    full = [True]

    def write(number: int) -> None:
        if full[0]:
            raise FULL
        done.append(number)

    said: list[str] = []
    waiting = Records(said.append)
    for number in range(MAX_WAITING):
        waiting.write(lambda number=number: write(number))  # type: ignore[misc]  # the number is bound
    assert (len(said), done) == (1, [])
    with pytest.raises(OSError, match="No space left"):
        waiting.write(lambda: write(MAX_WAITING))
    with pytest.raises(OSError, match="No space left"):
        waiting.flush()
    full[0] = False
    waiting.flush()
    assert done == list(range(MAX_WAITING + 1))
    with pytest.raises(IsADirectoryError):
        waiting.write(lambda: Path("/").write_text(""))


def write_out(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with RowFile(path, Mesh.solo()) as out:
        out.write(rows)


def test_a_command_whose_rows_do_not_fit_leaves_those_that_did_and_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_out(tmp_path / "out.jsonl", [{"id": "\ud800"}])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (40, before[1])
    )  # a write beyond is cut, and the next one fails
    try:
        with pytest.raises(CheckpointError, match=f"^{tmp_path}/out.jsonl: .*File too large"):
            write_out(tmp_path / "out.jsonl", ({"id": i, "text": "x" * i} for i in range(9)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_rows(tmp_path / "out.jsonl") == [{"id": "\ud800"}], "what was there stays"
    (part,) = tmp_path.glob("out.jsonl.*.part")
    assert capsys.readouterr().err == f"dovetail: not finished; the first 1 rows are in {part}\n"
    assert read_rows(part) == [{"id": 0, "text": ""}]


def test_a_command_that_fails_before_its_first_row_leaves_nothing(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, int]]:
        raise FULL
        yield {}

    with pytest.raises(MachineError, match=f"^{tmp_path}/out.jsonl: No space left"):
        write_out(tmp_path / "out.jsonl", rows())
    with pytest.raises(ZeroDivisionError), RowFile(tmp_path / "out.jsonl", Mesh.solo()):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_two_commands_that_write_one_file_leave_either_ones_rows(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with RowFile(out, Mesh.solo()) as first:
        first.write([{"id": 0}])
        write_out(out, [{"id": 0}])
        assert read_rows(out) == [{"id": 0}]
        first.write([{"id": 1}])
    assert read_rows(out) == [{"id": 0}, {"id": 1}]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("most", "parts"), [(1, [[3], [1], [2], [1]]), (3, [[3], [1, 2], [1]]), (9, [[3, 1, 2, 1]])]
)
def test_rows_are_written_in_parts(most: int, parts: list[list[int]]) -> None:
    assert [list(part) for part in portions([3, 1, 2, 1], lambda cost: cost, most)] == parts
    assert list(portions([], lambda cost: cost, most)) == []


def test_a_model_that_does_not_fit_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise FULL

    monkeypatch.setattr(TensorFileWriter, "write", fail)
    for form in ("hf", "sharded"):
        told = failure(here("convert", model, tmp_path / "out", "--to", form))
        remedy = "free some space, or choose another place"
        assert told == f"{tmp_path}/out: No space left on device; {remedy}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("every", "words"),
    [(0, "are free, but the final model takes"), (1, "are free, but 2 checkpoints take")],
)
def test_a_run_whose_result_would_not_fit_does_not_begin(
    every: int, words: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = HFReader(model)
    size = sum(weights.read(name).nbytes for name in weights.names)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    recipe = write_recipe(tmp_path / "r.yaml", model, rows, trainer={"save_every": every})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, size // 2))
    told = failure(here("train", recipe))
    assert words in told
    assert every or f"takes {size / 1e9:.2g} GB; free some, or choose another run_dir" in told
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 20 * size))
    assert here("train", recipe).code == 0


@pytest.fixture
def bad_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The disk refuses every trial file and every small file; the words of its error."""
    number: int = request.param

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number), "a temporary file")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    for name in ("write_bytes", "write_text", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    return os.strerror(number)


@pytest.mark.parametrize("bad_disk", [errno.ENOSPC, errno.EDQUOT, errno.EROFS], indirect=True)
@pytest.mark.parametrize(
    "command",
    [
        "train r.yaml",
        "score --model M --data rows.jsonl --out OUT",
        "convert M OUT --to sharded",
        "report run --out OUT",
        "import-config trl.yaml -o OUT",
    ],
)
def test_a_full_or_read_only_disk_is_one_message_with_the_path_and_exit_1(
    command: str, bad_disk: str, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job)
    place = job / "new" if command.startswith("train") else job / "OUT"
    told = failure(here(*command.replace("OUT", str(place)).split()))
    assert told.startswith(f"{place}: {bad_disk}; "), told
    assert not place.exists()


@pytest.fixture(scope="module")
def job(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model M, rows, a recipe with the run directory `new`, and a run to report."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "M").symlink_to(model)
    rows = write_rows(folder / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    write_recipe(folder / "r.yaml", model, rows, run_dir=str(folder / "new"))
    (folder / "trl.yaml").write_text("model_name_or_path: M\nnum_generations: 4\n")
    (folder / "run").mkdir()
    (folder / "run/config.yaml").write_text("run_dir: run\n")
    row = {"step": 1, "loss": 0.5, "tokens": 1, "step_seconds": 1.0}
    jsonl.append(folder / "run/metrics.jsonl", row)
    return folder


def test_errors_of_the_disk_between_checks_are_no_defect(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk becomes full after the checks, at a file that no command names."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/file")

    monkeypatch.setattr(report, "check_runs", fail)
    told = failure(here("report", job / "run"))
    assert told == "/some/file: No space left on device; free some space, or choose another place\n"


def test_a_small_file_that_does_not_fit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing write or fsync names no file by itself."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        replace_file(tmp_path / "config.yaml", b"x")
    assert caught.value.filename == str(tmp_path / "config.yaml")
    monkeypatch.setattr(jsonl, "write_whole", fail)
    with pytest.raises(OSError, match="No space left") as caught:
        jsonl.append(tmp_path / "metrics.jsonl", {"step": 1})
    assert caught.value.filename == str(tmp_path / "metrics.jsonl")


def test_no_line_is_ever_half_there(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    jsonl.append(path, {"step": 1})
    whole = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            jsonl.append(path, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == whole
    jsonl.append(path, {"step": 2})
    assert [row["step"] for row in read_rows(path)] == [1, 2]
