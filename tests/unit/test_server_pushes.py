"""What a server takes from those who push weights: files, memory, time; one trainer at a time."""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from dovetail.errors import CheckpointError
from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.protocol import ServerRequest
from dovetail.inference_servers.transports import map_memory
from dovetail.serving import receive
from dovetail.serving.receive import Receiver
from tests.helpers.served import GREEDY, fleet_of, pusher, request, serving, weights

BUCKET = {"bucket": 0, "num_bytes": 8, "tensors": [["a", "float32", [2], 0, "0"]]}


def refused(work: Callable[[], object]) -> str:
    with pytest.raises((CheckpointError, OSError)) as error:
        work()
    return str(error.value)


def test_files_are_taken_from_one_directory_alone(tmp_path: Path) -> None:
    inside, outside = tmp_path / "pushes", tmp_path / "secret"
    inside.mkdir()
    outside.write_bytes(bytes(8))
    (inside / "link").symlink_to(outside)
    (inside / "short").write_bytes(bytes(7))
    os.mkfifo(inside / "pipe")
    (inside / "zero").symlink_to("/dev/zero")
    receiver = Receiver(torch.device("cpu"), inside, max_bytes=16)

    def take(path: Path, **changes: object) -> str:
        return refused(lambda: receiver.take({**BUCKET, "file": str(path), **changes}))

    alone = f"files are taken from {inside} alone; start the server with --push-dir"
    others = (outside, inside / ".." / "secret", Path("/dev/zero"))
    for path in (*others, inside / "link", inside / "zero"):
        assert alone in take(path)
    assert "is not a regular file" in take(inside / "pipe")
    assert "has 7 bytes, announced were 8" in take(inside / "short")
    assert "No such file" in take(inside / "none")
    assert "its tensors end at 8" in take(inside / "short", num_bytes=1 << 40)
    large = [["a", "float32", [1 << 40], 0, "0"]]
    assert "at most 16 are taken" in take(inside / "short", num_bytes=1 << 42, tensors=large)
    closed = Receiver(torch.device("cpu"))
    assert "files are taken from no directory alone" in refused(
        lambda: closed.take({**BUCKET, "file": str(inside / "short")})
    )


def test_memory_is_taken_from_trainers_alone(tmp_path: Path) -> None:
    """Mapping a file could change it."""
    file = tmp_path / "file"
    file.write_bytes(b"12")
    other = os.memfd_create("other")
    mine = os.memfd_create("dovetail-push")
    os.truncate(mine, 4)
    with open(file, "rb") as opened:
        for path, says in (
            (str(file), "not an open file"),
            ("/dev/zero", "not an open file"),
            (f"/proc/{os.getpid()}/fd/{opened.fileno()}", "not memory of a trainer"),
            (f"/proc/{os.getpid()}/fd/{other}", "not memory of a trainer"),
            (f"/proc/{os.getpid()}/fd/9999", "is not there"),
            (f"/proc/{os.getpid()}/fd/{mine}", "has 4 bytes, announced were 8"),
        ):
            assert says in refused(partial(map_memory, {"path": path}, 8))
    assert file.read_bytes() == b"12"
    assert len(map_memory({"path": f"/proc/{os.getpid()}/fd/{mine}"}, 4)) == 4
    os.close(mine)
    os.close(other)


def test_a_trainers_timeout_is_bounded_and_samples_go_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the server waits for a trainer that never comes."""
    monkeypatch.setattr(receive, "MAX_SECONDS", 1.0)
    info = {"timeout": 1e6, "backend": "gloo", "master_address": "127.0.0.1", "master_port": 9}
    body = {"init_info": {**info, "world_size": 2, "rank_offset": 1}}
    with serving() as server:
        fleet = fleet_of(server)
        ended = list[str]()

        def join() -> None:
            with pytest.raises(ServerError, match="HTTP 500") as error:
                Client(server.url).post("/init_weight_transfer_engine", body)
            ended.append(error.value.message)

        joining = threading.Thread(target=join)
        begun = time.monotonic()
        joining.start()
        asked: ServerRequest = request([1, 2], GREEDY)
        assert len(fleet.threads.submit(fleet.generate, asked).result().ids) == 1
        assert not ended
        joining.join()
        assert ended and time.monotonic() - begun < 20
        made = pusher(server, tmp_path, monkeypatch)
        assert made.push(weights().items(), 1) == [None]
        fleet.close()


def test_a_second_trainer_is_named_to_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(name: str) -> None:
        monkeypatch.setattr(os, "getpid", lambda: int(name))

    with serving() as server:
        first, second = (pusher(server, tmp_path, monkeypatch) for _ in range(2))
        of("11")
        assert first.push(weights().items(), 1) == [None]
        assert first.push(weights().items(), 2) == [None]
        of("22")
        assert second.push(weights().items(), 1) == [None], "the first may have ended"
        for name, other, made in (("11", "22", first), ("22", "11", second), ("11", "22", first)):
            of(name)
            (error,) = made.push(weights().items(), 3)
            assert error is not None and error.status == 409
            assert "two trainers push to this server: you" in error.message
            assert f"process {name} from 127.0.0.1) and " in error.message
            assert f"process {other} from 127.0.0.1; give each run servers" in error.message
        of("33")
        third = pusher(server, tmp_path, monkeypatch)
        assert third.push(weights().items(), 4) == [None], "the next run goes on"
