"""vLLM's server, as of 0.33.0, and `dovetail serve`, which speaks its wire."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.errors import ConfigError, MachineError
from dovetail.inference_servers.http import Client, Deadline, ServerError
from dovetail.inference_servers.protocol import (
    STREAMED,
    LogProbs,
    ServerInfo,
    ServerRequest,
    pushed_spans,
    turn_part,
)
from dovetail.sampler.params import SamplingParams
from dovetail.sampler.turn import Turn

GENERATE = "/inference/v1/generate"
PUSH_PATHS = (
    "/pause", "/resume", "/is_paused", "/get_world_size", "/init_weight_transfer_engine", "/start_weight_update",
    "/update_weights", "/finish_weight_update", "/server_info",
)  # fmt: skip
MODES: Mapping[str, LogProbs] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
STARTS: Mapping[LogProbs, str] = {kind: f"--logprobs-mode {mode}" for mode, kind in MODES.items()}
SLEEP = "/sleep?level=1"
WAKE = "/wake_up"
DEV_MODE = "the environment variable VLLM_SERVER_DEV_MODE=1"
TITLE = "dovetail serve"  # in its OpenAPI description
TRANSFER = '--weight-transfer-config \'{"backend": "dovetail_nccl"}\' and the plugin dovetail-vllm'


class Vllm:
    starts: ClassVar[Mapping[LogProbs, str]] = STARTS

    def probe(self, client: Client, vocab_size: int | None) -> ServerInfo:
        """Returns what the server can do. ConfigError if it lacks what a run needs."""
        described = client.get("/openapi.json")
        paths = described.get("paths", {})
        if GENERATE not in paths:
            other = (
                "; it looks like SGLang, which rollout.backend=sglang is for"
                if "/generate" in paths
                else ""
            )
            raise ConfigError(
                f"engine {client.url} has no {GENERATE}, which vLLM 0.26 and newer have{other}"
            )
        version = str(client.get("/version").get("version", "unknown"))
        if missing := [path for path in PUSH_PATHS if path not in paths]:
            raise ConfigError(
                f"engine {client.url} (vLLM {version}) has no {', '.join(missing)}, so that no "
                f"weights can be pushed to it; start it with {DEV_MODE}"
            )
        card = (client.get("/v1/models").get("data") or [{}])[0]
        if "id" not in card:
            raise ConfigError(f"engine {client.url} serves no model")
        config = client.get("/server_info?config_format=json")["vllm_config"]
        mode = config["model_config"]["logprobs_mode"]
        transfer = config.get("weight_transfer_config")
        if mode not in MODES:
            raise ConfigError(
                f"engine {client.url} gives {mode}; start it with {STARTS['processed']}"
            )
        if not transfer:
            raise ConfigError(f"engine {client.url} takes no weights; start it with {TRANSFER}")
        schemas = described["components"]["schemas"]
        server = ServerInfo(
            kind="vllm",
            model=card["id"],
            version=version,
            max_length=card.get("max_model_len"),
            log_probs=MODES[mode],
            transfer=transfer["backend"],
            fields=frozenset(
                schemas["GenerateRequest"]["properties"]["sampling_params"]["properties"]
            ),
            images="kwargs_data" in schemas.get("MultiModalFeatures", {}).get("properties", {}),
            normalizes=bool(
                (config["model_config"].get("multimodal_config") or {}).get(
                    "mm_device_do_normalize"
                )
            ),
            sleeps=bool(config["model_config"].get("enable_sleep_mode")),
            routes=bool(
                (config.get("aux_output_config") or {}).get("enable_return_routed_experts")
            ),
        )
        if server.sleeps and client.get("/is_sleeping").get(
            "is_sleeping"
        ):  # as its last trainer left it
            client.post(WAKE)
        if not client.get("/is_paused").get("is_paused"):  # else its last trainer ended in a push
            _check_generation(client, server, vocab_size)
        return server

    def generate(
        self,
        client: Client,
        server: ServerInfo,
        request: ServerRequest,
        received: Sequence[int],
        deadline: Deadline,
    ) -> Iterator[Turn]:
        """Yields the parts of a turn that continues the prompt and the tokens received."""
        drawn = 0
        body = generate_body(server, request, received)
        for event in client.stream(GENERATE, body, deadline):
            if request.images and not drawn and event.get("prompt_token_ids") != body["token_ids"]:
                raise MachineError(
                    f"engine {client.url} changed the ids of a prompt with images: it is another "
                    "model"
                )
            for choice in event["choices"]:
                ids = choice["token_ids"] or []
                content = (choice["logprobs"] or {}).get("content") or []
                scored = [(each["token_id"], each["logprob"]) for each in content]
                part = turn_part(client, GENERATE, request, ids, scored, choice["finish_reason"])
                drawn += len(ids)
                if part.finish is not None:
                    tokens = len(body["token_ids"]) + drawn
                    part = replace(
                        part,
                        versions=pushed_spans(choice.get("weight_versions"), drawn, client),
                        routing=request.routing(choice.get("routed_experts") or "", tokens),
                    )
                yield part

    def continues(self, params: SamplingParams) -> bool:
        """Whether a part of a turn can be continued: not if a stop string may have begun in it, nor
        with routes, which come with the last token.
        """
        return not params.stop and not params.trace


class Native(Vllm):
    """The protocol of `dovetail serve`: vLLM's, with the noise of the embedded sampler."""

    starts: ClassVar[Mapping[LogProbs, str]] = {"tempered": TITLE}

    def probe(self, client: Client, vocab_size: int | None) -> ServerInfo:
        if client.get("/openapi.json").get("info", {}).get("title") != TITLE:
            raise ConfigError(
                f"engine {client.url} is not started by `{TITLE}`, which rollout.backend=native "
                "is for; set rollout.backend=vllm or sglang"
            )
        return replace(super().probe(client, vocab_size), log_probs="tempered", keyed=True)


