"""The HTTP server: uvicorn on a thread of its own, beside the thread that owns the model."""

import asyncio
import socket
import threading
from functools import partial

import uvicorn

from dovetail.launch.process import complain
from dovetail.serving.app import Settings, make_app
from dovetail.serving.bridge import SamplerBridge
from dovetail.serving.connection import Connection
from dovetail.serving.sampler_server import SamplerServer

BACKLOG = 4096  # connections that come at once
IDLE_SECONDS = 5  # of a connection between two requests


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket on which clients wait from now on; OSError or OverflowError without one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


class HttpServer:
    """Serves `sampler_server` from `start` to `stop`. `run` is of the thread that owns the model."""

    def __init__(
        self, sampler_server: SamplerServer, listener: socket.socket, settings: Settings
    ) -> None:
        self.sampler_server = sampler_server
        self.settings = settings
        self._listener = listener
        host, self.port, *_ = listener.getsockname()
        self.url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def run(self) -> None:
        """Draws samples until `stop`, or until the thread that listens fails."""
        self.sampler_server.run(self._sampler.deliver)

    def stop(self) -> None:
        self._uvicorn.should_exit = True
        self._uvicorn.force_exit = True
        self._thread.join()
        self.sampler_server.stop()

    def _serve(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._main())
        except BaseException as error:
            complain(f"dovetail: the server's connections ended: {error!r}\n")
            raise
        finally:
            self._ready.set()
            self.sampler_server.stop()

    async def _main(self) -> None:
        self._sampler = SamplerBridge(self.sampler_server)
        config = uvicorn.Config(
            make_app(self._sampler, self.settings),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            server_header=False,
            date_header=False,
            timeout_keep_alive=IDLE_SECONDS,
        )
        self._uvicorn = uvicorn.Server(config)
        asyncio.get_running_loop().call_soon(partial(self._ready.set))
        await self._uvicorn.serve(sockets=[self._listener])
