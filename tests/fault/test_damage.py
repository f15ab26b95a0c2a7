"""Whatever befalls the bytes of a training checkpoint is found before any parameter is used, and told by name."""

import json
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dovetail.checkpoint.manifest import Manifest
from dovetail.checkpoint.reader import ShardedReader
from dovetail.checkpoint.retention import from_a_whole_step, open_newest, saved_steps
from dovetail.errors import CheckpointError
from dovetail.parallel.layout import Layout
from dovetail.parallel.mesh import Mesh
from dovetail.weights.safe_paths import MANIFEST
from tests.helpers.checkpoints import write_tiny
from tests.helpers.harness import run
from tests.helpers.program import here, on_ranks, read_rows, refusal, write_recipe, write_rows
from tests.helpers.training_checkpoint import write_steps

PAGE = 4096
COUNTS = pytest.mark.parametrize(
    ("flips", "cuts"), [(60, 20), pytest.param(2000, 200, marks=pytest.mark.soak)]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of two ranks. Whoever damages one puts it right again."""
    path = tmp_path_factory.mktemp("damage")
    write_tiny(path / "source", "llama")
    run(2, write_steps, path / "source", path / "steps", Layout(tp=2))
    return path / "steps"


def newest(folder: Path) -> Path:
    return saved_steps(folder)[0][0].path


def files_of(step: Path) -> list[Path]:
    found = [path for path in sorted(step.rglob("*")) if path.is_file()]
    assert {path.suffix for path in found} >= {".safetensors", ".json", ".jinja"}
    return found


def lost_with(manifest: Manifest, path: Path) -> list[str]:
    return [
        name
        for name, tensor in manifest.tensors.items()
        if any(r.file == path.name for r in tensor.regions)
    ]


def open_whole(
    folder: Path, mesh: Mesh, step: int | None = None
) -> tuple[ShardedReader | None, list[str]]:
    """The newest step whose every byte is sound, as a run finds it."""

    def attempt(damaged: Mapping[str, str]) -> tuple[ShardedReader | None, list[str]]:
        reader, passed_over = open_newest(folder, mesh, step, damaged)
        if reader is not None:
            reader.verify_checksums(mesh, training=True)
        return reader, passed_over

    return from_a_whole_step(folder, attempt)


def expect_damage(step: Path, path: Path, folder: Path, *, falls_back: bool = True) -> str:
    """It is refused by name where exactly it is asked for, and the step before takes its place where not."""
    with pytest.raises(CheckpointError) as caught:
        ShardedReader(step).verify()
    told = str(caught.value)
    assert path.relative_to(step).as_posix() in told, told
    if not falls_back:
        return told
    reader, passed_over = open_whole(folder, Mesh.solo())
    assert reader is not None and reader.manifest.step == 1
    assert path.name in passed_over[0], passed_over
    with pytest.raises(CheckpointError, match="has no whole training state of step 2"):
        open_whole(folder, Mesh.solo(), step=2)
    with pytest.raises(
        CheckpointError, match="has no whole training state of step 7; it has step 1"
    ):
        open_whole(folder, Mesh.solo(), step=7)
    return told


@COUNTS
def test_flipped_bits_and_cut_files(flips: int, cuts: int, folder: Path) -> None:
    rng, step = random.Random(flips), newest(folder)
    manifest = ShardedReader(step).manifest
    files = files_of(step)
    for turn in range(flips + cuts):
        path = rng.choice(files)
        whole = path.read_bytes()
        at = (
            rng.randrange(len(whole))
            if rng.random() < 0.5
            else rng.randrange(min(len(whole), 2000))
        )  # headers, too
        flipped = whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]
        path.write_bytes(flipped if turn < flips else whole[:at])
        told = expect_damage(step, path, folder, falls_back=turn % 8 == 0)
        if path.suffix == ".safetensors":
            lost = lost_with(manifest, path)
            assert any(name in told for name in lost), told
            if turn >= flips:
                assert all(name in told for name in lost[:20]), told
        path.write_bytes(whole)
    ShardedReader(step).verify()


def zero_a_page(path: Path, rng: random.Random) -> None:
    whole = bytearray(path.read_bytes())
    at = rng.randrange(len(whole)) // PAGE * PAGE
    whole[at : at + PAGE] = bytes(len(whole[at : at + PAGE]))
    path.write_bytes(whole)


def append(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + bytes(rng.randrange(1, 9)))


def empty(path: Path, _: random.Random) -> None:
    path.write_bytes(b"")


def remove(path: Path, _: random.Random) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [zero_a_page, append, empty, remove])
def test_every_file_in_turn(harm: Callable[[Path, random.Random], None], folder: Path) -> None:
    rng, step = random.Random(1), newest(folder)
    manifest = ShardedReader(step).manifest
    for path in files_of(step):
        whole = path.read_bytes()
        harm(path, rng)
        if harm is zero_a_page and path.read_bytes() == whole:
            continue
        if harm is remove and path.name == MANIFEST:  # then it is no checkpoint at all
            assert [saved.step for saved in saved_steps(folder)[0]] == [1]
        else:
            told = expect_damage(step, path, folder)
            if harm is remove and path.suffix == ".safetensors":
                assert all(name in told for name in lost_with(manifest, path)[:20])
        path.write_bytes(whole)
    ShardedReader(step).verify()


def test_swapped_pieces_and_pieces_of_another_step(folder: Path) -> None:
    step = newest(folder)
    first, second = sorted(step.glob("pieces-*"))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    expect_damage(step, first, folder)
    second.write_bytes(contents[1])
    (other,) = (path for path in folder.glob("step_000001.*"))
    shutil.copy(other / first.name, first)
    assert first.stat().st_size == len(contents[0]), "sizes and headers are the same"
    expect_damage(step, first, folder)
    first.write_bytes(contents[0])
    ShardedReader(step).verify()


def test_nothing_whole_is_never_a_fresh_start(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "steps", symlinks=True))
    for piece in copy.glob("step_*.*/pieces-*"):
        piece.write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be read; move it away to start anew"
    ) as caught:
        open_whole(copy, Mesh.solo())
    assert str(caught.value).count("has 0 bytes") == 2


def _rank_that_sees_it(folder: Path) -> str:
    """Each rank checks its share, so one alone meets the damage."""
    mesh = Mesh.build(Layout(dp=2))
    reader, passed_over = open_whole(folder, mesh)
    assert reader is not None
    return f"{reader.manifest.step} {passed_over}"


def test_all_ranks_fall_back_together(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "steps", symlinks=True))
    piece = next(newest(copy).glob("pieces-*"))
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    first, second = run(2, _rank_that_sees_it, copy)
    assert first == second
    assert first.startswith("1 ['rank ")


@pytest.fixture(scope="module")
def once(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe and its run after three steps; tests copy it, since recipes name it."""
    folder = tmp_path_factory.mktemp("once")
    rows = write_rows(
        folder / "rows.jsonl",
        [{"prompt": "ab", "completion": "cd"}, {"prompt": "x", "completion": "y"}],
    )
    recipe = write_recipe(
        folder / "r.yaml", model, rows, trainer={"steps": 3, "save_every": 1, "keep_last": 9}
    )
    assert here("train", recipe).code == 0
    shutil.rmtree(folder / "run/hf")
    return folder


@pytest.fixture
def trained(once: Path, tmp_path: Path) -> tuple[Path, Path]:
    folder = Path(shutil.copytree(once, tmp_path / "job", symlinks=True))
    recipe = folder / "r.yaml"
    recipe.write_text(recipe.read_text().replace(str(once), str(folder)))
    return recipe, folder / "run"


def flip(piece: Path) -> None:
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def test_a_run_falls_back_and_says_so(trained: tuple[Path, Path]) -> None:
    recipe, run_dir = trained
    straight = [
        {k: row[k] for k in ("step", "loss", "grad_norm")}
        for row in read_rows(run_dir / "metrics.jsonl")
    ]
    damaged = newest(run_dir / "checkpoints")
    flip(next(damaged.glob("pieces-*")))
    told = refusal(here("train", recipe, "--resume", "step=3"))
    assert "has no whole training state of step 3" in told and "does not match its checksum" in told
    assert newest(run_dir / "checkpoints") == damaged, "a refusal moves nothing"
    ended = here("train", recipe)
    assert ended.code == 0, ended
    assert "passed over: " in ended.out and "resumed after step 2" in ended.out
    kinds = [event["kind"] for event in read_rows(run_dir / "events.jsonl")]
    assert kinds == ["checkpoint_passed_over", "resumed"]
    assert damaged.name in read_rows(run_dir / "events.jsonl")[0]["cause"]
    now = [
        {k: row[k] for k in ("step", "loss", "grad_norm")}
        for row in read_rows(run_dir / "metrics.jsonl")
    ]
    assert now == straight
    assert (run_dir / "superseded/001/checkpoints" / damaged.name).is_dir(), (
        "kept, but no longer among the good ones"
    )
    ShardedReader(newest(run_dir / "checkpoints")).verify()


def test_going_back_to_an_older_step_leaves_one_past(trained: tuple[Path, Path]) -> None:
    """What was done after it is set aside at once: a kill before the next save must not bring it back."""
    recipe, run_dir = trained
    later = [saved.path.name for saved in saved_steps(run_dir / "checkpoints")[0]][:2]
    assert here("train", recipe, "--resume", "step=1", "optim.lr=0.5", "trainer.steps=1").code == 0
    assert [saved.step for saved in saved_steps(run_dir / "checkpoints")[0]] == [1]
    assert (run_dir / "checkpoints/latest").read_text().strip() == newest(
        run_dir / "checkpoints"
    ).name
    assert {path.name for path in (run_dir / "superseded/001/checkpoints").iterdir()} == set(later)
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == [1]
    assert [row["step"] for row in read_rows(run_dir / "superseded/001/metrics.jsonl")] == [2, 3]
    shutil.rmtree(run_dir / "hf")
    assert [each.code for each in on_ranks(1, "train", recipe, "optim.lr=0.5")] == [0]
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == [1, 2, 3]
    assert {path.name for path in (run_dir / "checkpoints").glob("step_??????")} == {
        f"step_00000{n}" for n in (1, 2, 3)
    }


def test_a_copy_of_a_run_that_followed_its_links_goes_on(trained: tuple[Path, Path]) -> None:
    """Directories where links belong, as `scp -r` makes them: no save could replace them, and no removal would find them."""
    recipe, run_dir = trained
    folder = run_dir / "checkpoints"
    (folder / "latest").unlink()
    (folder / "latest").mkdir()  # somebody's own link
    for link in list(folder.glob("step_??????")):
        there = link.resolve()
        link.unlink()
        shutil.copytree(there, link)
    assert here("train", recipe, "--resume", "step=1").code == 0
    assert [event["kind"] for event in read_rows(run_dir / "events.jsonl")] == ["resumed"]
    links = {path.name: path.readlink().name for path in folder.glob("step_??????")}
    assert set(links) == {"step_000001", "step_000002", "step_000003"}
    assert set(links.values()) == {saved.path.name for saved in saved_steps(folder)[0]}


@pytest.mark.parametrize("harm", ["cut", "bytes", "line", "other", "short", "end", "gone"])
def test_damaged_rows_of_metrics_stop_no_run(harm: str, trained: tuple[Path, Path]) -> None:
    """Nor do files that are not the run's."""
    recipe, run_dir = trained
    (run_dir / "rollouts/step_of_mine.txt").write_text("")
    (run_dir / "hf").symlink_to("nowhere")
    shutil.rmtree(newest(run_dir / "checkpoints"))
    metrics = run_dir / "metrics.jsonl"
    whole = metrics.read_bytes()
    lines = whole.splitlines(keepends=True)
    changed = {
        "cut": whole[:-5],
        "bytes": lines[0] + b"\xff\xfe" + lines[1],
        "line": lines[0] + b"{\n" + lines[2],
        "other": lines[0] + b"null\n" + lines[1],
        "short": lines[0] + b'{"step": 2}\n' + lines[2],
        "end": (lines[0] + lines[1])[:-1],
        "gone": b"",
    }
    metrics.write_bytes(changed[harm])
    assert here("train", recipe).code == 0
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    whole_again = ("cut", "end", "other")  # no row was lost, or the last, which is trained again
    expected = [1, 2, 3] if harm in whole_again else [1, 3]
    assert steps == ([3] if harm == "gone" else expected)
    if harm not in ("gone", "end"):
        assert re.search(rb"\S", (run_dir / "superseded/001/metrics.jsonl").read_bytes()), (
            "nothing is thrown away"
        )
