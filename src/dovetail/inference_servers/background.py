"""Daemon threads: a hanging collective does not keep the program alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from dovetail.errors import Caught

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    threading.Thread(target=settle, args=(future, work), daemon=True).start()
    return future


def settle(future: Future[T], work: Callable[[], T]) -> None:
    with Caught() as caught:
        future.set_result(work())
    if caught.error is not None:
        future.set_exception(caught.error)
