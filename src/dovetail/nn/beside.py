"""Weight gradients beside the collectives of a backward pass that have nothing else beside them.

Between attention's backward pass and that of the products before it, context parallelism waits for other ranks: what comes
next needs what they send. The weight gradients of the products behind attention can wait until then; nobody reads them before
the whole block's backward pass has ended.
"""

from collections import deque
from collections.abc import Callable


class DelayedWgrad:
    """What a block has put off in one backward pass, and does beside the collectives of that pass.

    `awaited` is set in the forward pass, by whoever calls `rest` in the backward pass; where it is not, layers compute their
    weight gradients at once.
    """

    def __init__(self) -> None:
        self.awaited = False
        self._left: deque[Callable[[], None]] = deque()

    def put_off(self, work: Callable[[], None]) -> None:
        self._left.append(work)

    def one(self) -> None:
        """What was put off first, if anything is left: for a collective that others follow."""
        if self._left:
            self._left.popleft()()

    def rest(self) -> None:
        """All that is left: for the last collective, the first one of the forward pass."""
        while self._left:
            self.one()
