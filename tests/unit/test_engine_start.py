"""Inference servers as children of the supervisor, and what a recipe may say of them."""

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import ConfigError, MachineError
from dovetail.factory.inference_servers import push_settings, server_start
from dovetail.inference_servers.fleet import Replica
from dovetail.inference_servers.http import Client
from dovetail.inference_servers.protocol import ServerInfo
from dovetail.launch.inference_servers import URLS, ServerStart, running
from dovetail.recipe.schema import Recipe, make_recipe

SERVER = """
import http.server, os, sys
if "wrong" in sys.argv:
    sys.exit("unknown flag, and a key " + os.environ["SOME_API_KEY"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print("GPUs", os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["MARK"], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

JOB = """
import sys
from pathlib import Path
from dovetail.launch import supervisor
from dovetail.launch.inference_servers import ServerStart
supervisor.PAUSE_SECONDS = 0.05
start = ServerStart(
    commands=[[sys.executable, "server.py", "PORT"]], gpus_each=0, ranks_on_gpus=False, logs=Path("logs"), timeout=20.0,
    environment={"MARK": "m"},
)
sys.exit(supervisor.run_ranks([sys.executable, "rank.py"], 1, supervisor.Supervision(restarts=1, servers=start)))
"""
RANK = """
import os, signal, time
from pathlib import Path
with open("urls", "a") as urls:
    urls.write(os.environ["DOVETAIL_ENGINES"] + "\\n")
if Path("urls").read_text().count("\\n") == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while Path("stay").exists():
    time.sleep(0.02)
"""


def start_of(
    folder: Path, *words: str, count: int = 1, gpus_each: int = 0, timeout: float = 20.0
) -> ServerStart:
    (folder / "server.py").write_text(SERVER)
    return ServerStart(
        commands=[[sys.executable, str(folder / "server.py"), *words]] * count,
        gpus_each=gpus_each,
        ranks_on_gpus=True,
        logs=folder / "logs",
        timeout=timeout,
        environment={"MARK": "m", "SOME_API_KEY": "sk-quite-secret"},
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_engines_answer_before_the_ranks_start_and_end_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    with running(start_of(tmp_path, "PORT", count=3), 1, free_port, lambda: False) as engines:
        urls = engines.start_ended()[URLS].split(",")
        assert len(set(urls)) == 3 and all(Client(url).get("/health") == {} for url in urls)
    assert not any(map(is_open, urls))
    with running(
        start_of(tmp_path, "PORT", count=1, gpus_each=2), 2, free_port, lambda: False
    ) as engines:
        engines.start_ended()
        assert (tmp_path / "logs" / "engine-0.log").read_text().startswith("GPUs 6,7 m\n")
    with pytest.raises(
        ConfigError, match="2 engines of 2 GPUs and 1 ranks need 5 GPUs, there are 4"
    ):
        with running(
            start_of(tmp_path, "PORT", count=2, gpus_each=2), 1, free_port, lambda: False
        ) as engines:
            engines.start_ended()


def test_an_engine_that_does_not_start_is_reported_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-quite-secret")
    with pytest.raises(
        ConfigError, match=r"engine 0 ended with code 1; its log:\n  unknown flag, and a key \*\*\*"
    ):
        with running(start_of(tmp_path, "wrong"), 1, free_port, lambda: False) as engines:
            engines.start_ended()
    busy, begun = free_port(), time.monotonic()
    with pytest.raises(ConfigError, match=r"did not answer within rollout.start.timeout=0.3 s"):
        with running(
            start_of(tmp_path, str(busy), timeout=0.3), 1, free_port, lambda: False
        ) as engines:
            engines.start_ended()
    missing = ServerStart(
        commands=[["no-such-vllm"]],
        gpus_each=0,
        ranks_on_gpus=False,
        logs=tmp_path / "logs",
        timeout=1.0,
    )
    with pytest.raises(
        ConfigError, match=r"no-such-vllm is no program here; name .* rollout.start.command"
    ):
        with running(missing, 1, free_port, lambda: False) as engines:
            engines.start_ended()
    stops = itertools.chain([False], itertools.repeat(True))
    with running(start_of(tmp_path, str(busy)), 1, free_port, lambda: next(stops)) as engines:
        engines.start_ended()
        assert time.monotonic() - begun < 20
    assert "DOVETAIL_ENGINES" not in os.environ


@pytest.mark.parametrize("killed", [False, True])
def test_engines_outlive_a_restart_of_the_ranks_but_not_the_supervisor(
    tmp_path: Path, killed: bool
) -> None:
    for name, text in {"server": SERVER, "job": JOB, "rank": RANK}.items():
        (tmp_path / f"{name}.py").write_text(text)
    if killed:
        (tmp_path / "stay").touch()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    process = subprocess.Popen(
        [sys.executable, "job.py"], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL
    )
    urls = tmp_path / "urls"
    until = time.monotonic() + 60
    while (
        killed
        and time.monotonic() < until
        and not (urls.exists() and urls.read_text().count("\n") == 2)
    ):
        time.sleep(0.02)
    if killed:
        process.kill()
        (tmp_path / "stay").unlink()
    assert process.wait(60) == (-9 if killed else 0)
    first, second = urls.read_text().split()
    assert first == second
    while is_open(first) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_open(first)


def test_an_engine_that_is_killed_at_its_start_is_a_failure_of_the_machine(tmp_path: Path) -> None:
    start = replace(start_of(tmp_path), commands=[["sh", "-c", "echo begun; kill -9 $$"]])
    with pytest.raises(MachineError, match="engine 0 was killed by SIGKILL; its log:\n  begun"):
        with running(start, 1, free_port, lambda: False) as engines:
            engines.start_ended()


def test_an_engine_that_was_killed_starts_again_and_the_others_go_on(tmp_path: Path) -> None:
    with running(start_of(tmp_path, "PORT", count=2), 1, free_port, lambda: False) as engines:
        urls = engines.start_ended()[URLS].split(",")
        kept, killed = engines.processes.values()
        killed.kill()
        killed.wait()
        again = engines.start_ended()[URLS].split(",")
        assert again[0] == urls[0] and engines.processes[0] is kept
        assert all(map(is_open, again))
    assert not any(map(is_open, again))


KILLED_ONCE = """
import os, sys
if not os.path.exists("second"):
    open("second", "w").close()
    os.kill(os.getpid(), 9)
