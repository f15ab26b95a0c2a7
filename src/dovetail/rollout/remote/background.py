"""Daemon threads: a hanging collective does not keep the program alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    threading.Thread(target=settle, args=(future, work), daemon=True).start()
    return future


def settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        value = work()
    except (RuntimeError, OSError, ValueError, LookupError, TypeError) as error:
        future.set_exception(error)
    else:
        future.set_result(value)
