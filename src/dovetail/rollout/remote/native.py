"""`dovetail serve`: vLLM's wire with the noise of the embedded sampler."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from dovetail.errors import ConfigError
from dovetail.rollout.remote.http import Client
from dovetail.rollout.remote.vllm import Vllm
from dovetail.rollout.remote.wire import Abilities, LogProbs

TITLE = "dovetail serve"  # in its OpenAPI description


class Native(Vllm):
    starts: ClassVar[Mapping[LogProbs, str]] = {"tempered": TITLE}

    def probe(self, client: Client, vocab_size: int | None) -> Abilities:
        if client.get("/openapi.json").get("info", {}).get("title") != TITLE:
            raise ConfigError(
                f"engine {client.url} is not started by `{TITLE}`, which rollout.backend=native is for; set "
                "rollout.backend=vllm or sglang"
            )
        return replace(super().probe(client, vocab_size), log_probs="tempered", keyed=True)
