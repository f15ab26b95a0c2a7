"""The embedded sampler's own server (`dovetail serve`): vLLM's wire, with the noise of the embedded sampler. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.rollout.remote.http import Client
from dovetail.rollout.remote.vllm import Vllm
from dovetail.rollout.remote.wire import Abilities, LogProbs, Request

TITLE = "dovetail serve"  # in its OpenAPI description


class Native(Vllm):
    @property
    def starts(self) -> Mapping[LogProbs, str]:
        return {"tempered": TITLE}

    def probe(self, client: Client, vocab_size: int | None) -> Abilities:
        if client.get("/openapi.json").get("info", {}).get("title") != TITLE:
            raise ConfigError(
                f"engine {client.url} is not started by `{TITLE}`, which rollout.backend=native is for; set "
                "rollout.backend=vllm or sglang"
            )
        return replace(super().probe(client, vocab_size), log_probs="tempered")

    def body(self, server: Abilities, request: Request, received: Sequence[int]) -> dict[str, Any]:
        body, params = super().body(server, request, received), request.params
        extra: dict[str, Any] = {
            "noise": [params.seed, params.step, request.row, request.sample],
            "drawn": len(received),
        }
        if request.batch is not None and not received:
            extra["batch"] = request.batch
        body["sampling_params"]["extra_args"] = extra
        return body
