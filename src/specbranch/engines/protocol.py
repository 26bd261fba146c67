"""What a draft engine can do. A handle is one sequence in its cache; handles share what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specbranch.core.law import Law


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a caller must know of an engine."""

    model: str
    device: str
    vocab_len: int
    row_limit: int  # rows in one step


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens to feed to one handle. The law comes back for the place behind the last of them."""

    handle: int
    tokens: tuple[int, ...]


class DraftEngine(Protocol):
    """A model that turns rows into laws, many rows at a time."""

    @property
    def info(self) -> EngineInfo:
        """Model, device and limits."""
        ...

    def open(self) -> int:
        """A new handle with no tokens."""
        ...

    def fork(self, handle: int, length: int) -> int:
        """A new handle that begins with the first `length` tokens of another. The cache is shared, not copied."""
        ...

    def truncate(self, handle: int, length: int) -> None:
        """Forget all tokens behind the first `length`."""
        ...

    def close(self, handle: int) -> None:
        """Forget a handle."""
        ...

    def run(self, rows: Sequence[Row]) -> list[Law]:
        """Feed every row, at most one per handle, in one batch."""
        ...
