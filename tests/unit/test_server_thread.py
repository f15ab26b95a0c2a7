"""The thread that owns a server's model: an error of a request fails that request alone."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Self

import pytest

from dovetail.sampler.base import SamplingParams, TokenPrompt
from dovetail.serving import sampler_server as server_module
from dovetail.serving.sampler_server import SamplerServer
from dovetail.serving.served_request import ServedRequest, ServedTokens
from tests.helpers.parity_configs import VOCAB
from tests.helpers.schedulers import sampler_of

MODEL = "qwen2_window"
LONG = SamplingParams(max_new_tokens=12, temperature=0.8, seed=3)
SECONDS = 20.0


class Running:
    """A server's thread. `event` waits for the next one of a sample."""

    def __init__(self, **options: Any) -> None:
        self.sampler_server = SamplerServer(sampler_of(MODEL, 4096, **options))
        self._events: SimpleQueue[tuple[ServedRequest, ServedTokens]] = SimpleQueue()
        self.most_kinds = 0  # that ran at once
        self._early = list[tuple[ServedRequest, ServedTokens]]()
        self._owner = threading.Thread(
            target=self.sampler_server.run, args=(self._take,), daemon=True
        )

    def _take(self, events: Sequence[tuple[ServedRequest, ServedTokens]]) -> None:
        self.most_kinds = max(self.most_kinds, len(self.sampler_server._loops))
        for event in events:
            self._events.put(event)

    def event(self, sample: ServedRequest) -> ServedTokens:
        for early in self._early:
            if early[0] is sample:
                self._early.remove(early)
                return early[1]
        while True:
            of, event = self._events.get(timeout=SECONDS)
            if of is sample:
                return event
            self._early.append((of, event))

    def __enter__(self) -> Self:
        self._owner.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.sampler_server.stop()
        self._owner.join(SECONDS)
        assert not self._owner.is_alive()


def wrong(**changes: Any) -> ServedRequest:
    """A sample that no typed request can ask for."""
    params = {name: changes.pop(name) for name in list(changes) if name in vars(LONG)}
    broken = replace(LONG)
    for name, value in params.items():
        object.__setattr__(broken, name, value)
    return ServedRequest(**{"ids": [5], "params": broken, "interval": 12, **changes})


WRONG: tuple[dict[str, Any], ...] = (
    {"seed": "abc"},
    {"seed": [1]},
    {"step": {}},
    {"top_k": 1.5},
    {"stop_ids": "ab"},
    {"stop_ids": (10**40,)},
    {"banned_ids": (999999,)},
    {"banned_ids": (-999,)},
    {"temperature": "hot"},
    {"row": "x"},
    {"sample": 1 << 70},
    {"drawn": "x"},
    {"ids": ["x"], "temperature": 1.7},
    {"ids": [VOCAB], "temperature": 1.6},  # fails the samples of its kind, in a turn
    {"batch": ([1], 2, 0)},
)


def test_an_error_of_a_request_is_that_requests(capfd: pytest.CaptureFixture[str]) -> None:
    (expected,) = sampler_of(MODEL, 4096).sample([TokenPrompt(0, [7, 8, 9])], LONG)
    with Running(page_size=4) as server:
        sampler_server = server.sampler_server
        for changes in WRONG:
            other, broken = ServedRequest(ids=[7, 8, 9], params=LONG, interval=12), wrong(**changes)
            sampler_server.submit(other)
            sampler_server.submit(broken)
            failed = server.event(broken)
            assert failed.error and failed.is_last, changes
            event = server.event(other)
            assert event.ids == list(expected.ids) and event.finish == "length", changes
            assert f"1 samples failed: {failed.error}" in capfd.readouterr().err
        sampler_server.call(lambda: None)
        assert not sampler_server._living and sampler_server.pool.num_free == sampler_server.pages


def test_a_failed_call_is_the_callers() -> None:
    def fail() -> None:
        raise AttributeError("of the caller")

    with Running() as server:
        sampler_server = server.sampler_server
        with pytest.raises(AttributeError, match="of the caller"):
            sampler_server.call(fail)
        cancelled = sampler_server.ask(lambda: None)
        cancelled.cancel()
        sampler_server.call(lambda: None)


def test_few_kinds_of_sampling_run_at_once_and_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "KINDS", 2)
    with Running() as server:
        sampler_server = server.sampler_server
        kinds = [replace(LONG, temperature=1 + n / 8) for n in range(5)]
        samples = [ServedRequest(ids=[5], params=kind) for kind in kinds]
        for sample in samples:
            sampler_server.submit(sample)
        for sample in samples:
            events = [server.event(sample) for _ in range(12)]
            assert events[-1].finish == "length"
        assert server.most_kinds == 2 and not sampler_server._deferred


def test_clients_that_leave_take_only_their_own_requests_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "KINDS", 1)
    with Running() as server:
        sampler_server = server.sampler_server
        sampler_server.call(lambda: sampler_server.pause(clear_cache=False))
        kinds = [replace(LONG, temperature=1.0 + n % 3) for n in range(60)]
        samples = [ServedRequest(ids=[5, n % 5], params=kind) for n, kind in enumerate(kinds)]
        held = ServedRequest(ids=[5], params=LONG, batch=("b", 2, 0))
        for sample in (*samples, held):
            sampler_server.submit(sample)
        for sample in (*samples[1:], held):
            sampler_server.abort(sample)
        sampler_server.call(sampler_server.resume)
        while not server.event(samples[0]).is_last:
            pass
        sampler_server.call(lambda: None)
        assert not sampler_server._living and sampler_server.pool.num_free == sampler_server.pages
        assert not sampler_server._deferred and not sampler_server._held.get("b")
