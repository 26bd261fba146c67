"""Keys and values of each session, and which part of a step goes to which of them.

A handle is a path of cells through its session's arena. A new token attends to exactly its own path, so forks share
the cells of their common prefix and copy nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbranch.engines.cells import Arena, CellIds, Cells, capacity_for
from specbranch.engines.extras import extra
from specbranch.engines.protocol import Row

with extra("torch"):
    import torch


class KeyValueArena(Arena):
    """Keys and values of one session, by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # each [1, kv_heads, capacity, head_dim]

    @property
    def num_bytes(self) -> int:
        """Memory of the keys and values."""
        return sum(store.nbytes for stores in self.layers.values() for store in stores)

    @property
    def bytes_per_cell(self) -> int:
        """Memory of one token's keys and values."""
        return self.num_bytes // int(next(iter(self.layers.values()))[0].shape[2])

    def write(self, layer: int, share: Share, new: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """Store one layer's new keys and values in their cells; all keys and values up to the share's span."""
        empty = (new[0][:, :, :0], new[1][:, :, :0])
        keys, values = (_grown(store, share.span) for store in self.layers.get(layer, empty))
        self.layers[layer] = keys, values
        for store, fresh in zip((keys, values), new, strict=True):
            store.index_copy_(2, share.cells, fresh)
        return [store[:, :, : share.span] for store in (keys, values)]


@dataclass(slots=True, kw_only=True)
class Share:
    """One arena's part of a step: tokens `start` to `stop` of the sequence."""

    arena: KeyValueArena
    rows: Sequence[Row]
    start: int
    stop: int
    cells: torch.Tensor  # [tokens], where the new keys and values go
    span: int  # cells that attention runs over
    mask: torch.Tensor | None  # [tokens, span], 0 or -inf; None for a whole sequence in the first cells, in order
    _repeated: torch.Tensor | None = None

    def mask_of(self, num_heads: int) -> torch.Tensor | None:
        """The mask repeated for several heads; every layer of a step asks for the same one."""
        if self._repeated is None and self.mask is not None:
            self._repeated = self.mask.repeat(num_heads, 1)
        return self._repeated


def shares_of(cells: Cells[KeyValueArena], rows: Sequence[Row], device: str, dtype: torch.dtype) -> list[Share]:
    """The shares of a step whose rows have their cells already. Rows of one arena come one after the other."""
    by_arena: dict[KeyValueArena, list[Row]] = {}
    for row in rows:
        by_arena.setdefault(cells.arena(row.handle), []).append(row)
    shares: list[Share] = []
    for arena, group in by_arena.items():
        start = shares[-1].stop if shares else 0
        paths = [cells.path(row.handle) for row in group]
        shares.append(_share(arena, group, paths, start, device, dtype))
    return shares


def _share(
    arena: KeyValueArena, rows: Sequence[Row], paths: Sequence[CellIds], start: int, device: str, dtype: torch.dtype
) -> Share:
    new_cells = np.concatenate([path[-len(row.tokens) :] for row, path in zip(rows, paths, strict=True)])
    span = 1 + max(int(path.max()) for path in paths)
    is_plain = len(rows) == 1 and np.array_equal(new_cells, np.arange(span))
    return Share(
        arena=arena,
        rows=rows,
        start=start,
        stop=start + len(new_cells),
        cells=tensor_of(new_cells, device),
        span=span,
        mask=None if is_plain else _mask(rows, paths, span, device, dtype),
    )


def _mask(rows: Sequence[Row], paths: Sequence[CellIds], span: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    # Added to the scores rather than boolean: every layer would have to convert a boolean mask to this one.
    blocks = [_visible(path, len(row.tokens), span) for row, path in zip(rows, paths, strict=True)]
    is_visible = tensor_of(np.concatenate(blocks), device)
    mask = torch.zeros(is_visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~is_visible, float("-inf"))


def _visible(path: CellIds, num_new: int, span: int) -> NDArray[np.bool_]:
    """The cells that the last tokens of a path attend to [num_new, span]: the path up to and including themselves."""
    is_visible = np.zeros((num_new, span), dtype=np.bool_)
    is_visible[:, path[:-num_new]] = True
    is_visible[:, path[-num_new:]] = np.tri(num_new, dtype=np.bool_)
    return is_visible


def _grown(store: torch.Tensor, length: int) -> torch.Tensor:
    """A store [1, heads, capacity, head_dim] that holds at least `length` cells."""
    if length <= store.shape[2]:
        return store
    # Zeros, not empty: a masked cell has weight 0, and 0 times a NaN left in memory would still be NaN.
    grown = store.new_zeros((*store.shape[:2], capacity_for(length), store.shape[3]))
    grown[:, :, : store.shape[2]] = store
    return grown


def tensor_of(array: NDArray[Any], device: str) -> torch.Tensor:
    """An array as a tensor on a device."""
    return torch.from_numpy(array).to(device)
