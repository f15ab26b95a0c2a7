"""Work in daemon threads, so that a hanging collective does not keep the program alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from dovetail.errors import Caught

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    """Returns the future of `work`, which a daemon thread does."""
    future: Future[T] = Future()
    threading.Thread(target=set_result_of, args=(future, work), daemon=True).start()
    return future


def set_result_of(future: Future[T], work: Callable[[], T]) -> None:
    """Does `work`, whose result or error becomes that of the future."""
    with Caught() as caught:
        future.set_result(work())
    if caught.error is not None:
        future.set_exception(caught.error)
