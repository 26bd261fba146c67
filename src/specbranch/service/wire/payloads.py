"""Digests that identify sequences, and probabilities packed for the wire.

The distributions of a draft are packed as one byte per token with its number of ids, 0 for a token that was not
sampled, then all ids, then all probabilities, four bytes each, little-endian.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from specbranch.core.distribution import Distribution

Tokens = Sequence[int] | np.ndarray[Any, np.dtype[Any]]
DIGEST_LEN = 16
MAX_PACKED_IDS = 255  # of one distribution
DrawnFrom = Sequence[Distribution | None]


class Digest:
    """The running hash of a sequence's tokens, by which client and service identify the sequence."""

    def __init__(self, tokens: Tokens = ()) -> None:
        self._hash = hashlib.blake2b(as_bytes(tokens), digest_size=DIGEST_LEN)

    def extend(self, tokens: Sequence[int]) -> Digest:
        """Return the digest of the sequence with more tokens; leave this one unchanged."""
        longer = Digest.__new__(Digest)
        longer._hash = self._hash.copy()
        longer._hash.update(as_bytes(tokens))
        return longer

    def update(self, packed: bytes) -> None:
        """Add more tokens, 32-bit little-endian bytes, to the sequence of this digest."""
        self._hash.update(packed)

    @property
    def name(self) -> bytes:
        """The hash of all tokens so far, sixteen bytes; it changes when tokens are added."""
        return self._hash.digest()


def as_bytes(tokens: Tokens) -> bytes:
    """Return tokens as 32-bit little-endian bytes."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def pack_probs(sampled_from: DrawnFrom) -> bytes:
    """Return the distributions of a draft as packed bytes; b"" if none of its tokens was sampled."""
    if not any(sampled_from):
        return b""
    ids: list[int] = []
    probs: list[float] = []
    for one in sampled_from:
        ids += one.ids[:MAX_PACKED_IDS] if one else ()
        probs += map(float, one.probs[:MAX_PACKED_IDS] if one else ())
    counts = bytes(min(len(one.ids), MAX_PACKED_IDS) if one else 0 for one in sampled_from)
    return counts + np.asarray(ids, "<i4").tobytes() + np.asarray(probs, "<f4").tobytes()


def unpack_probs(packed: bytes, num_tokens: int) -> list[Distribution | None]:
    """Return the distributions of a draft of `num_tokens` tokens; raise `ValueError` for malformed bytes."""
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
