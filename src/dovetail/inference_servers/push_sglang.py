"""Pushes to SGLang through a directory; by srt/managers/io_struct.py, never run against a real server."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.transports import BucketEntry, WeightBucket
from dovetail.memory import ALIGNMENT, view_at
from dovetail.weights.safetensors import TensorFileWriter, TensorSpec


class SglangPushTarget:
    """An SGLang server that is pushed to. A failure leaves it paused."""

    alignment = ALIGNMENT
    tp = 0

    def __init__(
        self, client: Client, directory: Path, *, timeout: float, clear_cache: bool
    ) -> None:
        self.client = client
        self.timeout = timeout
        self.clear_cache = clear_cache
        self._directory = directory

    def connect(self) -> None:
        self._version()

    def pause(self) -> None:
        """Pauses; `retract` frees the KV cache of requests, `in_place` keeps it."""
        self._post("/pause_generation", {"mode": "retract" if self.clear_cache else "in_place"})

    def start(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)

    def send(self, bucket: WeightBucket) -> None:
        specs = [
            TensorSpec(entry.name, vars(torch)[entry.dtype], tuple(entry.shape))
            for entry in bucket.entries
        ]
        file = TensorFileWriter(self._directory / f"model-{bucket.number:05d}.safetensors", specs)
        for entry, spec in zip(bucket.entries, specs, strict=True):
            file.write(entry.name, view_at(bucket.data, entry.start, spec.dtype, spec.shape))
        file.close()

    def finish(self, entries: Sequence[BucketEntry], version: str) -> None:
        body = {"model_path": str(self._directory.resolve()), "weight_version": version}
        self._post(
            "/update_weights_from_disk",
            {**body, "flush_cache": self.clear_cache, "abort_all_requests": False},
        )
        found = self._version()
        if found != version:
            problem = f"its weights are version {found}, pushed was {version}"
            raise self.client.error("/model_info", problem)
        shutil.rmtree(self._directory, ignore_errors=True)

    def digests(self) -> Mapping[str, str]:
        """Returns the server's own checksums as one text, if it has any."""
        try:
            return {
                "all ranks": json.dumps(
                    self._post("/weights_checker", {"action": "checksum"}), sort_keys=True
                )
            }
        except ServerError as error:
            if error.status in (400, 404, 422):
                return {}
            raise

    def resume(self, version: str) -> None:
        self._post("/continue_generation", {})

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _version(self) -> str:
        return str(self.client.get("/model_info", timeout=self.timeout)["weight_version"])

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Posts; SGLang answers some failures with 200 and success: false."""
        answer = self.client.post(path, body, timeout=self.timeout)
        if answer.get("success") is False:
            raise self.client.error(path, str(answer.get("message", "no message")))
        return answer
