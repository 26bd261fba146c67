"""Allocate the cells of a draft's KV cache to handles, and choose the size of the cache.

A cell, or slot, stores the keys and values of one token. All handles share one range of cells. Opening a handle begins
a region; forks of the handle belong to the same region and share the cells of their common prefix. A cell is free when
no handle holds it. Engines allocate cells here before they compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from specbranch.engines.base import Row, check_length, check_rows
from specbranch.errors import EngineFull

SlotIds = NDArray[np.int64]
_NO_CELLS: SlotIds = np.empty(0, dtype=np.int64)
_LOOK = 64  # how many cells more than needed the first scan for free ones covers; each further scan doubles this
MOST = 1 << 20  # tokens, where memory allows: 64 sequences of 16,384
USUAL = 1 << 15  # tokens: one long sequence and some short ones; the size if free memory is unknown
_FEWEST = 4096  # tokens; a smaller cache is of no use
_GPU_SHARE = 0.75  # of the free memory; a step needs the rest for its own tensors
# A target on the same CPU uses nearly all of the rest: `serve` leaves a tenth of the memory to the draft's cache.
_CPU_SHARE = 0.1
_CPU_LIMIT = 0.25  # largest share, taken if a tenth cannot hold the usual cache


@dataclass(slots=True, eq=False)
class SlotRegion:
    """A range of cells for one opened handle and all its forks.

    Their cells are allocated upwards from `low`, so they lie close together until the next region is reached.
    """

    first: int  # where the range begins
    end: int  # one past the highest cell ever used in it
    low: int  # where to start looking for free cells


@dataclass(slots=True)
class _Held:
    """The cells that one handle holds, in the order of its tokens."""

    session: SlotRegion
    path: SlotIds


class SlotAllocator:
    """Assigns the cells of one cache to handles. Handles are small numbers, reused after they are closed."""

    def __init__(self, max_cells: int, max_handles: int) -> None:
        self.max_cells = max_cells
        self.num_used = 0  # cells that some handle holds; shared ones count once
        self._num_holders = np.zeros(max_cells, dtype=np.int32)
        self._free_handles = list(range(max_handles))  # sorted, so it is a heap
        self._held: dict[int, _Held] = {}

    @property
    def num_handles(self) -> int:
        """The number of open handles."""
        return len(self._held)

    def session(self, handle: int) -> SlotRegion:
        """Return the region of a handle's session: the range of cells that the handle shares with its forks."""
        return self._held[handle].session

    def path(self, handle: int) -> SlotIds:
        """Return the cells of a handle's tokens, in order."""
        return self._held[handle].path

    def are_held(self, cells: SlotIds) -> NDArray[np.bool_]:
        """Return for each cell whether some handle holds it."""
        return self._num_holders[cells] > 0

    def open(self) -> int:
        """Open a handle with no cells, for which a new region begins, and return it."""
        first = self._widest_room()
        return self._hold(_Held(SlotRegion(first, first, first), _NO_CELLS))

    def fork(self, handle: int, length: int) -> int:
        """Open a handle that shares the first `length` cells of another, and return it."""
        origin = self._held[handle]
        check_length(handle, len(origin.path), length)
        return self._hold(_Held(origin.session, origin.path[:length]))

    def truncate(self, handle: int, length: int) -> None:
        """Release all cells of a handle after the first `length`."""
        held = self._held[handle]
        check_length(handle, len(held.path), length)
        self._release(held.session, held.path[length:])
        held.path = held.path[:length]

    def close(self, handle: int) -> None:
        """Close a handle and release its cells; its forks keep the cells that they share with it."""
        self.truncate(handle, 0)
        del self._held[handle]
        heappush(self._free_handles, handle)

    def allocate(self, rows: Sequence[Row]) -> None:
        """Allocate cells for every row's tokens, or raise `EngineFull` and allocate none."""
        check_rows(rows)
        wanted, room = sum(len(row.tokens) for row in rows), self.max_cells - self.num_used
        if wanted > room:
            raise EngineFull(f"the cache has room for {room} more tokens, not {wanted}; close handles or truncate them")
        for row in rows:
            held = self._held[row.handle]
            held.path = np.concatenate((held.path, self._take(held.session, len(row.tokens))))

    def clear(self) -> None:
        """Close all handles."""
        for handle in list(self._held):
            self.close(handle)

    def _hold(self, held: _Held) -> int:
        if not self._free_handles:
            raise EngineFull(f"all {len(self._held)} handles are in use; close some")
        handle = heappop(self._free_handles)
        self._num_holders[held.path] += 1
        self._held[handle] = held
        return handle

    def _take(self, session: SlotRegion, count: int) -> SlotIds:
        """Mark the next `count` free cells of a region as used and return them; the caller checks that they exist."""
        found: list[SlotIds] = []
        start, missing, look = session.low, count, _LOOK
        while missing:
            stop, look = start + missing + look, 2 * look
            cells = (start + np.flatnonzero(self._num_holders[start:stop] == 0))[:missing]
            self._num_holders[cells] = 1
            found.append(cells)
            missing -= len(cells)
            start = stop if stop < self.max_cells else 0
        taken = np.concatenate(found)
        session.low = int(taken[-1]) + 1
        session.end = max(session.end, int(taken.max()) + 1)
        self.num_used += count
        return taken

    def _release(self, session: SlotRegion, cells: SlotIds) -> None:
        self._num_holders[cells] -= 1
        free = cells[self._num_holders[cells] == 0]
        if len(free):
            session.low = min(session.low, max(session.first, int(free.min())))
            self.num_used -= len(free)

    def _widest_room(self) -> int:
        """Return the first cell for a new region, chosen so that most cells follow before the next region begins.

        That is cell 0, or the middle of the gap after another region, which keeps the lower half to grow itself.
        """
        sessions = sorted({(held.session.first, held.session.end) for held in self._held.values()})
        firsts = [first for first, _ in sessions[1:]] + [self.max_cells]
        places = [(0, sessions[0][0] if sessions else self.max_cells)]
        for (_, end), following in zip(sessions, firsts, strict=False):
            start = (end + following + 1) // 2
            places.append((start, following - start))
        return max(places, key=lambda place: place[1])[0]


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of a cache in tokens, and the reason for it as a phrase."""

    tokens: int
    bytes_per_token: int
    reason: str

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, {self.tokens * self.bytes_per_token / 1e9:.1f} GB: {self.reason}"


def cache_size(
    asked: int | None, bytes_per_token: int, free_bytes: int | None, *, is_cpu: bool, most: int = MOST
) -> CacheSize:
    """Return the size of a cache: `asked` tokens or, if None, as many as suit `free_bytes` of memory (None: unknown).

    A size that was not asked for is at most `most` tokens, which is all that the engine or model can use.
    """
    if asked is not None:
        return CacheSize(asked, bytes_per_token, "as requested")
    if free_bytes is None:
        return CacheSize(min(USUAL, most), bytes_per_token, "the amount of free memory is unknown")
    fitting = cache_tokens(bytes_per_token, free_bytes, is_cpu=is_cpu)
    if fitting >= most:
        return CacheSize(most, bytes_per_token, "the engine's own maximum")
    return CacheSize(fitting, bytes_per_token, f"from {free_bytes / 1e9:.1f} GB of free memory")


def cache_tokens(bytes_per_token: int, free_bytes: int, *, is_cpu: bool) -> int:
    """Return how many tokens fit into the cache's share of the free memory: a multiple of 256, and at least 4096.

    The minimum holds even if it does not fit now: a cache that grows on demand can use memory that is freed later.
    """
    if is_cpu:
        tokens = max(_CPU_SHARE * free_bytes, min(_CPU_LIMIT * free_bytes, USUAL * bytes_per_token)) / bytes_per_token
    else:
        tokens = _GPU_SHARE * free_bytes / bytes_per_token
    return max(int(tokens) // 256 * 256, _FEWEST)
