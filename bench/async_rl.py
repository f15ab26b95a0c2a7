"""Asynchronous against synchronous GRPO on two GPUs, through `dovetail train`: -m bench.async_rl sync engine lag=2 --vllm SITE

sync: the embedded sampler, both GPUs train and sample. engine: a server on the second GPU, in turns with the trainer on the
first. lag=N: both at once, with trainer.max_lag=N. load: the server's speed alone, which the others measure, too. SITE: where
vLLM was unpacked (its env.sh is read). With --engine native the server is `dovetail serve`, else vLLM. Random weights; a
response ends where one of many ids is drawn, so that lengths are geometric: of 256 the longest has about six times the mean.
"""

import argparse
import contextlib
import json
import os
import random
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from bench.engines import SHAPES, Session, add_options, random_engine
from bench.given import positive, run_main
from bench.push import PLUGIN, started
from dovetail import Layout
from dovetail.arch.registry import spec_from_config
from dovetail.inference_servers.http import Client
from dovetail.inference_servers.protocol import STREAMED
from dovetail.inference_servers.vllm import GENERATE
from dovetail_tools.simulator import Setup, Simulation

PROMPT, ROWS = 128, 512
CONCURRENT = (
    1,
    8,
    64,
    128,
    256,
)  # requests, at which an engine's speed is measured for the simulator
SETTLE, MEASURE, SILENCE = 3.0, 5.0, 60.0  # seconds
REWARD = """import zlib


def reward(completions, **_):
    return [zlib.crc32(text.encode()) % 2 for text in completions]
"""


def main() -> int:
    """One row a mode."""
    parser = argparse.ArgumentParser(prog="python -m bench.async_rl", description=__doc__)
    parser.add_argument("modes", nargs="+", metavar="MODE", help="sync, load, engine, or lag=N")
    parser.add_argument("--shape", choices=list(SHAPES), default="1.5b")
    parser.add_argument("--engine", choices=["vllm", "native"], default="vllm")
    parser.add_argument("--vllm", type=Path, help="where install.sh unpacked vLLM")
    parser.add_argument(
        "--folder", type=Path, required=True, help="for checkpoint and runs: some GB"
    )
    parser.add_argument("--mean", type=positive, default=400, help="tokens of a response")
    parser.add_argument("--longest", type=positive, help="default: ten times the mean")
    parser.add_argument("--prompts", type=positive, default=32)
    parser.add_argument("--samples", type=positive, default=8)
    parser.add_argument("--warm", type=positive, default=3, help="steps that are not measured")
    parser.add_argument("--steps", type=positive, default=8)
    parser.add_argument(
        "--sync-steps", type=positive, default=3, help="measured steps of sync and engine"
    )
    parser.add_argument("--running", type=positive, default=512, help="rollout.max_num_seqs")
    parser.add_argument("--set", nargs="*", default=[], help="more keys of the recipe")
    add_options(parser, "async_rl")
    given = parser.parse_args()
    given.longest = given.longest or 10 * given.mean
    session = Session.start(given)
    given.folder.mkdir(parents=True, exist_ok=True)
    make_inputs(session)
    modes = (
        [mode for mode in given.modes if mode == "sync"],
        [mode for mode in given.modes if mode != "sync"],
    )
    rates = {mode: train(mode, session, []) for mode in modes[0]}
    if modes[1]:
        with server(session) as client:
            rising, speeds = 0.0, dict[int, float]()
            load(client, max(CONCURRENT), given)  # compiles kernels
            for n in CONCURRENT:
                speeds[n] = rising = max(rising, load(client, n, given))
            session.keep({"mode": "load", "tokens_per_second": speeds})
            session.say(
                f"load: {', '.join(f'{n}: {speed:.0f}' for n, speed in speeds.items())} tokens/s"
            )
            for mode in modes[1]:
                if mode == "load":
                    continue
                keys = [f"rollout.backend={given.engine}", f"rollout.engines={client.url}"]
                rates[mode] = train(mode, session, keys)
                simulate(mode, session, list(speeds.items()))
    slow = max(
        (rate for mode, rate in rates.items() if not mode.startswith("lag")), default=float("nan")
    )
    for mode, rate in rates.items():
        session.say(f"{mode}: {rate:.0f} tokens/s, {rate / slow:.2f} x the fastest synchronous")
    session.finish()
    return 0


