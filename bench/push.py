"""Pushes of random weights to a vLLM server that generates meanwhile: -m bench.push nccl ipc --shape 7b --vllm SITE

SITE: where vLLM was unpacked (its env.sh is read), or nothing where this interpreter has it. nccl: the server is on the next
GPU; ipc, file: on the trainer's. native: vLLM's own nccl, without our plugin. For each: seconds of a push and of its parts, what
sums take, how long generation stands still, a flipped byte that must be refused, and the server's digests against ours.
"""

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.engines import SHAPES, Session, add_options, random_engine, spec_of, timed
from bench.given import run_main
from dovetail import Layout
from dovetail.engine.native import Engine
from dovetail.inference_servers.checksums import checksums_of
from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.push import Pusher
from dovetail.inference_servers.vllm_digests import ExpectedDigests
from dovetail.recipe.rollout import PushSection

PLUGIN = Path(__file__).parents[1] / "plugins" / "dovetail-vllm"
WARM, STREAMS = 2, 8
PROMPT, NEW = 128, 1024
START_SECONDS = 400.0


class TimedClient(Client):
    """Remembers when each call began and ended."""

    def __init__(self, url: str) -> None:
        super().__init__(url, timeout=300.0)
        self.calls: list[tuple[str, float, float]] = []

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        begun = time.monotonic()
        try:
            return super().post(path, body, timeout=timeout)
        finally:
            self.calls.append((path.partition("?")[0], begun, time.monotonic()))


def main() -> int:
    """One row a way."""
    parser = argparse.ArgumentParser(prog="python -m bench.push", description=__doc__)
    parser.add_argument("ways", nargs="+", choices=["nccl", "ipc", "file", "native"], metavar="WAY")
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--vllm", type=Path, help="where install.sh unpacked vLLM")
    parser.add_argument("--python", default=sys.executable, help="of the server")
    parser.add_argument("--bucket-mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", default="", help="more arguments of vllm serve")
    add_options(parser, "push")
    given = parser.parse_args()
    session = Session.start(given)
    engine = random_engine(spec_of(given.shape), Layout(), session.device)
    for way in given.ways:
        measure(way, engine, session)
    session.finish()
    return 0


def measure(way: str, engine: Engine, session: Session) -> None:
    session.begin(f"{session.given.shape} {way}")
    device = session.device
    held = [tensor.clone() for _, tensor in engine.weights(torch.bfloat16)]
    total = sum(tensor.nbytes for tensor in held)
    checksums_of(held)
    sums = median([timed(device, lambda: checksums_of(held)) for _ in range(session.given.rounds)])
    held.clear()
    gather = median(
        [timed(device, lambda: [None for _ in engine.weights(torch.bfloat16)]) for _ in range(3)]
    )
    with tempfile.TemporaryDirectory() as folder, serving(way, session, Path(folder)) as client:
        options = PushSection(
            transport="nccl" if way == "native" else way,
            proof="checker" if way == "native" else "plugin",
            bucket_mb=session.given.bucket_mb,
            timeout=200.0,
        )
        # Digests of 15 GB take seconds: one push of native includes them, the others of all ways do not.
        pusher = Pusher([client], options, kind="vllm", device=device)
        checked = way == "native"
        rounds = []
        for version in range(1, 1 + (1 if checked else WARM + session.given.rounds)):
            with generating(client) as times:
                rounds.append(one_push(pusher, engine, version, client, times))
        row = {**rounds[-1], "rounds": rounds}
        if not checked:
            for key in ("seconds", "paused", "standstill"):
                row[key] = median([one[key] for one in rounds[WARM:]])
            row |= refusal(pusher, engine, session)
            row["digests"] = digests(engine, client)
        else:
            row["digests"] = (
                f"{pusher.proved[0]} parameters, {pusher.proved[1]} of them without an expected digest"
            )
        pusher.close()
    row |= {
        "way": way,
        "bytes": total,
        "sums": sums,
        "gather": gather,
        "sums_share": sums / row["seconds"],
    }
    session.keep(row)
    session.say(
        f"{session.given.shape} {way}: push {row['seconds']:.3f} s ({total / row['seconds'] / 1e9:.1f} GB/s; gathering alone "
        f"{gather:.3f} s), paused {row['paused']:.3f} s, tokens stood still {row['standstill']:.3f} s; sums {1e3 * sums:.1f} ms "
        f"at each end ({100 * row['sums_share']:.1f} %); refusal: {row.get('refused', '-')}; digests: {row['digests']}"
    )


def one_push(
    pusher: Pusher, engine: Engine, version: int, client: TimedClient, times: list[list[float]]
) -> dict[str, Any]:
    client.calls.clear()
    torch.accelerator.synchronize() if torch.accelerator.is_available() else None
    begun = time.monotonic()
    errors = pusher.push(engine.weights(torch.bfloat16), version)
    ended = time.monotonic()
    assert errors == [None], errors
    calls = {
        path: [round(b - a, 4) for p, a, b in client.calls if p == path]
        for path, _, _ in client.calls
    }
    stop = next(b for path, _, b in client.calls if path == "/pause")
    go = next(b for path, _, b in client.calls if path == "/resume")
    time.sleep(0.5)
    gaps = [b - a for stream in times for a, b in itertools.pairwise(stream) if b > stop and a < go]
    return {
        "seconds": ended - begun,
        "paused": go - stop,
        "standstill": max(gaps, default=float("nan")),
        "calls": calls,
    }


