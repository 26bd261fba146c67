"""A sequence's digest: a chained hash of its tokens. Sessions are found by content and extended in O(new tokens)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Tokens = Sequence[int] | np.ndarray[Any, np.dtype[Any]]
DIGEST_LEN = 16


class Digest:
    """The running hash of a sequence. Both sides of the wire compute it; tokens are hashed as 32-bit little-endian."""

    def __init__(self, tokens: Tokens = ()) -> None:
        self._hash = hashlib.blake2b(as_bytes(tokens), digest_size=DIGEST_LEN)

    def extend(self, tokens: Sequence[int]) -> Digest:
        """The digest of a longer sequence; this one stays as it is."""
        longer = Digest.__new__(Digest)
        longer._hash = self._hash.copy()
        longer._hash.update(as_bytes(tokens))
        return longer

    def update(self, packed: bytes) -> None:
        """Take in more tokens, as bytes: this digest becomes that of the longer sequence."""
        self._hash.update(packed)

    @property
    def name(self) -> bytes:
        """Sixteen bytes that name the sequence."""
        return self._hash.digest()


def as_bytes(tokens: Tokens) -> bytes:
    """Tokens as they are hashed."""
    return np.asarray(tokens, dtype="<i4").tobytes()
