"""SGLang's server, by the message classes of 0.5.10.post1; never run against a real one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from dovetail.errors import ConfigError
from dovetail.inference_servers.http import Client, Deadline
from dovetail.inference_servers.protocol import (
    STREAMED,
    LogProbs,
    ServerInfo,
    ServerRequest,
    turn_part,
)
from dovetail.sampler.params import SamplingParams
from dovetail.sampler.turn import Turn

GENERATE = "/generate"
PUSH_PATHS = (
    "/model_info", "/server_info", "/pause_generation", "/continue_generation", "/flush_cache",
    "/update_weights_from_disk",
)  # fmt: skip
STARTS: Mapping[LogProbs, str] = {
    "tempered": "without SGLANG_RETURN_ORIGINAL_LOGPROB",
    "penalized": "the environment variable SGLANG_RETURN_ORIGINAL_LOGPROB=1",
}
MAX_EVENTS = 16  # of a reply, if each repeats all tokens
COLD = 0.5  # a temperature that shows which log-probs come back


class Sglang:
    starts: ClassVar[Mapping[LogProbs, str]] = STARTS

    def probe(self, client: Client, vocab_size: int | None) -> ServerInfo:
        paths = client.get("/openapi.json").get("paths", {})
        if missing := [path for path in (GENERATE, *PUSH_PATHS) if path not in paths]:
            vllm = "; it looks like vLLM, which rollout.backend=vllm is for" * (
                "/inference/v1/generate" in paths
            )
            raise ConfigError(
                f"engine {client.url} has no {', '.join(missing)}, which SGLang 0.5.10 and newer "
                f"have{vllm}"
            )
        info = client.get("/model_info")
        config = client.get("/server_info")
        cards = client.get("/v1/models").get("data") or [{}]
        if not info.get("is_generation", True):
            raise ConfigError(
                f"engine {client.url} serves {info['model_path']!r}, a model that does not generate"
            )
        return ServerInfo(
            kind="sglang",
            model=str(info["model_path"]),
            version=str(config.get("version", "unknown")),
            max_length=cards[0].get("max_model_len"),
            log_probs=_log_probs(client, 0 if vocab_size is None else vocab_size - 1),
            incremental=bool(config.get("incremental_streaming_output")),
            routes=bool(config.get("enable_return_routed_experts")),
        )

    def generate(
        self,
        client: Client,
        server: ServerInfo,
        request: ServerRequest,
        received: Sequence[int],
        deadline: Deadline,
    ) -> Iterator[Turn]:
        body = generate_body(server, request, received)
        drawn = 0
        spans = list[tuple[int, int, int]]()
        for event in client.stream(GENERATE, body, deadline):
            meta = event["meta_info"]
            fresh = int(meta["completion_tokens"]) - drawn
            entries = meta["output_token_logprobs"][-fresh:] if fresh else []
            ids = event["output_ids"][-fresh:] if fresh else []
            scored = [(entry[1], entry[0]) for entry in entries]
            if len(ids) != fresh:
                raise client.error(GENERATE, f"{len(ids)} ids of {fresh} new tokens")
            reason = meta["finish_reason"] or {}
            if "message" in reason:  # of a request that was aborted
                raise client.error(
                    GENERATE, f"the request ended with {reason['type']!r}: {reason['message']}"
                )
            part = turn_part(client, GENERATE, request, ids, scored, reason.get("type"))
            if str(meta.get("weight_version", "")).isdigit() and fresh:
                spans.append((int(meta["weight_version"]), drawn, drawn + fresh))
            drawn += fresh
            if part.finish is not None:
                named = sum(end - start for _, start, end in spans)
                tokens = len(body["input_ids"]) + drawn
                part = replace(
                    part,
                    versions=tuple(spans) if named == drawn else (),
                    routing=request.routing(meta.get("routed_experts") or "", tokens),
                )
            yield part

    def continues(self, params: SamplingParams) -> bool:
        """Whether a part can be continued, as for `Vllm`; a repetition penalty may count only new ids."""
        return not params.stop and not params.trace and params.repetition_penalty == 1


def generate_body(
    server: ServerInfo, request: ServerRequest, received: Sequence[int]
) -> dict[str, Any]:
    params = request.params
    left = params.max_new_tokens - len(received)
    sampling = {
        **request.sampling,
        "top_k": params.top_k or -1,
        "sampling_seed": request.seed(len(received)),
        "no_stop_trim": True,
        "max_new_tokens": left,
        "min_new_tokens": 0,
        "stream_interval": STREAMED
        if server.incremental
        else max(STREAMED, -(-left // MAX_EVENTS)),
    }
    return {
        "input_ids": [*request.prompt_ids, *received],
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_routed_experts": params.trace,
        "extra_key": request.salt,
        "stream": True,
    }


def _log_probs(client: Client, token: int) -> LogProbs:
    """Returns the kind, which the likeliest tokens at two temperatures show."""
    spread = dict[float, float]()
    for temperature in (1.0, COLD):
        sampling = {
            "max_new_tokens": 1,
            "temperature": temperature,
            "top_k": -1,
            "top_p": 1.0,
            "ignore_eos": True,
        }
        body = {
            "input_ids": [token],
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": 8,
        }
        top = client.post(GENERATE, body)["meta_info"]["output_top_logprobs"][0]
        spread[temperature] = top[0][0] - top[-1][0]
    return "tempered" if spread[COLD] > 1.5 * spread[1.0] else "penalized"