def refusal(pusher: Pusher, engine: Engine, session: Session) -> dict[str, Any]:
    """A byte of the third bucket, or the last, is flipped between its sums and the server."""
    publish = pusher._transport.publish

    def flip(bucket: Any) -> None:
        if bucket.number == 2 or session.given.shape != "7b":
            bucket.data[bucket.entries[-1].start + 5] ^= 16
        publish(bucket)

    pusher._transport.publish = flip
    (error,) = pusher.push(engine.weights(torch.bfloat16), 1000)
    pusher._transport.publish = publish
    after = pusher.push(engine.weights(torch.bfloat16), 1001)
    message = error.message if error is not None else "NOT REFUSED"
    return {"refused": f"{message}; next push {'good' if after == [None] else after}"}


def digests(engine: Engine, client: Client) -> str:
    expected = ExpectedDigests({1})
    for name, tensor in engine.weights(torch.bfloat16):
        expected.add(name, tensor)
    answer = client.post("/weight_checker", {"action": "checksum"})["checksums"]
    wrong, unknown = expected.problems(1, answer)
    return f"{len(answer) - len(wrong) - len(unknown)} of {len(answer)} parameters as expected, {len(wrong)} wrong {wrong[:3]}"


@contextmanager
def generating(client: Client) -> Iterator[list[list[float]]]:
    """Requests that stream meanwhile: when each of their events came. No events where the server cannot stream ids."""
    times: list[list[float]] = [[] for _ in range(STREAMS)]
    over = threading.Event()

    def run(index: int) -> None:
        sampling = {"max_tokens": NEW, "ignore_eos": True, "temperature": 1.0, "detokenize": False}
        body = {
            "token_ids": list(range(10, 10 + PROMPT)),
            "model": "policy",
            "sampling_params": sampling,
            "stream": True,
        }
        try:
            for _ in client.stream("/inference/v1/generate", body, lambda: time.monotonic() + 60):
                times[index].append(time.monotonic())
                if over.is_set():
                    return
        except ServerError as error:
            if not over.is_set():
                print(f"generation: {error}", flush=True)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(STREAMS)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 20
    while (
        any(thread.is_alive() for thread in threads)
        and time.monotonic() < end
        and any(len(t) < 4 for t in times)
    ):
        time.sleep(0.05)
    try:
        yield times
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


@contextmanager
def serving(way: str, session: Session, folder: Path) -> Iterator[TimedClient]:
    given, device = session.given, session.device
    model = folder / "model"
    model.mkdir()
    config = {
        **SHAPES[given.shape],
        "architectures": ["Qwen2ForCausalLM"],
        "max_position_embeddings": 32768,
    }
    config |= {"torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}
    (model / "config.json").write_text(json.dumps(config))
    info = folder / "dovetail_vllm-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dovetail-vllm\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ndovetail = dovetail_vllm:register\n"
    )
    backend = "nccl" if way == "native" else f"dovetail_{way}"
    port = 8300 + os.getpid() % 500
    words = [
        given.python,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        port,
    ]
    words += [
        "--served-model-name",
        "policy",
        "--load-format",
        "dummy",
        "--skip-tokenizer-init",
        "--dtype",
        "bfloat16",
    ]
    words += [
        "--max-model-len",
        4096,
        "--enable-scale-out",
        "--weight-transfer-config",
        json.dumps({"backend": backend}),
    ]
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "NCCL_NVLS_ENABLE": "0",
        "HF_HUB_OFFLINE": "1",
    }
    if device.type == "cuda":
        apart = way in ("nccl", "native")
        settings["CUDA_VISIBLE_DEVICES"] = "1" if apart else "0"
        words += ["--gpu-memory-utilization", 0.7 if apart else 0.3]
        words += [
            "--compilation-config",
            json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
        ]
    paths = [folder, PLUGIN, *([given.vllm] if given.vllm else [])]
    line = " ".join(shlex.quote(str(word)) for word in words) + " " + given.serve
    source = f". {shlex.quote(str(given.vllm.resolve() / 'env.sh'))}; " if given.vllm else ""
    line = f"{source}export PYTHONPATH={':'.join(str(p.resolve()) for p in paths)}:$PYTHONPATH; exec {line}"
    given.out.mkdir(parents=True, exist_ok=True)
    client = TimedClient(f"http://127.0.0.1:{port}")
    with started(line, given.out / f"push-{way}.server.log", settings, client):
        yield client


@contextmanager
def started(line: str, log: Path, settings: Mapping[str, str], client: Client) -> Iterator[None]:
    """A server by a line of bash, from when it answers; ends with the block. settings: added to the environment."""
    with open(log, "wb") as file:
        process = subprocess.Popen(
            ["bash", "-c", line], env={**os.environ, **settings}, stdout=file, stderr=file
        )
        try:
            wait(client, process, str(log))
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def wait(client: Client, process: subprocess.Popen[bytes], log: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            client.get("/health", timeout=5)
            return
        except ServerError:
            time.sleep(1)
    raise RuntimeError(f"the server did not start: {Path(log).read_text(errors='replace')[-3000:]}")


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    run_main(main)
