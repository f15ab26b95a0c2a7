"""Ranks of one start meet in a store that has keys of earlier starts, and name who is missing."""

import socket
import threading
from collections.abc import Callable

import pytest
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]  # they are public

from dovetail.errors import MachineError
from dovetail.parallel import process_group
from dovetail.parallel.meeting import Meeting, _word_key
from tests.helpers.processes import SECONDS

HOST = socket.gethostname()


def started(store: Store, world: int) -> list[str]:
    """The name that each rank of one start learns."""
    names: dict[int, str] = {}

    def gather(rank: int) -> None:
        names[rank] = Meeting(store, rank, world, lambda _: None).gather(SECONDS)

    threads = [threading.Thread(target=gather, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [names[rank] for rank in range(world)]


def told_until(
    sentence: str, store: Store, rank: int, world: int, follow: Callable[[], object] = lambda: None
) -> list[str]:
    """What a rank is told while it waits, up to that sentence; `follow` is called once it waits."""
    said: list[str] = []

    def tell(missing: str) -> None:
        if not said:
            follow()
        said.append(missing)
        if missing == sentence:
            raise StopAsyncIteration  # leaves the meeting

    with pytest.raises(StopAsyncIteration):
        Meeting(store, rank, world, tell).gather(SECONDS)
    return said


def test_all_ranks_of_a_start_learn_one_name_that_no_other_start_has() -> None:
    store = HashStore()
    first, second = started(store, 3), started(store, 3)
    assert len(set(first)) == len(set(second)) == 1
    assert first != second


def test_a_rank_that_was_started_again_is_the_one_that_is_met() -> None:
    """Its first process announced itself and ended: nobody takes the one for the other."""
    store = HashStore()
    store.set(_word_key(1), "the word of a process that has ended")
    missing = f"rank 1 did not come (rank 0 came, on {HOST})"
    assert set(told_until(missing, store, 0, 2)) == {missing}
    assert len(set(started(store, 2))) == 1


def test_all_ranks_name_those_who_are_missing() -> None:
    store = HashStore()
    missing = f"rank 1, 3 did not come (rank 0, 2 came, on {HOST})"
    first = threading.Thread(target=told_until, args=(missing, store, 0, 4))
    assert told_until(missing, store, 2, 4, first.start)[0] == "rank 0 did not come"
    first.join()
    told = r"rank 1, 2 did not come \(rank 0 came, on .*\); start all ranks again"
    with pytest.raises(MachineError, match=told):
        Meeting(HashStore(), 0, 3, lambda _: None).gather(0.0)
    with pytest.raises(MachineError, match="rank 0 did not come; start all ranks again"):
        Meeting(HashStore(), 1, 3, lambda _: None).gather(0.0)


def launched(monkeypatch: pytest.MonkeyPatch, agent: TCPStore, rank: int, world: int) -> None:
    """Give this process the environment of a rank whose torchrun keeps that store."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent.port}
    where |= {"TORCHELASTIC_USE_AGENT_STORE": True, "RANK": rank, "WORLD_SIZE": world}
    for name, value in where.items():
        monkeypatch.setenv(name, str(value))


def test_a_store_that_ends_is_told_with_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    launched(monkeypatch, agents[0], rank=1, world=2)

    def tell(missing: str) -> None:
        if missing.startswith("rank"):
            agents.clear()

    told = "rank 0 did not come, and the store of the ranks is gone; start all ranks again"
    with pytest.raises(MachineError, match=told):
        process_group._meet(tell=tell)


def test_a_start_finds_no_key_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of torchrun's agent has addresses, counts of failures and verdicts of before."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched(monkeypatch, agent, rank=0, world=1)
    first, _, _ = process_group._meet()
    first.set("dovetail/failures", "1")
    again, _, _ = process_group._meet()
    assert first.check(["dovetail/failures"])
    assert not again.check(["dovetail/failures"])
