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
from dovetail.inference_servers.http import Client, ServerError
from dovetail.inference_servers.push_sglang import SglangPushTarget
from dovetail.inference_servers.push_vllm import VllmPushTarget
from dovetail.inference_servers.transports import BucketEntry, Transport, fill, make_transport
from dovetail.inference_servers.vllm_digests import ExpectedDigests

if TYPE_CHECKING:
    from dovetail.recipe.rollout import PushSection

PushTarget = VllmPushTarget | SglangPushTarget
GRACE = 10.0  # seconds for a thread that has a deadline of its own


class Pusher:
    """Pushes weights to all servers at once.

    kind: of the servers. device: of the weights. kv_heads: for proof=checker where servers have
    tp > 1. proved: numbers of parameters, and of those that were only compared.
    """

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
        self.proved = (0, 0)
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
                f"{device.type}: a server without our plugin takes weights by nccl on GPUs alone; "
                "install dovetail-vllm where it runs and set proof=plugin"
            )
        self._transport = (
            Transport(torch.device("cpu"))
            if kind == "sglang"
            else make_transport(push.transport, device, directory)
        )
        self._targets = [
            self._target(client, directory / f"sglang-{i}") for i, client in enumerate(clients)
        ]
        self._errors: dict[int, ServerError] = {}
        self._last: tuple[int, Mapping[str, str]] | None = None  # a version and its digests

    def _target(self, client: Client, directory: Path) -> PushTarget:
        clear = self.options.kv == "recompute"
        options = self.options
        if self._kind == "sglang":
            return SglangPushTarget(client, directory, timeout=options.timeout, clear_cache=clear)
        return VllmPushTarget(client, self._transport, options)

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> list[ServerError | None]:
        """Returns for each server None, or why it stays paused. Always exhausts `weights`."""
        self._errors = {}
        weights = iter(weights)
        try:
            if self._targets:
                self._push(weights, version)
        finally:
            self._transport.close()
            for i in self._errors:
                self._targets[i].close()
            for _ in weights:  # other ranks wait in the gathering
                pass
        return [self._errors.get(i) for i in range(len(self._targets))]

    def close(self) -> None:
        for replica in self._targets:
            replica.close()

    def _push(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self._for_each_server("connect")
        if not self._live():
            return
        expected = None
        if self._checked:
            expected = ExpectedDigests({self._targets[i].tp for i in self._live()}, self._kv_heads)
            weights = expected.watched(weights)
        entries: list[BucketEntry] = []
        sending: dict[int, Future[None]] | None = None
        alignment = self._targets[0].alignment
        for bucket in fill(
            weights, self._transport, self.options.bucket_mb << 20, alignment=alignment
        ):
            self._transport.publish(bucket)
            if sending is None:  # the first is gathered before generation stops
                self._for_each_server("pause")
                self._for_each_server("start")
            else:
                self._collect_errors("send", sending)
            if not self._live():
                return
            entries += bucket.entries
            sending = self._begin("send", bucket)
        if sending is None:
            raise ValueError("a push without weights")
        self._collect_errors("send", sending)
        self._for_each_server("finish", entries, str(version))
        if expected is not None or self._kind == "sglang":
            self._compare(expected, version)
        self._for_each_server("resume", str(version))

    def _compare(self, expected: ExpectedDigests | None, version: int) -> None:
        """Compares unknown digests with those of other servers and of the version's last push."""
        futures: dict[int, Future[Mapping[str, str]]] = self._begin("digests")
        self._collect_errors("digests", futures)
        answers = {i: futures[i].result() for i in self._live()}
        path = "/weight_checker"
        unknown = set[str]()
        for i, answer in answers.items():
            wrong, left = (
                expected.problems(self._targets[i].tp, answer)
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
        return [i for i in range(len(self._targets)) if i not in self._errors]

    def _for_each_server(self, step: str, *args: Any) -> None:
        self._collect_errors(step, self._begin(step, *args))

    def _begin(self, step: str, *args: Any) -> dict[int, Future[Any]]:
        """Calls a method of all servers that have not failed, each in a thread."""
        return {
            i: in_background(partial(methodcaller(step, *args), self._targets[i]))
            for i in self._live()
        }

    def _collect_errors(self, step: str, futures: Mapping[int, Future[Any]]) -> None:
        for i, future in futures.items():
            try:
                future.result(2 * self.options.timeout + GRACE)
            except ServerError as error:
                self._errors[i] = error
            except TimeoutError:
                self._fail(i, step, "it did not end in time")
            except (RuntimeError, OSError, ValueError, LookupError, TypeError) as error:
                self._fail(i, step, f"{type(error).__name__}: {error}")

    def _fail(self, i: int, path: str, message: str) -> None:
        self._errors[i] = self._targets[i].client.error(path, message)
