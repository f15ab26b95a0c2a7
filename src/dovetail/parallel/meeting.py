"""Ranks that were started together find each other in a store that outlives them.

Imports no torch.
"""

import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from dovetail.errors import MachineError, shortened

KEY = "dovetail/meeting"
POLL_SECONDS = 0.05


class Store(Protocol):
    """What a meeting needs of a store of torch."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class Meeting:
    """The ranks of one start, who agree upon a name for it in `store`.

    torchrun's agents keep one store over all restarts, and each agent counts restarts by itself.
    A rank that is started again therefore finds addresses of processes that have ended. So every
    start gets a name, a random word of its rank 0, and a prefix of that name for all its keys:

    - each other rank writes a random word of its own, and waits for an answer to that word;
    - rank 0 answers every word with the name of the start, until all ranks have signed under it;
    - each rank signs with its host's name, and waits until rank 0 finds that nobody is missing.

    Only processes that run right now answer or sign, so all agree. `tell` is called with a sentence
    about who is missing, every POLL_SECONDS.
    """

    def __init__(self, store: Store, rank: int, world: int, tell: Callable[[str], object]) -> None:
        self.store = store
        self.rank = rank
        self.world = world
        self.tell = tell
        self.missing = ""

    def gather(self, seconds: float) -> str:
        """Return the name of the start when all ranks are there. MachineError after `seconds`."""
        deadline = time.monotonic() + seconds
        return self._call_others(deadline) if self.rank == 0 else self._join(deadline)

    def _call_others(self, deadline: float) -> str:
        name = secrets.token_hex(8)
        hosts = {0: socket.gethostname()}
        while True:
            for rank in range(self.world):
                if rank not in hosts:
                    self._call(rank, name, hosts)
            missing = _missing(self.world, hosts)
            self.store.set(_missing_key(name), missing)
            if not missing:
                return name
            self._pause(missing, deadline)

    def _call(self, rank: int, name: str, hosts: dict[int, str]) -> None:
        """Note the host of a rank that has signed; answer the word of one that has not."""
        if self.store.check([_signature_key(name, rank)]):
            hosts[rank] = self.store.get(_signature_key(name, rank)).decode()
        elif self.store.check([_word_key(rank)]):
            word = self.store.get(_word_key(rank)).decode()
            self.store.set(_answer_key(word), name)

    def _join(self, deadline: float) -> str:
        word = secrets.token_hex(8)
        self.store.set(_word_key(self.rank), word)
        while not self.store.check([_answer_key(word)]):
            self._pause("rank 0 did not come", deadline)
        name = self.store.get(_answer_key(word)).decode()
        self.store.set(_signature_key(name, self.rank), socket.gethostname())
        while missing := self.store.get(_missing_key(name)).decode():
            self._pause(missing, deadline)
        return name

    def _pause(self, missing: str, deadline: float) -> None:
        self.missing = missing
        self.tell(missing)
        if time.monotonic() > deadline:
            raise MachineError(f"{missing}; start all ranks again")
        time.sleep(POLL_SECONDS)


def _word_key(rank: int) -> str:
    return f"{KEY}/word/{rank}"


def _answer_key(word: str) -> str:
    return f"{KEY}/answer/{word}"


def _signature_key(name: str, rank: int) -> str:
    return f"{KEY}/{name}/{rank}"


def _missing_key(name: str) -> str:
    return f"{KEY}/{name}/missing"


def _missing(world: int, hosts: Mapping[int, str]) -> str:
    absent = [rank for rank in range(world) if rank not in hosts]
    if not absent:
        return ""
    names = ", ".join(dict.fromkeys(hosts.values()))
    return f"{_ranks(absent)} did not come ({_ranks(hosts)} came, on {shortened(names)})"


def _ranks(ranks: Iterable[int]) -> str:
    return shortened(f"rank {', '.join(map(str, sorted(ranks)))}")
