"""Datasets of the hub, from a server on this machine: files of one, a name with its splits, and what is refused."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.data.files import read_rows
from dovetail.errors import DataError
from tests.helpers.hub_server import COMMIT, NAME, serve

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(3)]
READ = (
    "import sys, json; from dovetail.data.files import Source, read_rows; source = Source(**json.loads(sys.argv[1])); "
    "sys.stdout.write('\\n' + json.dumps([row.values for row in read_rows(source)]))"
)


def lines(rows: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    card = b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: data/train.jsonl\n"
    card += b"  - split: test\n    path: data/test.jsonl\n---\n"
    server = serve(
        {"README.md": card, "data/train.jsonl": lines(ROWS), "data/test.jsonl": lines(ROWS[:1])}
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def fetched(endpoint: str, folder: Path, **source: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's address is read when the library is imported."""
    own = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-c", READ, json.dumps(source)]
    return subprocess.run(
        command, env={**os.environ, **own}, capture_output=True, text=True, check=False, timeout=300
    )


def test_files_of_a_dataset(endpoint: str, tmp_path: Path) -> None:
    done = fetched(endpoint, tmp_path, path=f"hf://datasets/{NAME}@{COMMIT}/data/tr*.jsonl")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ROWS
    done = fetched(endpoint, tmp_path, path=f"hf://datasets/{NAME}@{COMMIT}/data/dev.jsonl")
    assert "dev.jsonl: no such data file" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs datasets")
def test_a_dataset_by_name(endpoint: str, tmp_path: Path) -> None:
    for more, expected in (({}, ROWS), ({"subset": "main", "split": "test"}, ROWS[:1])):
        done = fetched(endpoint, tmp_path, path=f"{NAME}@{COMMIT}", **more)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == expected
    done = fetched(endpoint, tmp_path, path=f"{NAME}@{COMMIT}", split="dev")
    assert f"{NAME}@{COMMIT} could not be loaded from the hub" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"{NAME}@main", f"{NAME}@main: 'main' is not a commit; .*{NAME}@COMMIT"),
        (NAME, f"{NAME}: no such data file; .*pin it to a commit: {NAME}@COMMIT"),
        (f"hf://datasets/{NAME}/a.jsonl", "'no revision' is not a commit"),
        ("hf://datasets/sums", "expected hf://datasets/OWNER/NAME@COMMIT"),
    ],
)
def test_what_is_not_pinned_is_refused(path: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        next(read_rows(path))
