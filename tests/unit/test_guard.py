"""What ends a run between its steps: updates that are skipped in a row, and copies of weights that differ."""

from unittest import mock

import pytest

from dovetail.errors import NumericsError
from dovetail.rl.step_metrics import Guard


def test_skipped_updates_end_a_run_where_they_come_in_a_row() -> None:
    guard, skipped = Guard(2, 0), {"skipped": True, "fault": "a reason"}
    for row in (skipped, {}, skipped, {}, skipped):
        guard.look({"step": 1, **row}, [])
    with pytest.raises(NumericsError, match=r"the updates of 2 steps in a row were skipped: a reason"):
        guard.look({"step": 6, **skipped}, [])


def test_copies_are_compared_every_so_many_steps() -> None:
    guard, engines = Guard(3, 2), [mock.Mock(), mock.Mock()]
    compared = []
    for step in (1, 2, 3, 4):
        guard.look({"step": step}, engines)
        compared.append([engine.check_replicas.call_count for engine in engines])
    assert compared == [[0, 0], [1, 1], [1, 1], [2, 2]]


def test_copies_may_never_be_compared() -> None:
    engine = mock.Mock()
    Guard(3, 0).look({"step": 1}, [engine])
    engine.check_replicas.assert_not_called()
