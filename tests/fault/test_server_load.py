"""`dovetail serve` as a program: memory and threads under attack, and with thousands that wait."""

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dovetail import system
from dovetail.inference_servers.http import Client, ServerError
from dovetail.launch.process import python_module
from tests.helpers.server_attacks import GENERATE, post

MIB = 1 << 20
WAITING = 10_000
pytestmark = pytest.mark.soak


@dataclass
class Program:
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def status(self, name: str) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+)", text)
        assert found is not None
        return int(found[1])

    @property
    def memory(self) -> int:
        return self.status("VmRSS") << 10


@pytest.fixture
def program(model: Path, tmp_path: Path) -> Iterator[Program]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", str(model), "--port", str(port), "--device", "cpu"]
    key = {"DOVETAIL_ENGINE_KEY": "sk-quite-secret"}
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [*python_module("dovetail"), *words], env=os.environ | key, stdout=log, stderr=log
        )
    made = Program(port, process.pid)
    try:
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(ServerError):
                Client(made.url).get("/health")
                break
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.1)
        yield made
        assert process.poll() is None, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("length", ["-1", str(1 << 30), None])
def test_bodies_without_the_key_are_not_held(program: Program, length: str | None) -> None:
    """None: chunked."""
    before = program.memory
    headers = {"content-length": length, "transfer-encoding": None if length else "chunked"}
    chunk = b"%x\r\n%s\r\n" % (MIB, b"y" * MIB) if length is None else b"y" * MIB
    for path in ("/health", GENERATE):
        with socket.create_connection(("127.0.0.1", program.port)) as peer:
            with contextlib.suppress(ConnectionError):
                peer.sendall(post(path, b"", key=None, headers=headers))
                for _ in range(300):
                    peer.sendall(chunk)
    assert program.memory - before < 100 * MIB
    assert Client(program.url).get("/health") == {}


def test_thousands_that_wait_take_no_threads(program: Program) -> None:
    """While the server is paused; then all are answered."""
    system.raise_open_files_limit()
    count = min(WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500)
    client = Client(program.url, key="sk-quite-secret")
    client.post("/pause?mode=keep&clear_cache=false")
    memory, threads = program.memory, program.status("Threads")

    async def ask(number: int, begun: asyncio.Semaphore) -> bytes:
        sampling = {"max_tokens": 2, "seed": number, "temperature": 1 + number % 3}
        body = json.dumps({"token_ids": [1, 2, 3], "sampling_params": sampling}).encode()
        raw = post(GENERATE, body, headers={"connection": "close"})
        async with begun:
            reader, writer = await asyncio.open_connection("127.0.0.1", program.port)
            writer.write(raw)
            await writer.drain()
        answer = await reader.read()
        writer.close()
        return answer

    async def all_of_them() -> list[bytes]:
        begun = asyncio.Semaphore(200)
        tasks = [asyncio.create_task(ask(number, begun)) for number in range(count)]
        await asyncio.sleep(1)
        while program.status("VmRSS") and open_sockets(program.pid) < count:
            await asyncio.sleep(0.2)
        assert program.status("Threads") <= threads + 4
        assert program.memory - memory < 500 * MIB
        await asyncio.to_thread(client.post, "/resume")
        return await asyncio.gather(*tasks)

    answers = asyncio.run(all_of_them())
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)


def open_sockets(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
