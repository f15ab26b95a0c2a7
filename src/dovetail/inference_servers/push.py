"""Verified pushes of weights to inference servers (docs/pushes.md)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dovetail.errors import ConfigError, listing
from dovetail.inference_servers.background import in_background
from dovetail.inference_servers.http import Client, EngineError
from dovetail.inference_servers.push_sglang import SglangReplica
from dovetail.inference_servers.push_vllm import VllmReplica
from dovetail.inference_servers.transports import Entry, Transport, fill, make_transport
from dovetail.inference_servers.vllm_digests import ExpectedDigests

if TYPE_CHECKING:
    from dovetail.recipe.rollout import PushSection

Replica = VllmReplica | SglangReplica
GRACE = 10.0  # seconds for a thread that has a deadline of its own


class Pusher:
    """kind: of the servers. device: of the weights. kv_heads: for proof=checker where servers have tp > 1."""

    def __init__(
        self,
        clients: Sequence[Client],
        push: "PushSection",
        *,
        kind: Literal["vllm", "sglang"],
        device: torch.device | str = "cpu",
        kv_heads: int | None = None,
    ) -> None:
        self.options = push
        self._kind = kind
        self._kv_heads = kv_heads
        self._checked = kind == "vllm" and push.proof == "checker"
        self.proved = (0, 0)  # parameters, and those that were only compared
        device = torch.device(device)
        directory = Path(push.directory)
        if kind == "sglang" and push.transport != "file":
            raise ConfigError(
                f"rollout.push.transport={push.transport}: SGLang takes weights by file alone; "
                "set file"
            )
        if self._checked and (push.transport != "nccl" or device.type != "cuda"):
            raise ConfigError(
                f"rollout.push.proof=checker with transport={push.transport} and weights on "
                f"{device.type}: a server without "
                "our plugin takes weights by nccl on GPUs alone; install dovetail-vllm where it "
                "runs and set proof=plugin"
            )
        self._transport = (
            Transport(torch.device("cpu"))
            if kind == "sglang"
            else make_transport(push.transport, device, directory)
        )
        self._replicas = [
            self._replica(client, directory / f"sglang-{i}") for i, client in enumerate(clients)
        ]
        self._errors: dict[int, EngineError] = {}
        self._last: tuple[int, Mapping[str, str]] | None = None  # a version and its digests

    def _replica(self, client: Client, directory: Path) -> Replica:
        clear = self.options.kv == "recompute"
        options = self.options
        if self._kind == "sglang":
            return SglangReplica(client, directory, timeout=options.timeout, clear_cache=clear)
        return VllmReplica(client, self._transport, options)

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> list[EngineError | None]:
        """Returns for each server None, or why it stays paused. Always exhausts `weights`."""
        self._errors = {}
        weights = iter(weights)
        try:
            if self._replicas:
                self._push(weights, version)
        finally:
            self._transport.close()
            for i in self._errors:
                self._replicas[i].close()
            for _ in weights:  # other ranks wait in the gathering
                pass
        return [self._errors.get(i) for i in range(len(self._replicas))]

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()

    def _push(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self._each("connect")
        if not self._live():
            return
        expected = None
        if self._checked:
            expected = ExpectedDigests({self._replicas[i].tp for i in self._live()}, self._kv_heads)
            weights = expected.watched(weights)
        entries: list[Entry] = []
        sending: dict[int, Future[None]] | None = None
        alignment = self._replicas[0].alignment
        for bucket in fill(
            weights, self._transport, self.options.bucket_mb << 20, alignment=alignment
        ):
            self._transport.publish(bucket)
            if sending is None:  # the first is gathered before generation stops
                self._each("pause")
                self._each("start")
            else:
                self._settle("send", sending)
            if not self._live():
                return
            entries += bucket.entries
            sending = self._begin("send", bucket)
        if sending is None:
            raise ValueError("a push without weights")
        self._settle("send", sending)
        self._each("finish", entries, str(version))
        if expected is not None or self._kind == "sglang":
            self._compare(expected, version)
        self._each("resume", str(version))

    def _compare(self, expected: ExpectedDigests | None, version: int) -> None:
        """Unknown digests are compared with those of other servers and of the version's last push."""
        futures: dict[int, Future[Mapping[str, str]]] = self._begin("digests")
        self._settle("digests", futures)
        answers = {i: futures[i].result() for i in self._live()}
        path = "/weight_checker"
        unknown = set[str]()
        for i, answer in answers.items():
            wrong, left = (
                expected.problems(self._replicas[i].tp, answer)
                if expected is not None
                else ([], set(answer))
            )
            unknown |= left
            if wrong:
                self._fail(i, path, f"these parameters are not the trainer's:\n{listing(wrong)}")
        for name in sorted(unknown):
            values = {i: answer[name] for i, answer in answers.items() if name in answer}
            if self._last is not None and self._last[0] == version and name in self._last[1]:
                values[-1] = self._last[1][name]
            if len(set(values.values())) > 1:
                for i in values.keys() & set(self._live()):
                    self._fail(
                        i,
                        path,
                        f"{name} differs between the engines, or from the last push of version "
                        f"{version}",
                    )
        self.proved = (len({name for answer in answers.values() for name in answer}), len(unknown))
        self._last = (
            version,
            {name: answers[i][name] for i in self._live() for name in unknown & answers[i].keys()},
        )

    def _live(self) -> list[int]:
        return [i for i in range(len(self._replicas)) if i not in self._errors]

    def _each(self, step: str, *args: Any) -> None:
        self._settle(step, self._begin(step, *args))

    def _begin(self, step: str, *args: Any) -> dict[int, Future[Any]]:
        """A method of all replicas."""
        return {
            i: in_background(partial(methodcaller(step, *args), self._replicas[i]))
            for i in self._live()
        }

    def _settle(self, step: str, futures: Mapping[int, Future[Any]]) -> None:
        for i, future in futures.items():
            try:
                future.result(2 * self.options.timeout + GRACE)
            except EngineError as error:
                self._errors[i] = error
            except TimeoutError:
                self._fail(i, step, "it did not end in time")
            except (RuntimeError, OSError, ValueError, LookupError, TypeError) as error:
                self._fail(i, step, f"{type(error).__name__}: {error}")

    def _fail(self, i: int, path: str, message: str) -> None:
        self._errors[i] = EngineError(self._replicas[i].client.url, path, None, message)
