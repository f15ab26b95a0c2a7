"""Pushes to vLLM with our plugin, which checks each bucket, or by vLLM's own back end `nccl`."""

import base64
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dovetail.inference_servers.background import in_background
from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.transports import BucketEntry, Transport, WeightBucket
from dovetail.memory import ALIGNMENT
from dovetail.parallel.private_group import GroupBackend, PrivateGroup

if TYPE_CHECKING:
    from dovetail.recipe.rollout import PushSection

ONE_BROADCAST = 1 << 62  # bytes
SETTLE = 2.0  # seconds for the other side of a failed transfer to say why


class VllmPushTarget:
    """A vLLM server that is pushed to. A failure leaves it paused; `connect` makes it ready again."""

    def __init__(self, client: Client, transport: Transport, options: "PushSection") -> None:
        self.client = client
        self.transport = transport
        self.options = options
        self.plugin = options.proof == "plugin"
        self.timeout = options.timeout
        self.alignment = ALIGNMENT if self.plugin else 1
        self.tp = self._workers = 0
        self._group: PrivateGroup | None = None
        self._version: str | None = None  # of the last push, if it succeeded

    def connect(self) -> None:
        """Makes a transfer with a server that is not as the last push left it."""
        known = self._version
        self._version = None
        current = self._get("/weight_info")["weight_version"]
        if known is not None and known == current:
            return
        self._leave()
        self._workers = self._get("/get_world_size?include_dp=true")["world_size"]
        self.tp = self._get("/get_world_size?include_dp=false")["world_size"]  # without a pipeline
        if self.options.transport == "nccl":
            self._join()
        else:
            self._post("/init_weight_transfer_engine", {"init_info": {"timeout": self.timeout / 2}})

    def pause(self) -> None:
        clear = "true" if self.options.kv == "recompute" else "false"
        self._post(f"/pause?mode=keep&clear_cache={clear}")

    def start(self) -> None:
        self._post("/start_weight_update")

    def send(self, bucket: WeightBucket) -> None:
        """Sends a bucket, and waits until the server has loaded it."""
        if self._group is None:
            described = self._described(bucket)
            infos = [
                {**described, **fields} for fields in self.transport.fields(bucket, self._workers)
            ]
            self._post("/update_weights", {"update_info": infos[0] if len(infos) == 1 else infos})
            return
        group = self._group
        body = {"update_info": self._described(bucket)}
        self._both(
            in_background(lambda: self._post("/update_weights", body)),
            in_background(lambda: group.broadcast(bucket.data)),
        )

    def finish(self, entries: Sequence[BucketEntry], version: str) -> None:
        """Ends the update. entries: those of all buckets."""
        if self.plugin:
            manifest = [[entry.name, entry.dtype, entry.shape, entry.checksum] for entry in entries]
            self._post("/update_weights", {"update_info": {"manifest": manifest}})
        self._post("/finish_weight_update", {"weight_version": version})
        found = self._get("/weight_info")["weight_version"]
        if found != version:
            problem = f"its weights are version {found}, pushed was {version}"
            raise self.client.error("/weight_info", problem)

    def digests(self) -> Mapping[str, str]:
        """Returns SHA-256 by "dp0:pp0:pcp0:tp0:PARAMETER"."""
        return self._post("/weight_checker", {"action": "checksum"})["checksums"]

    def resume(self, version: str) -> None:
        self._post("/resume")
        self._version = version

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _described(self, bucket: WeightBucket) -> dict[str, Any]:
        if self.plugin:
            rows = [list(row) for row in bucket.entries]
            return {"bucket": bucket.number, "num_bytes": len(bucket.data), "tensors": rows}
        names, dtypes, shapes, _, _ = (list(column) for column in zip(*bucket.entries, strict=True))
        return {"names": names, "dtype_names": dtypes, "shapes": shapes}

    def _leave(self) -> None:
        """Ends an open update, whose tensors vLLM would count as the next one's."""
        self.close()
        calls: list[tuple[str, dict[str, Any] | None]] = [
            ("/update_weights", {"update_info": {"abort": True}})
        ]
        if not self.plugin:
            calls += [("/start_weight_update", None), ("/finish_weight_update", {})]
        for path, body in calls:
            with suppress(ServerError):  # nothing is open
                self._post(path, body)

    def _join(self) -> None:
        backend: GroupBackend = "nccl" if self.transport.device.type == "cuda" else "gloo"
        group = self._group = PrivateGroup(
            backend, self.options.address, 1 + self._workers, self.timeout
        )
        joined = in_background(lambda: group.connect(self.transport.device))
        info: dict[str, Any] = {"rank_offset": 1, "world_size": group.size}
        if self.plugin:
            info |= {"timeout": self.timeout / 2, "backend": backend}  # it ends before ours
            info |= {"master_address": group.address, "master_port": group.port}
        else:
            unique = base64.b64encode(group.unique_id()).decode()
            info |= {
                "nccl_unique_id_b64": unique,
                "packed": True,
                "packed_buffer_size_bytes": ONE_BROADCAST,
            }
        self._both(
            in_background(lambda: self._post("/init_weight_transfer_engine", {"init_info": info})),
            joined,
        )

    def _both(self, call: Future[Any], collective: Future[None]) -> None:
        """Waits for a call and its collective. An error of either ends both."""
        pair: tuple[Future[Any], ...] = (call, collective)
        end = time.monotonic() + self.timeout
        done, _ = wait(pair, self.timeout, FIRST_EXCEPTION)
        if (
            len(done) < len(pair)
            or call.exception() is not None
            or collective.exception() is not None
        ):
            wait(pair, SETTLE)
        if not (collective.done() and collective.exception() is None):
            self.close()  # frees those that wait in it
            wait((call,), max(SETTLE, end - time.monotonic()) if collective.done() else SETTLE)
        if call.done():
            call.result()
        if collective.done() and (error := collective.exception()) is not None:
            raise self.client.error("the broadcast to it", str(error)) from error
        if not (call.done() and collective.done()):
            raise self.client.error(
                "a transfer to it",
                f"it did not end within {self.timeout:g} s",
            )

    def _get(self, path: str) -> dict[str, Any]:
        return self.client.get(path, timeout=self.timeout)

    def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.client.post(path, body, timeout=self.timeout)