def make_inputs(session: Session) -> None:
    """Random weights, a tokenizer of one word an id, and rows of random words."""
    given, model = session.given, session.given.folder / "model"
    model.mkdir(exist_ok=True)
    # Not as Qwen2, whose tokenizer transformers takes to be Qwen2's.
    shape: dict[str, Any] = {
        **SHAPES[given.shape],
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }
    spec = spec_from_config(shape)
    size, dtype = (
        shape["vocab_size"],
        torch.bfloat16 if session.device.type == "cuda" else torch.float32,
    )
    engine = random_engine(spec, Layout(), session.device)
    tied = {"lm_head.weight"} if spec.tie_embeddings else set()
    weights = {n: t.to("cpu").contiguous() for n, t in engine.weights(dtype) if n not in tied}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    del engine, weights
    stops = list(range(0, size, max(1, size * given.mean // size)))[
        : max(1, round(size / given.mean))
    ]
    config = {**shape, "max_position_embeddings": 32768, "eos_token_id": stops}
    config |= {"dtype": str(dtype).removeprefix("torch."), "bos_token_id": None}
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    vocabulary = {f"t{i}": i for i in range(size)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(model)
    draw = random.Random(0)
    rows = [
        {"prompt": " ".join(f"t{draw.randrange(size)}" for _ in range(PROMPT))} for _ in range(ROWS)
    ]
    (given.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (given.folder / "reward.py").write_text(REWARD)


def train(mode: str, session: Session, engines: Sequence[str]) -> float:
    """Tokens a second of the measured steps, prompts included."""
    given, lag = session.given, int(mode.removeprefix("lag=")) if mode.startswith("lag=") else None
    session.begin(mode)
    steps = given.warm + (given.sync_steps if lag is None else given.steps)
    run = given.folder / f"run-{mode}"
    recipe = {
        "model": {"path": str(given.folder / "model"), "dtype": "bfloat16" if session.device.type == "cuda" else "float32"},
        "algorithm": {"name": "grpo"},
        "data": {"train": str(given.folder / "rows.jsonl")},
        "rollout": {"samples_per_prompt": given.samples, "max_new_tokens": given.longest, "max_num_seqs": given.running},
        "reward": {"function": "reward:reward"},
        "optim": {"lr": 1e-6},
        "trainer": {
            "steps": steps, "prompts_per_step": given.prompts, "tokens_per_batch": max(16384, given.longest + PROMPT),
            "deterministic": False, **({} if lag is None else {"max_lag": lag}),
        },
        "run_dir": str(run),
    }  # fmt: skip
    (given.folder / "recipe.yaml").write_text(json.dumps(recipe))
    command = [
        sys.executable,
        "-m",
        "dovetail",
        "train",
        str(given.folder / "recipe.yaml"),
        "--device",
        session.device.type,
    ]
    command += ["--layout", "dp=2" if mode == "sync" else "dp=1", *engines, *given.set]
    with open(given.out / f"async-{mode}.txt", "w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    if code:
        raise RuntimeError(f"{mode} ended with {code}: {Path(log.name).read_text()[-1000:]}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "tokens" in row]
    measured = rows[given.warm :]
    seconds = measured[-1]["timestamp"] - rows[given.warm - 1]["timestamp"]
    tokens = sum(row["tokens"] for row in measured)
    names = sorted(
        {
            name
            for row in measured
            for name in row
            if name.startswith(("seconds/", "lag", "response_length"))
        }
    )
    found: Mapping[str, float] = {
        name: mean(row.get(name, 0.0) for row in measured) for name in names
    }
    idle = (
        sum(row.get("seconds/rollout", 0.0) + row.get("seconds/wait", 0.0) for row in measured)
        / seconds
    )
    session.keep({"mode": mode, "tokens_per_second": tokens / seconds, "idle": idle, "steps": len(measured), "mean": found,
                  "rows": rows})  # fmt: skip
    session.say(
        f"{mode}: {tokens / seconds:.0f} tokens/s over {len(measured)} steps of {seconds / len(measured):.1f} s and "
        f"{tokens / len(measured):.0f} tokens, trainer idle {100 * idle:.0f} %; "
        + ", ".join(f"{name} {value:.2f}" for name, value in found.items())
    )
    return float(tokens / seconds)


class Recorded(Simulation):
    """With the lengths that the groups of a run had; those of later groups are drawn from them."""

    def group_lengths(self, group: int) -> list[int]:
        return (
            list(self.lengths[group]) if group < len(self.lengths) else super().group_lengths(group)
        )


def simulate(mode: str, session: Session, decode: Sequence[tuple[int, float]]) -> None:
    """What the simulator says of the run of `mode`, given its lengths, its trainer's speed and the engine's."""
    given, row = session.given, session.rows[-1]
    steps, found = row["steps"], row["mean"]
    files = sorted((given.folder / f"run-{mode}" / "rollouts").glob("*.jsonl"))
    drawn = [
        len(json.loads(line)["token_ids"])
        for file in files
        for line in file.read_text().splitlines()
    ]
    lengths = [
        drawn[i : i + given.samples] for i in range(0, len(drawn), given.samples)
    ]  # by group
    trained = mean(each["tokens"] for each in row["rows"][given.warm :]) / (
        found["seconds/score"] + found["seconds/update"]
    )
    setup = Setup(
        engines=1,
        max_running=given.running,
        decode=decode,
        train_tokens_per_second=trained,
        step_ms=1000 * found["seconds/reward"],
        push_ms=1000 * found["seconds/push"],
        groups_per_step=given.prompts,
        samples=given.samples,
        prompt_tokens=PROMPT,
        max_lag=int(mode.removeprefix("lag=")) if mode.startswith("lag=") else 0,
        steps=given.warm + steps,
        warmup=given.warm,
    )
    outcome = Recorded(setup, lengths).run()
    # As the simulator counts: from where training on the first measured batch begins to that of the last.
    measured, parts = (
        row["rows"][given.warm :],
        ("seconds/reward", "seconds/score", "seconds/update"),
    )
    first, last = (
        each["timestamp"] - sum(each[part] for part in parts)
        for each in (measured[0], measured[-1])
    )
    responses = (
        sum(each["response_length_mean"] for each in measured[:-1]) * given.prompts * given.samples
    )
    real = responses / (last - first)
    session.keep({"mode": f"simulated {mode}", "tokens_per_second": outcome.tokens_per_second, "real": real,
                  "idle": outcome.trainer_idle, "ratio": outcome.tokens_per_second / real})  # fmt: skip
    session.say(f"{mode}: simulated {outcome.tokens_per_second:.0f} response tokens/s, real {real:.0f}: "
                f"{outcome.tokens_per_second / real:.2f} x; idle {100 * outcome.trainer_idle:.0f} %")  # fmt: skip


def load(client: Client, requests: int, given: argparse.Namespace) -> float:
    """Tokens a second of that many requests at once; where one ends, another joins. Lengths are as in the runs."""
    begun = time.monotonic()
    first, last, tokens = begun + SETTLE, begun + SETTLE + MEASURE, [0] * requests

    def run(index: int) -> None:
        draw = random.Random(index)
        while time.monotonic() < last:
            new = min(given.longest, 1 + int(draw.expovariate(1 / given.mean)))
            sampling = {
                "max_tokens": new,
                "ignore_eos": True,
                "temperature": 1.0,
                "detokenize": False,
                "logprobs": 0,
            }
            body: dict[str, Any] = {
                "token_ids": [draw.randrange(1000) for _ in range(PROMPT)],
                "model": "policy",
            }
            body |= {"sampling_params": {**sampling, "stream_interval": STREAMED}, "stream": True}
            for event in client.stream(GENERATE, body, lambda: time.monotonic() + SILENCE):
                if time.monotonic() > last:
                    return
                if time.monotonic() > first:
                    tokens[index] += len(event["choices"][0]["token_ids"])

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True) for index in range(requests)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(tokens) / MEASURE


@contextlib.contextmanager
def server(session: Session) -> Iterator[Client]:
    """vLLM with our plugin, or the embedded sampler, on the second GPU, or, of one, on a part of its memory."""
    given, folder = session.given, session.given.folder
    gpu = "1" if torch.cuda.device_count() > 1 else "0"
    port, settings = (
        8300 + os.getpid() % 500,
        {"CUDA_VISIBLE_DEVICES": gpu, "NCCL_NVLS_ENABLE": "0"},
    )
    if given.engine == "native":
        dtype = "bfloat16" if session.device.type == "cuda" else "float32"
        words = [
            sys.executable,
            "-m",
            "dovetail",
            "serve",
            folder / "model",
            "--port",
            port,
            "--dtype",
            dtype,
        ]
        words += [
            "--device",
            session.device.type,
            "--gpu-memory-utilization",
            0.8 if gpu == "1" else 0.3,
        ]
        line = "exec " + " ".join(shlex.quote(str(word)) for word in words)
    else:
        line = vllm_line(session, port)
    client = Client(f"http://127.0.0.1:{port}", timeout=300.0)
    with started(line, given.out / "async.server.log", settings, client):
        yield client


def vllm_line(session: Session, port: int) -> str:
    given, folder = session.given, session.given.folder
    info = folder / "site" / "dovetail_vllm-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dovetail-vllm\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ndovetail = dovetail_vllm:register\n"
    )
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        folder / "model",
        "--port",
        port,
    ]
    words += [
        "--served-model-name",
        "policy",
        "--skip-tokenizer-init",
        "--dtype",
        "bfloat16",
        "--enable-scale-out",
    ]
    words += [
        "--max-model-len",
        PROMPT + given.longest + 8,
        "--max-num-seqs",
        512,
        "--gpu-memory-utilization",
        0.8,
    ]
    words += [
        "--weight-transfer-config",
        json.dumps({"backend": "dovetail_nccl"}),
        "--host",
        "127.0.0.1",
    ]
    paths = ":".join(
        str(path.resolve())
        for path in (folder / "site", PLUGIN, *([given.vllm] if given.vllm else []))
    )
    source = f". {shlex.quote(str(given.vllm.resolve() / 'env.sh'))}; " if given.vllm else ""
    settings = f"export PYTHONPATH={paths}:$PYTHONPATH VLLM_SERVER_DEV_MODE=1 HF_HUB_OFFLINE=1"
    return f"{source}{settings}; exec {' '.join(shlex.quote(str(word)) for word in words)}"


if __name__ == "__main__":
    run_main(main)
