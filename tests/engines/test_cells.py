"""Book-keeping of a cache, against a plain model of it."""

from __future__ import annotations

import pytest

from specbranch.engines.cells import Arena, Cells
from specbranch.engines.protocol import EngineFull, Row


def test_forks_share_cells_until_the_last_holder_lets_go() -> None:
    cells = Cells(max_cells=10, max_handles=3, new_arena=Arena)
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
    cells = Cells(max_cells=3, max_handles=2, new_arena=Arena)
    a, b = cells.open(), cells.open()

    with pytest.raises(EngineFull, match="room for 3 more tokens, not 4"):
        cells.extend([Row(a, (1, 2)), Row(b, (3, 4))])
    with pytest.raises(EngineFull, match="all 2 handles"):
        cells.open()
    assert cells.num_used == 0
    cells.extend([Row(a, (1, 2)), Row(b, (3,))])
    assert [len(cells.path(handle)) for handle in (a, b)] == [2, 1]


def test_handles_are_used_again() -> None:
    cells = Cells(max_cells=3, max_handles=2, new_arena=Arena)
    first = cells.open()
    cells.open()
    cells.close(first)

    assert cells.open() == first


def test_each_opened_handle_numbers_its_own_cells_from_zero_and_forks_use_the_lowest_free_ones() -> None:
    cells = Cells(max_cells=300, max_handles=4, new_arena=Arena)
    a, b = cells.open(), cells.open()
    cells.extend([Row(a, (1, 2, 3)), Row(b, tuple(range(100)))])
    fork = cells.fork(a, 1)
    cells.truncate(a, 1)
    cells.extend([Row(fork, (7, 7, 7))])

    assert cells.arena(fork) is cells.arena(a) is not cells.arena(b)
    assert cells.path(fork).tolist() == [0, 1, 2, 3]
    assert cells.path(b).tolist() == list(range(100))


def test_a_cleared_cache_is_empty_and_can_be_filled_again() -> None:
    cells = Cells(max_cells=3, max_handles=1, new_arena=Arena)
    cells.extend([Row(cells.open(), (1, 2, 3))])

    cells.clear()
    assert (cells.num_used, cells.num_handles, len(cells.arenas())) == (0, 0, 0)
    cells.extend([Row(cells.open(), (1, 2, 3))])
