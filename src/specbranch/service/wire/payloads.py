"""Digests that name sequences, and probabilities packed for the wire.

A token that was not drawn by chance has none. A byte a token for the number of ids, then all ids, then all
probabilities; four bytes each, little end first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from specbranch.core.distribution import Distribution

Tokens = Sequence[int] | np.ndarray[Any, np.dtype[Any]]
DIGEST_LEN = 16
MOST = 255  # ids of one distribution
DrawnFrom = Sequence[Distribution | None]


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


def pack_probs(sampled_from: DrawnFrom) -> bytes:
    """The distributions of a draft; nothing if none of its tokens was drawn."""
    if not any(sampled_from):
        return b""
    ids: list[int] = []
    probs: list[float] = []
    for one in sampled_from:
        ids += one.ids[:MOST] if one else ()
        probs += map(float, one.probs[:MOST] if one else ())
    counts = bytes(min(len(one.ids), MOST) if one else 0 for one in sampled_from)
    return counts + np.asarray(ids, "<i4").tobytes() + np.asarray(probs, "<f4").tobytes()


def unpack_probs(packed: bytes, num_tokens: int) -> list[Distribution | None]:
    """The distributions of a draft of so many tokens; `ValueError` if these bytes are none."""
    if not packed:
        return [None] * num_tokens
    counts = packed[:num_tokens]
    total = sum(counts)
    if len(packed) != num_tokens + 8 * total:
        raise ValueError(f"{len(packed)} bytes for {total} probabilities of {num_tokens} tokens")
    ids = np.frombuffer(packed, "<i4", total, num_tokens)
    probs = np.frombuffer(packed, "<f4", total, num_tokens + 4 * total)
    if total and (ids.min() < 0 or not (probs.min() > 0 and probs.max() <= 1)):
        raise ValueError("not the probabilities of tokens")
    found: list[Distribution | None] = []
    start = 0
    for count in counts:
        part = slice(start, start + count)
        one = Distribution(tuple(ids[part].tolist()), tuple(probs[part].tolist()), 0.0) if count else None
        if one and len(set(one.ids)) < count:
            raise ValueError("a token twice in one distribution")
        found.append(one)
        start += count
    return found
