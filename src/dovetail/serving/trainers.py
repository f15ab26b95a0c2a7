"""Which trainer a server takes weights from. Of two at once both are refused and named."""

from collections import deque

from starlette.requests import Request

from dovetail.inference_servers.http import AGENT
from dovetail.serving.bodies import RequestError

REMEMBERED = 64  # trainers


class Trainers:
    """A trainer names itself in the header user-agent; other clients are not told apart.

    A new trainer takes the server over: the one before may have ended. If that one comes back, two
    runs share the server, and it serves neither.
    """

    def __init__(self) -> None:
        self._owner = ""
        self._earlier = deque[str](maxlen=REMEMBERED)
        self._refused: dict[str, str] = {}  # trainer -> the other one

    def admit(self, request: Request) -> None:
        """Raises RequestError 409 if the trainer of a push shares this server with another one."""
        agent = request.headers.get("user-agent", "")
        if not agent.startswith(AGENT):
            return
        host = request.client.host if request.client is not None else "?"
        trainer = f"{agent.removeprefix(AGENT)} from {host}"
        if trainer in self._earlier and trainer not in self._refused:
            self._refused = {trainer: self._owner, self._owner: trainer}
        other = self._refused.get(trainer)
        if other is not None:
            both = f"two trainers push to this server: you ({trainer}) and {other}"
            raise RequestError(409, f"{both}; give each run servers of its own")
        if self._owner not in ("", trainer):
            self._earlier.append(self._owner)
        self._owner = trainer
