"""Book-keeping of a cache, against a plain model of it."""

from __future__ import annotations

import pytest

from specbranch.engines.cells import Cells
from specbranch.engines.protocol import EngineFull, Row


def test_forks_share_cells_until_the_last_holder_lets_go() -> None:
    cells = Cells(max_cells=10, max_handles=3)
    trunk = cells.open()
    cells.extend([Row(trunk, (1, 2, 3))])
    fork = cells.fork(trunk, 2)
    cells.extend([Row(fork, (9,))])

    assert cells.num_used == 4
    assert list(cells.path(fork)[:2]) == list(cells.path(trunk)[:2])
    cells.close(trunk)
    assert cells.num_used == 3
    cells.truncate(fork, 0)
    assert (cells.num_used, cells.num_handles) == (0, 1)


def test_a_full_cache_refuses_all_rows_of_a_step_and_changes_nothing() -> None:
    cells = Cells(max_cells=3, max_handles=2)
    a, b = cells.open(), cells.open()

    with pytest.raises(EngineFull, match="room for 3 more tokens, not 4"):
        cells.extend([Row(a, (1, 2)), Row(b, (3, 4))])
    with pytest.raises(EngineFull, match="all 2 handles"):
        cells.open()
    assert cells.num_used == 0
    assert [len(new) for new in cells.extend([Row(a, (1, 2)), Row(b, (3,))])] == [2, 1]


def test_handles_are_used_again() -> None:
    cells = Cells(max_cells=3, max_handles=2)
    first = cells.open()
    cells.open()
    cells.close(first)

    assert cells.open() == first