os.execv(sys.executable, [sys.executable, "server.py", sys.argv[1]])
"""


def test_restarts_count_for_engines_that_are_killed_at_their_start(tmp_path: Path) -> None:
    job = JOB.replace('"server.py", "PORT"', '"killed_once.py", "PORT"')
    texts = {"server": SERVER, "job": job, "rank": "print('trained')", "killed_once": KILLED_ONCE}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    ended = subprocess.run(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended
    assert "engine 0 was killed by SIGKILL" in ended.stderr
    assert "starting all ranks again" in ended.stderr


def is_open(url: str) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


def recipe(rollout: Mapping[str, Any], **more: Any) -> Recipe:
    return make_recipe(
        {
            "model": {"path": "."},
            "data": {"train": "t"},
            "run_dir": "run",
            "rollout": rollout,
            **more,
        }
    )


def test_the_command_of_an_engine(tmp_path: Path) -> None:
    rollout = {
        "start": {"count": 2, "gpus_each": 4, "args": ["--max-model-len", "4096"]},
        "temperature": 0.7,
    }
    start = server_start(recipe(rollout), ranks_on_gpus=True)
    assert start is not None and len(start.commands) == 2 and start.logs == Path("run/logs")
    assert start.commands[0] == [
        "vllm", "serve", ".", "--enable-scale-out", "--weight-transfer-config", '{"backend": "dovetail_nccl"}',
        "--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1", "--port", "PORT", "--tensor-parallel-size", "4",
        "--max-model-len", "4096",
    ]  # fmt: skip
    assert start.environment == {"VLLM_SERVER_DEV_MODE": "1"}
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    start = server_start(recipe(rollout, model={"path": str(tmp_path)}), ranks_on_gpus=True)
    assert start is not None and "--no-mm-device-do-normalize" in start.commands[0]
    rollout = {
        "start": {"command": ["env/bin/vllm", "serve"]},
        "top_p": 0.9,
        "push": {"transport": "file"},
    }
    start = server_start(
        recipe(rollout, algorithm={"correction": {"ratio": "none"}}), ranks_on_gpus=True
    )
    assert (
        start is not None
        and start.commands[0][:2] == ["env/bin/vllm", "serve"]
        and "raw_logprobs" in start.commands[0]
    )
    assert json.dumps({"backend": "dovetail_file"}) in start.commands[0]
    start = server_start(recipe({"start": {"gpus_each": 1}, "sleep": True}), ranks_on_gpus=True)
    assert (
        start is not None and "--enable-sleep-mode" in start.commands[0] and not start.ranks_on_gpus
    )
    rollout = {"start": {"args": ["--last"]}, "router_replay": "rollout"}
    for backend in ("vllm", "sglang"):
        start = server_start(recipe({"backend": backend, **rollout}), ranks_on_gpus=True)
        assert start is not None and start.commands[0][-2:] == [
            "--enable-return-routed-experts",
            "--last",
        ]
    start = server_start(recipe({"backend": "sglang", "start": {}}), ranks_on_gpus=True)
    assert start is not None and start.commands[0][:5] == [
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        ".",
    ]
    for gpus, flags in ((0, ["--device", "cpu"]), (1, [])):
        start = server_start(
            recipe({"backend": "native", "start": {"gpus_each": gpus}}), ranks_on_gpus=True
        )
        assert (
            start is not None and not start.environment and start.commands[0][0] == sys.executable
        )
        assert start.commands[0][start.commands[0].index("-m") :] == [
            "-m", "dovetail", "serve", ".", "--dtype", "float32", *flags,
            "--push-dir", "/dev/shm/dovetail", "--host", "127.0.0.1", "--port", "PORT",
        ]  # fmt: skip
    assert server_start(recipe({}), ranks_on_gpus=True) is None


def test_weights_go_as_the_engine_was_started_for() -> None:
    def settings(transfer: str, push: Mapping[str, Any], backend: str = "vllm") -> tuple[str, str]:
        server = ServerInfo(
            kind="vllm", model="m", version="1", max_length=None, log_probs="raw", transfer=transfer
        )
        chosen = recipe({"engines": "http://h:1", "backend": backend, "push": push}).rollout
        found = push_settings(chosen, [Replica(Client("http://h:1"), server)])
        return found.transport, found.proof

    assert settings("dovetail_nccl", {}) == ("nccl", "plugin")
    assert (
        settings("dovetail_file", {})
        == ("file", "plugin")
        == settings("dovetail_file", {"transport": "file"})
    )
    assert settings("nccl", {"timeout": 3.0}) == ("nccl", "checker")
    assert settings("", {}, "sglang") == ("file", "plugin")
    assert (
        settings("any", {}, "native") == ("nccl", "plugin")
        and settings("", {"transport": "ipc"}, "native")[0] == "ipc"
    )
    with pytest.raises(
        ConfigError,
        match=r"by its back end 'nccl', but rollout.push has transport=nccl and proof=plugin",
    ):
        settings("nccl", {"proof": "plugin"})


def test_what_a_recipe_may_say_of_engines() -> None:
    assert (
        recipe({"engines": "http://h:1"}).rollout.backend
        == "vllm"
        == recipe({"start": {}}).rollout.backend
    )
    wrong: Mapping[str, Mapping[str, Any]] = {
        "runs inside the trainer; with engines or start set another": {
            "backend": "transformers",
            "start": {},
        },
        "is native: give engines .*, or start .*, one of the two": {
            "backend": "native",
            "engines": ["h:1"],
            "start": {},
        },
        "runs on one GPU; raise start.count": {"backend": "native", "start": {"gpus_each": 2}},
        "push.proof=checker is of vLLM": {
            "backend": "native",
            "start": {},
            "push": {"proof": "checker"},
        },
        "from engines; set vllm or sglang, native without engines": {
            "backend": "native",
            "start": {},
            "router_replay": "rollout",
        },
        "give engines .*, or start": {"backend": "vllm"},
        "or start .*, one of the two": {
            "backend": "sglang",
            "engines": ["http://h:1"],
            "start": {},
        },
        "layout is of the sampler inside the trainer": {
            "engines": ["http://h:1"],
            "layout": {"tp": 2},
        },
        "repetition_penalty: the sampler native has none": {"repetition_penalty": 1.1},
        "stop: the sampler transformers has none": {"backend": "transformers", "stop": "END"},
        "ignore_eos samples max_new_tokens": {
            "engines": ["http://h:1"],
            "stop": "END",
            "ignore_eos": True,
        },
        "sleep is of vLLM's servers": {
            "backend": "sglang",
            "engines": ["http://h:1"],
            "sleep": True,
        },
        "backend=transformers returns no routes": {
            "backend": "transformers",
            "router_replay": "rollout",
        },
    }
    for message, rollout in wrong.items():
        with pytest.raises(ConfigError, match=message):
            recipe(rollout)
