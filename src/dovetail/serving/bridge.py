"""The event loop's side of `SamplerServer`: samples in, events out, and no thread of their own."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from dovetail.serving.bodies import RequestError
from dovetail.serving.sampler_server import SamplerServer
from dovetail.serving.served_request import ServedRequest, ServedTokens

Delivery = Sequence[tuple[ServedRequest, ServedTokens]]
STOPPED = ServedTokens(finish="stop")


class SamplerBridge:
    """The way of one event loop to a server. `deliver` is called by the model's thread."""

    def __init__(self, sampler_server: SamplerServer) -> None:
        self.sampler_server = sampler_server
        self._loop = asyncio.get_running_loop()
        self._queues: dict[ServedRequest, asyncio.Queue[tuple[ServedRequest, ServedTokens]]] = {}

    def deliver(self, events: Delivery) -> None:
        self._loop.call_soon_threadsafe(self._take, events)

    def _take(self, events: Delivery) -> None:
        for sample, event in events:
            queue = self._queues.get(sample)
            if queue is not None:
                queue.put_nowait((sample, event))

    async def events(
        self, samples: Sequence[ServedRequest]
    ) -> AsyncGenerator[tuple[int, ServedTokens]]:
        """Events with the place of their sample, until all ended. Those left are aborted."""
        queue: asyncio.Queue[tuple[ServedRequest, ServedTokens]] = asyncio.Queue()
        places = {sample: place for place, sample in enumerate(samples)}
        running = set(samples)
        for sample in samples:
            self._queues[sample] = queue
            self.sampler_server.submit(sample)
        try:
            while running:
                sample, event = await queue.get()
                if event.error is not None:
                    raise RequestError(500, f"the sample failed: {event.error}")
                if event.is_last:
                    running.discard(sample)
                yield places[sample], event
        finally:
            for sample in samples:
                if self._queues.pop(sample, None) and sample in running:
                    self.sampler_server.abort(sample)

    def stop(self, sample: ServedRequest) -> None:
        """Ends a sample of `events` early."""
        queue = self._queues.pop(sample, None)
        if queue is not None:
            self.sampler_server.abort(sample)
            queue.put_nowait((sample, STOPPED))

    async def call(self, work: Callable[[], object]) -> None:
        """Calls on the model's thread, between two steps. Raises what the work raises."""
        await asyncio.wrap_future(self.sampler_server.ask(work))
