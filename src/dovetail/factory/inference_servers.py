"""Inference servers of a run. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, listing
from dovetail.inference_servers.fleet import Replica, ServerClient
from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.protocol import (
    KEEPS_PIXELS,
    RETURNS_ROUTES,
    SLEEP_MODE,
    check_log_probs,
    fitting_log_probs,
)
from dovetail.inference_servers.sglang import Sglang
from dovetail.inference_servers.vllm import DEV_MODE, SLEEP, STARTS, Native, Vllm
from dovetail.launch.inference_servers import KEY, ServerStart
from dovetail.launch.process import python_module
from dovetail.sampler.params import SamplingParams
from dovetail.weights.config_file import CONFIG, pinned, read_config

if TYPE_CHECKING:
    from dovetail.recipe.rollout import PushSection, RolloutSection
    from dovetail.recipe.schema import Recipe

SERVER_CLIENTS: Mapping[str, ServerClient] = {
    "vllm": Vllm(),
    "sglang": Sglang(),
    "native": Native(),
}
TRANSFERS: Mapping[str | None, Mapping[str, str]] = {  # by vLLM's back end
    **{
        f"dovetail_{transport}": {"transport": transport, "proof": "plugin"}
        for transport in ("nccl", "ipc", "file")
    },
    "nccl": {"transport": "nccl", "proof": "checker"},
}
STARTED_BY: Mapping[str, str] = {  # by rollout.backend
    "vllm": "`vllm serve MODEL`, or `dovetail serve MODEL` with rollout.backend=native",
    "sglang": "`python -m sglang.launch_server --model-path MODEL`",
    "native": "`dovetail serve MODEL`",
}
PROBE_SECONDS = 60.0  # of a request before the run
HINTS: Mapping[int | None, str] = {  # by status
    401: f"; set the environment variable {KEY} to its key",
    404: "; start vLLM, SGLang or `dovetail serve` there, and give its URL without a path: http://HOST:PORT",
}


def connect(
    recipe: "Recipe",
    urls: Sequence[str],
    key: str | None,
    vocab_size: int | None,
    *,
    asleep: bool = False,
) -> list[Replica]:
    """Probes all servers, which then sleep, if they are to. One ConfigError names all problems."""
    rollout = recipe.rollout
    replicas = list[Replica]()
    problems = list[str]()
    wire = SERVER_CLIENTS[rollout.backend]
    longest = rollout.max_new_tokens
    for url in dict.fromkeys(urls):
        try:
            client = Client(url, key=key, timeout=PROBE_SECONDS)
            server = wire.probe(client, vocab_size)
            check_log_probs(url, server, wire.starts, asked(recipe))
            if rollout.router_replay == "rollout" and not server.routes:
                why = "returns no routes of experts, which rollout.router_replay=rollout replays"
                raise ConfigError(f"engine {url} {why}; start it with {RETURNS_ROUTES}")
            if rollout.sleep and not server.sleeps:
                raise ConfigError(
                    f"engine {url} cannot sleep, which rollout.sleep asks for; start it with "
                    f"{SLEEP_MODE}"
                )
            if server.max_length is not None and longest >= server.max_length:
                raise ConfigError(
                    _too_short(url, server.max_length, longest, "rollout.max_new_tokens is")
                )
            if asleep:
                client.post(SLEEP)
        except ServerError as error:
            problems.append(f"{error}{_hint(rollout, error)}")
        except ConfigError as error:
            problems.append(str(error))
        else:
            replicas.append(Replica(client, server))
            replicas[-1].asleep = asleep
    if problems:
        many = f"{len(problems)} of the engines:\n{listing(problems)}"
        raise ConfigError(problems[0] if len(problems) == 1 else many)
    return replicas


def _hint(rollout: "RolloutSection", error: ServerError) -> str:
    """Returns what to do where a server does not answer, or answers with an error."""
    if error.status is not None or not rollout.engines:
        return HINTS.get(error.status, "")
    start = f"start a server there: {STARTED_BY[rollout.backend]} (dovetail docs rollouts)"
    return f"; {start}, or correct rollout.engines"


def check_lengths(replicas: Sequence[Replica], longest: int) -> None:
    """longest: prompt with completion."""
    for replica in replicas:
        most = replica.server.max_length
        what = "the longest prompt with rollout.max_new_tokens has"
        if most is not None and longest > most:
            raise ConfigError(_too_short(replica.client.url, most, longest, what))


def asked(recipe: "Recipe") -> list[SamplingParams]:
    """What concerns log-probs, of training and evaluation."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    rollout = {name: value for name, value in recipe.rollout if name in names}
    return [
        SamplingParams(**rollout),
        *(SamplingParams(temperature=each.temperature) for each in recipe.eval.sets),
    ]


