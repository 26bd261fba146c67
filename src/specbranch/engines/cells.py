"""Book-keeping of a key-value cache: which handle holds which cells.

Forks share cells; a cell is free when no handle holds it. Engines use this to know their room before they compute; it
never touches a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from specbranch.engines.protocol import EngineFull, Row, require_length, require_rows

CellIds = NDArray[np.int32]
_NO_CELLS: CellIds = np.empty(0, dtype=np.int32)


class Cells:
    """The cells of one cache, and the handles into it. Handles are small numbers, used again after they are closed."""

    def __init__(self, max_cells: int, max_handles: int) -> None:
        self.max_cells = max_cells
        self._num_holders = np.zeros(max_cells, dtype=np.int32)
        self._free_cells = list(range(max_cells))
        self._free_handles = list(range(max_handles))
        heapify(self._free_handles)
        self._paths: dict[int, CellIds] = {}

    @property
    def num_used(self) -> int:
        """Cells that some handle holds."""
        return self.max_cells - len(self._free_cells)

    @property
    def num_handles(self) -> int:
        """Handles open now."""
        return len(self._paths)

    def path(self, handle: int) -> CellIds:
        """The cells of a handle's tokens, in order."""
        return self._paths[handle]

    def open(self) -> int:
        """A handle with no cells."""
        return self._hold(_NO_CELLS)

    def fork(self, handle: int, length: int) -> int:
        """A handle that shares the first `length` cells of another."""
        require_length(handle, len(self._paths[handle]), length)
        return self._hold(self._paths[handle][:length])

    def truncate(self, handle: int, length: int) -> None:
        """Let go of all cells behind the first `length`."""
        require_length(handle, len(self._paths[handle]), length)
        path = self._paths[handle]
        self._paths[handle] = path[:length]
        self._release(path[length:])

    def close(self, handle: int) -> None:
        """Let go of a handle and its cells."""
        self._release(self._paths.pop(handle))
        heappush(self._free_handles, handle)

    def extend(self, rows: Sequence[Row]) -> list[CellIds]:
        """New cells for every row's tokens; all rows or, if there is no room, none."""
        require_rows(rows)
        wanted = sum(len(row.tokens) for row in rows)
        if wanted > len(self._free_cells):
            raise EngineFull(f"the cache has room for {len(self._free_cells)} more tokens, not {wanted}")
        return [self._extend(row) for row in rows]

    def _extend(self, row: Row) -> CellIds:
        count = len(row.tokens)
        fresh: CellIds = np.array(self._free_cells[-count:], dtype=np.int32)
        del self._free_cells[-count:]
        self._num_holders[fresh] = 1
        self._paths[row.handle] = np.concatenate((self._paths[row.handle], fresh))
        return fresh

    def _hold(self, path: CellIds) -> int:
        if not self._free_handles:
            raise EngineFull(f"all {len(self._paths)} handles are in use")
        handle = heappop(self._free_handles)
        self._paths[handle] = path
        self._num_holders[path] += 1
        return handle

    def _release(self, path: CellIds) -> None:
        self._num_holders[path] -= 1
        self._free_cells += path[self._num_holders[path] == 0].tolist()
