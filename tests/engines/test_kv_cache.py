"""Book-keeping of a cache, against a plain model of it."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from specbranch.engines.base import Row
from specbranch.engines.kv_cache import MOST, USUAL, SlotAllocator, cache_size, cache_tokens
from specbranch.errors import EngineFull
from specbranch.machine import free_host_memory, process_memory


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


GB = 10**9


@pytest.mark.parametrize(
    ("free", "per_token", "is_cpu", "tokens"),
    [
        (100 * GB, 10_000, True, 1_000_000),  # a tenth
        (20 * GB, 100_000, True, USUAL),  # a tenth holds 20,000; the usual size fits into a quarter
        (10 * GB, 100_000, True, 25_000),  # a quarter
        (20 * GB, 100_000, False, 150_000),  # three quarters
    ],
)
def test_a_cache_takes_its_share_of_the_free_memory(free: int, per_token: int, is_cpu: bool, tokens: int) -> None:
    assert cache_tokens(per_token, free, is_cpu=is_cpu) == tokens // 256 * 256


def test_a_cache_is_no_larger_than_what_is_of_use() -> None:
    assert cache_size(None, 1000, 900 * GB, is_cpu=False).tokens == MOST
    assert cache_size(None, 1000, 900 * GB, is_cpu=True, most=5000).tokens == 5000


@pytest.mark.parametrize("is_cpu", [True, False])
def test_with_too_little_memory_a_cache_has_the_fewest_tokens_that_are_of_use(is_cpu: bool) -> None:
    """A draft that is started again beside its target finds little memory, and must come back all the same."""
    assert cache_size(None, 400_000, GB, is_cpu=is_cpu).tokens == 4096


def test_what_was_asked_for_stands_whatever_is_free() -> None:
    size = cache_size(50_000, 100_000, 1, is_cpu=True)

    assert size.tokens == 50_000
    assert str(size) == "50,000 tokens, 5.0 GB: as requested"


def test_the_size_says_how_it_was_chosen() -> None:
    assert str(cache_size(None, 10_000, 100 * GB, is_cpu=True)) == (
        "999,936 tokens, 10.0 GB: from 100.0 GB of free memory"
    )
    assert "free memory is unknown" in str(cache_size(None, 1000, None, is_cpu=False))
    assert cache_size(None, 1000, None, is_cpu=False).tokens == USUAL


def test_free_memory_is_the_hosts_or_what_a_container_leaves(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    assert free_host_memory(tmp_path) is None

    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    1000 kB\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("700000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 300000\n")
    assert free_host_memory(tmp_path) == 1_024_000

    (group / "memory.max").write_text("1000000\n")
    assert free_host_memory(tmp_path) == 600_000
    assert free_host_memory() is not None


def test_a_process_holds_what_the_system_says(tmp_path: Path) -> None:
    before = process_memory()
    held = b"x" * 50_000_000
    after = process_memory()

    assert before is not None and after is not None
    assert 0.9 * len(held) < after - before < 2 * len(held)
    assert process_memory(tmp_path) is None
