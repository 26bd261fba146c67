"""What a draft engine can do. A handle is one sequence in its cache; handles share what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specbranch.core.distribution import Distribution


class EngineError(RuntimeError):
    """An engine cannot do what was asked; the message says why and what would help."""


class EngineFull(EngineError):
    """No room for another handle or for more tokens. Nothing was changed; close something and try again."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a caller must know of an engine."""

    model: str
    device: str
    vocab_len: int
    row_limit: int  # rows in one step
    max_handles: int  # handles open at once
    max_tokens: int  # tokens in the cache, shared ones counted once
    rest_tokens: int = 1 << 30  # of sessions at rest that may stay there without slowing down the others
    dtype: str = ""  # of the weights, where the engine chose or was told one
    weight_bytes: int | None = None  # of the model: what one step must at least read; None if the engine does not know


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens to feed to one handle, at least one. The distribution comes back for the place behind the last of them."""

    handle: int
    tokens: tuple[int, ...]


def require_rows(rows: Sequence[Row]) -> None:
    """What every engine asks of a step: at most one row per handle, and a token in each."""
    if len({row.handle for row in rows}) < len(rows):
        raise ValueError("one step takes at most one row per handle")
    if not all(row.tokens for row in rows):
        raise ValueError("a row needs at least one token")


def require_length(handle: int, held: int, length: int) -> None:
    """What every engine asks of a fork or a truncation: a place that the handle, with `held` tokens, has."""
    if not 0 <= length <= held:
        raise ValueError(f"handle {handle} holds {held} tokens, not {length}")


class DraftEngine(Protocol):
    """A model that turns rows into distributions, many rows at a time. One thread at a time may use it."""

    @property
    def info(self) -> EngineInfo:
        """Model, device and limits."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache now, shared ones counted once."""
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

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        """Feed every row, at most one per handle, in one batch."""
        ...

    def shutdown(self) -> None:
        """Give memory and devices back. The engine is of no use afterwards."""
        ...
