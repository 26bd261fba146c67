"""Book-keeping of a cache, against a plain model of it."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from specbranch.engines.base import Row
from specbranch.engines.kv_cache import SlotAllocator
from specbranch.errors import EngineFull


def test_forks_share_cells_until_the_last_holder_lets_go() -> None:
    cells = SlotAllocator(max_cells=10, max_handles=3)
    trunk = cells.open()
    cells.allocate([Row(trunk, (1, 2, 3))])
    fork = cells.fork(trunk, 2)
    cells.allocate([Row(fork, (9,))])

    assert cells.num_used == 4
    assert list(cells.path(fork)[:2]) == list(cells.path(trunk)[:2])
    cells.close(trunk)
    assert cells.num_used == 3
    cells.truncate(fork, 0)
    assert (cells.num_used, cells.num_handles) == (0, 1)


def test_a_full_cache_refuses_all_rows_of_a_step_and_changes_nothing() -> None:
    cells = SlotAllocator(max_cells=3, max_handles=2)
    a, b = cells.open(), cells.open()

    with pytest.raises(EngineFull, match="room for 3 more tokens, not 4"):
        cells.allocate([Row(a, (1, 2)), Row(b, (3, 4))])
    with pytest.raises(EngineFull, match="all 2 handles"):
        cells.open()
    assert cells.num_used == 0
    cells.allocate([Row(a, (1, 2)), Row(b, (3,))])
    assert [len(cells.path(handle)) for handle in (a, b)] == [2, 1]


def test_handles_are_used_again() -> None:
    cells = SlotAllocator(max_cells=3, max_handles=2)
    first = cells.open()
    cells.open()
    cells.close(first)

    assert cells.open() == first


def test_the_cells_of_a_session_lie_side_by_side_and_forks_use_the_lowest_free_ones() -> None:
    cells = SlotAllocator(max_cells=300, max_handles=4)
    a, b = cells.open(), cells.open()
    cells.allocate([Row(a, (1, 2, 3)), Row(b, tuple(range(100)))])
    fork = cells.fork(a, 1)
    cells.truncate(a, 1)
    cells.allocate([Row(fork, (7, 7, 7))])

    assert cells.session(fork) is cells.session(a) is not cells.session(b)
    assert cells.path(fork).tolist() == [0, 1, 2, 3]
    assert cells.path(b).tolist() == list(range(150, 250))


def test_a_new_session_begins_where_most_room_is() -> None:
    cells = SlotAllocator(max_cells=1000, max_handles=8)
    handles = [cells.open() for _ in range(4)]

    assert [cells.session(handle).first for handle in handles] == [0, 500, 250, 750]
    cells.close(handles[0])
    cells.close(handles[2])
    assert cells.session(cells.open()).first == 0


def test_sessions_that_meet_go_on_behind_each_other_and_use_every_cell() -> None:
    cells = SlotAllocator(max_cells=100, max_handles=3)
    a, b = cells.open(), cells.open()
    cells.allocate([Row(b, (1,) * 10)])
    cells.allocate([Row(a, (1,) * 70)])
    cells.allocate([Row(b, (1,) * 20)])

    paths = [cells.path(handle).tolist() for handle in (a, b)]
    assert paths[0] == [*range(50), *range(60, 80)]
    assert paths[1] == [*range(50, 60), *range(80, 100)]
    with pytest.raises(EngineFull, match="room for 0 more"):
        cells.allocate([Row(a, (1,))])
    cells.truncate(a, 5)
    cells.allocate([Row(b, (1,) * 3)])
    assert cells.path(b).tolist()[-3:] == [5, 6, 7]


def test_random_histories_never_share_a_cell_by_accident() -> None:
    order, cells = random.Random(0), SlotAllocator(max_cells=200, max_handles=12)
    sequences: dict[int, tuple[Any, ...]] = {}
    for number in range(3000):
        choice = order.random()
        if choice < 0.15 and len(sequences) < 12:
            sequences[cells.open()] = ()
        elif choice < 0.3 and 0 < len(sequences) < 12:
            handle = order.choice(list(sequences))
            length = order.randint(0, len(sequences[handle]))
            sequences[cells.fork(handle, length)] = sequences[handle][:length]
        elif choice < 0.4 and sequences:
            handle = order.choice(list(sequences))
            cells.close(handle)
            del sequences[handle]
        elif choice < 0.6 and sequences:
            handle = order.choice(list(sequences))
            length = order.randint(0, len(sequences[handle]))
            cells.truncate(handle, length)
            sequences[handle] = sequences[handle][:length]
        elif sequences:
            handle = order.choice(list(sequences))
            new = tuple((number, place) for place in range(order.randint(1, 9)))  # no two tokens are the same
            with contextlib.suppress(EngineFull):
                cells.allocate([Row(handle, tuple(range(len(new))))])
                sequences[handle] += new
        held: dict[int, Any] = {}
        for handle, sequence in sequences.items():
            assert len(cells.path(handle)) == len(sequence)
            for cell, token in zip(cells.path(handle).tolist(), sequence, strict=True):
                assert held.setdefault(cell, token) == token
        assert cells.num_used == len(held) and cells.num_handles == len(sequences)


def test_a_cleared_cache_is_empty_and_can_be_filled_again() -> None:
    cells = SlotAllocator(max_cells=3, max_handles=1)
    cells.allocate([Row(cells.open(), (1, 2, 3))])

    cells.clear()
    assert (cells.num_used, cells.num_handles) == (0, 0)
    cells.allocate([Row(cells.open(), (1, 2, 3))])
