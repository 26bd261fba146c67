"""Bookkeeping of a key-value cache: which handle holds which cells. Never touches a tensor.

A handle that is opened begins an arena of its own; its forks share the arena, and the cells of their common prefix. A
cell is free when no handle holds it. Engines ask here for room before they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from specbranch.engines.protocol import EngineFull, Row, require_length, require_rows

CellIds = NDArray[np.int64]
_NO_CELLS: CellIds = np.empty(0, dtype=np.int64)
_FIRST_LEN = 64  # cells of a new arena


def capacity_for(length: int) -> int:
    """The capacity of an arena that needs `length` cells: a power of two, so that it seldom has to grow."""
    return max(_FIRST_LEN, 1 << (length - 1).bit_length())


class Arena:
    """The cells of one handle and its forks, numbered from zero, and how many handles hold each.

    An engine that stores something per arena, such as tensors, does so in a subclass.
    """

    def __init__(self) -> None:
        self._num_holders = np.zeros(_FIRST_LEN, dtype=np.int32)
        self._free: list[int] = []  # a heap of cells that were used before
        self._num_touched = 0

    @property
    def num_used(self) -> int:
        """Cells that some handle holds."""
        return self._num_touched - len(self._free)

    def take(self, count: int) -> CellIds:
        """New cells with one holder, lowest first: attention runs over all cells up to the highest of a path."""
        reused = [heappop(self._free) for _ in range(min(count, len(self._free)))]
        fresh = range(self._num_touched, self._num_touched + count - len(reused))
        self._num_touched = fresh.stop
        if fresh.stop > len(self._num_holders):
            self._num_holders = np.pad(self._num_holders, (0, capacity_for(fresh.stop) - len(self._num_holders)))
        cells: CellIds = np.array([*reused, *fresh], dtype=np.int64)
        self._num_holders[cells] = 1
        return cells

    def hold(self, path: CellIds) -> None:
        """Count one more holder for every cell of a path."""
        self._num_holders[path] += 1

    def release(self, path: CellIds) -> None:
        """Count one holder less for every cell of a path; cells without a holder become free."""
        self._num_holders[path] -= 1
        for cell in path[self._num_holders[path] == 0].tolist():
            heappush(self._free, cell)


ArenaT = TypeVar("ArenaT", bound=Arena)


@dataclass(slots=True)
class _Held(Generic[ArenaT]):
    """What a handle holds: a path of cells through its arena."""

    arena: ArenaT
    path: CellIds


class Cells(Generic[ArenaT]):
    """The handles of one cache and the cells they hold. Handles are small numbers, reused after they are closed.

    `max_cells` limits all arenas together.
    """

    def __init__(self, max_cells: int, max_handles: int, new_arena: Callable[[], ArenaT]) -> None:
        self.max_cells = max_cells
        self._new_arena = new_arena
        self._free_handles = list(range(max_handles))  # sorted, so it is a heap
        self._held: dict[int, _Held[ArenaT]] = {}

    @property
    def num_used(self) -> int:
        """Cells that some handle holds; shared ones count once."""
        return sum(arena.num_used for arena in self.arenas())

    @property
    def num_handles(self) -> int:
        """Handles open now."""
        return len(self._held)

    def arenas(self) -> set[ArenaT]:
        """The arenas of all open handles."""
        return {held.arena for held in self._held.values()}

    def arena(self, handle: int) -> ArenaT:
        """The arena that a handle's cells are in."""
        return self._held[handle].arena

    def path(self, handle: int) -> CellIds:
        """The cells of a handle's tokens, in order."""
        return self._held[handle].path

    def open(self) -> int:
        """A handle with no cells, in a new arena."""
        return self._hold(_Held(self._new_arena(), _NO_CELLS))

    def fork(self, handle: int, length: int) -> int:
        """A handle that shares the first `length` cells of another."""
        origin = self._held[handle]
        require_length(handle, len(origin.path), length)
        return self._hold(_Held(origin.arena, origin.path[:length]))

    def truncate(self, handle: int, length: int) -> None:
        """Release all cells behind the first `length`."""
        held = self._held[handle]
        require_length(handle, len(held.path), length)
        held.arena.release(held.path[length:])
        held.path = held.path[:length]

    def close(self, handle: int) -> None:
        """Release a handle and its cells."""
        self.truncate(handle, 0)
        del self._held[handle]
        heappush(self._free_handles, handle)

    def extend(self, rows: Sequence[Row]) -> None:
        """Take new cells for every row's tokens: for all rows or, if there is no room, for none."""
        require_rows(rows)
        wanted, room = sum(len(row.tokens) for row in rows), self.max_cells - self.num_used
        if wanted > room:
            raise EngineFull(f"the cache has room for {room} more tokens, not {wanted}; close handles or truncate them")
        for row in rows:
            held = self._held[row.handle]
            held.path = np.concatenate((held.path, held.arena.take(len(row.tokens))))

    def clear(self) -> None:
        """Close all handles."""
        for handle in list(self._held):
            self.close(handle)

    def _hold(self, held: _Held[ArenaT]) -> int:
        if not self._free_handles:
            raise EngineFull(f"all {len(self._held)} handles are in use; close some")
        handle = heappop(self._free_handles)
        held.arena.hold(held.path)
        self._held[handle] = held
        return handle