def generate_body(
    server: ServerInfo, request: ServerRequest, received: Sequence[int]
) -> dict[str, Any]:
    params = request.params
    sampling = {
        **request.sampling,
        "top_k": params.top_k,
        "seed": request.seed(len(received)),
        "max_tokens": params.max_new_tokens - len(received),
        "min_tokens": 0,
        "logprobs": 0,  # of the sampled token
        "detokenize": bool(params.stop),
        "stream_interval": STREAMED,
    }
    if server.keyed:
        sampling["extra_args"] = request.keys(len(received))
    if "stream_interval" not in server.fields:
        del sampling["stream_interval"]
    body = {
        "model": server.model,
        "token_ids": [*request.prompt_ids, *received],
        "sampling_params": sampling,
        "cache_salt": request.salt,
        "stream": True,
    }
    return (
        body
        if request.images is None
        else {**body, "features": request.images, "return_token_ids": True}
    )


def _check_generation(client: Client, server: ServerInfo, vocab_size: int | None) -> None:
    """Raises ConfigError unless the server takes the last id of the vocabulary, and not the next."""
    for token, known in (
        [(0, True)] if vocab_size is None else [(vocab_size - 1, True), (vocab_size, False)]
    ):
        sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False}
        body = {"model": server.model, "token_ids": [token], "sampling_params": sampling}
        try:
            client.post(GENERATE, body)
        except ServerError as error:
            if error.status == 403:
                raise ConfigError(
                    f"engine {client.url}: {error.message}; start it with --enable-scale-out"
                ) from None
            if error.status != 400 or (known and "vocab" not in error.message):
                raise
            if not known:
                return
            size = f"fewer than {vocab_size:,} token ids"
        else:
            if known:
                continue
            size = f"more than {vocab_size:,} token ids"
        raise ConfigError(
            f"engine {client.url} serves {server.model!r}, a model with {size}, which the policy "
            "has; serve the policy's model"
        )