def push_settings(rollout: "RolloutSection", replicas: Sequence[Replica]) -> "PushSection":
    """rollout.push; transport and proof default to what the servers were started for."""
    chosen = bool(rollout.push.model_fields_set & {"transport", "proof"})
    push = rollout.push
    if rollout.backend != "vllm":
        by_file = rollout.backend == "sglang" and not chosen
        return push.model_copy(update={"transport": "file"}) if by_file else push
    takes = {replica.server.transfer: replica.client.url for replica in replicas}
    if not chosen and len(takes) == 1 and (settings := TRANSFERS.get(next(iter(takes)))):
        push = push.model_copy(update=settings)
    wanted = transfer_backend(push)
    for backend, url in takes.items():
        if backend != wanted:
            keys = f"transport={push.transport} and proof={push.proof}, which is {wanted!r}"
            flag = f"--weight-transfer-config '{json.dumps({'backend': wanted})}'"
            back_end = f"by its back end {backend!r}, but rollout.push has {keys}"
            raise ConfigError(
                f"engine {url} takes weights {back_end}; start it with {flag}, or leave both "
                "keys out"
            )
    return push


def transfer_backend(push: "PushSection") -> str:
    return f"dovetail_{push.transport}" if push.proof == "plugin" else push.transport


def server_start(recipe: "Recipe", *, ranks_on_gpus: bool) -> ServerStart | None:
    start = recipe.rollout.start
    rollout = recipe.rollout
    if start is None:
        return None
    sglang = rollout.backend == "sglang"
    native = rollout.backend == "native"
    named = pinned(recipe.model.path)
    model, revision = (
        (recipe.model.path, []) if named is None else (named[0], ["--revision", named[1]])
    )
    program = start.command or (
        ("python", "-m", "sglang.launch_server") if sglang else ("vllm", "serve")
    )
    given = (
        ["--model-path", model, "--incremental-streaming-output"]
        if sglang
        else [model, *_vllm_flags(recipe)]
    )
    if native:
        program = start.command or (*python_module("dovetail"), "serve")
        revision = []
        given = [
            recipe.model.path,
            "--dtype",
            recipe.model.dtype,
            *([] if start.gpus_each else ["--device", "cpu"]),
        ]
        given += ["--push-dir", str(Path(rollout.push.directory).absolute())]
    cut = []
    if start.gpus_each > 1:
        flag = "--tp-size" if sglang else "--tensor-parallel-size"
        cut = [flag, str(start.gpus_each)]
    routes = [RETURNS_ROUTES] if rollout.router_replay == "rollout" else []
    name, _, value = DEV_MODE.rpartition(" ")[2].partition("=")
    words = [
        *program,
        *given,
        *revision,
        "--host",
        "127.0.0.1",
        "--port",
        "PORT",
        *cut,
        *routes,
        *start.args,
    ]
    return ServerStart(
        commands=[words] * start.count, gpus_each=start.gpus_each, timeout=start.timeout,
        ranks_on_gpus=ranks_on_gpus and not rollout.sleep,  # else they share
        logs=Path(recipe.run_dir) / "logs", environment={} if sglang or native else {name: value},
    )  # fmt: skip


def _vllm_flags(recipe: "Recipe") -> list[str]:
    fits = [
        kind for kind in STARTS if all(kind in fitting_log_probs(each) for each in asked(recipe))
    ]
    mode = STARTS[fits[-1]].split() if fits else []
    transfer = json.dumps({"backend": transfer_backend(recipe.rollout.push)})
    path = Path(recipe.model.path)
    sees = (path / CONFIG).is_file() and "vision_config" in read_config(path)
    return ["--enable-scale-out", "--weight-transfer-config", transfer, *mode, *([KEEPS_PIXELS] if sees else []),
            *([SLEEP_MODE] if recipe.rollout.sleep else [])]  # fmt: skip


def _too_short(url: str, most: int, longest: int, what: str) -> str:
    edit = "start it with a larger --max-model-len, or lower rollout.max_new_tokens"
    return f"engine {url} takes {most:,} tokens of prompt and completion together, but {what} {longest:,}; {edit}"
