"""Every epoch has every row once, in an order that depends on the seed alone."""

import random
from collections import Counter

import pytest

from dovetail.data.rows import batch_rows

GOLDEN = [0, 5, 1, 4, 3, 2]  # of seed 0: what a resumed run relies on


@pytest.mark.parametrize(("num_rows", "per_step"), [(7, 3), (5, 5), (3, 8), (1, 2)])
def test_every_epoch_holds_every_row_once(num_rows: int, per_step: int) -> None:
    stream = [
        row
        for step in range(num_rows * 3)
        for row in batch_rows(num_rows, per_step, 4, step * per_step)
    ]
    epochs = [stream[at : at + num_rows] for at in range(0, len(stream), num_rows)]
    assert len(epochs) == 3 * per_step
    assert all(Counter(epoch) == Counter(range(num_rows)) for epoch in epochs)
    assert num_rows < 5 or len({tuple(epoch) for epoch in epochs}) > 1, (
        "epochs are shuffled differently"
    )


def test_a_step_depends_on_seed_and_step_alone() -> None:
    assert batch_rows(100, 4, 0, 30) == batch_rows(100, 4, 0, 30)
    assert batch_rows(100, 4, 0, 30) != batch_rows(100, 4, 1, 30)
    assert batch_rows(6, 3, 0, 0) == GOLDEN[:3], (
        "the stream changed: resumed runs would see other rows"
    )
    assert batch_rows(6, 3, 0, 3) == GOLDEN[3:]


def test_a_step_does_not_shuffle_all_rows_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    shuffle = random.Random.shuffle

    def counted(self: random.Random, rows: list[int]) -> None:
        calls.append(len(rows))
        shuffle(self, rows)

    monkeypatch.setattr(random.Random, "shuffle", counted)
    _ = [batch_rows(1009, 200, 77, step * 200) for step in range(8)]
    assert calls == [1009, 1009], "once an epoch; with a million rows it takes half a second"
