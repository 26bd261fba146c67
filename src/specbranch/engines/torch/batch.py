"""The rows of a step as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbranch.engines.cells import CellIds, Cells, Session
from specbranch.engines.protocol import Row


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of one row, `start` to `stop` of the step's, and the slots of its whole sequence up to them."""

    session: Session
    start: int
    stop: int
    path: CellIds

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Batch:
    """All tokens of a step. The rows of a session come one after the other."""

    pieces: Sequence[Piece]
    tokens: NDArray[np.int64]  # [tokens]
    positions: NDArray[np.int64]  # [tokens], in their sequences
    slots: NDArray[np.int64]  # [tokens], where their keys and values go
    outputs: NDArray[np.int64]  # [outputs], the tokens behind which distributions are asked for, in the rows' order

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(piece.path) for piece in self.pieces)


def batch_of(cells: Cells, rows: Sequence[Row]) -> Batch:
    """The batch of rows that have their cells already."""
    by_session: dict[Session, list[int]] = {}
    for index, row in enumerate(rows):
        by_session.setdefault(cells.session(row.handle), []).append(index)
    pieces: list[Piece] = []
    tokens: list[int] = []
    outputs: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(rows)
    for session, indices in by_session.items():
        for index in indices:
            row, start = rows[index], len(tokens)
            tokens += row.tokens
            pieces.append(Piece(session, start, len(tokens), cells.path(row.handle)))
            outputs[index] = np.arange(len(tokens) - row.num_outputs, len(tokens))
    return Batch(
        pieces,
        np.array(tokens, dtype=np.int64),
        np.concatenate([np.arange(len(piece.path) - piece.num_tokens, len(piece.path)) for piece in pieces]),
        np.concatenate([piece.path[-piece.num_tokens :] for piece in pieces]),
        np.concatenate(outputs),
    )
