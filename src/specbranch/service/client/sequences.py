"""What a client knows of each sequence: what the service was sent, and drafts that were pushed ahead.

A sequence of an engine only grows. Whoever remembers how far it was told, and its digest up to there, hashes and sends
new tokens only; and where the engine went on without asking, the service still hears all of it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specbranch.service.wire.messages import MAX_NEW, PrefetchPush, VerdictDraft
from specbranch.service.wire.payloads import Digest

_MOST = 4096  # sequences; an engine runs fewer at once, and never says that one has ended
_TAIL = 8  # tokens that must still be the same, in case an engine uses a name twice

TokenArray = np.ndarray[Any, np.dtype[Any]]
_MAX_OUTCOMES = 1024  # sequences


class SequenceDelta(NamedTuple):
    """The name of a sequence as it was told, the tokens since, and its name with them."""

    before: bytes
    new: list[int]
    after: bytes


class SyncedSequences:
    """Length, digest, last tokens and seed of what was told, by name. The least recently used make way."""

    def __init__(self) -> None:
        self._synced: OrderedDict[str, tuple[int, Digest, bytes, int]] = OrderedDict()

    def advance(self, name: str | None, tokens: TokenArray, num_new: int) -> SequenceDelta:
        """How a sequence has grown since it was told; all of it is told now."""
        before, new = self.unsent(name, tokens, num_new)
        after = before.extend(new)
        self.mark_synced(name, tokens, after)
        return SequenceDelta(before.name, new, after.name)

    def unsent(self, name: str | None, tokens: TokenArray, num_new: int) -> tuple[Digest, list[int]]:
        """The digest of what was told of a sequence, and the tokens since.

        Of a sequence that is not known by this name, or has gained more than a message may have, everything but the
        `num_new` last tokens counts as told.
        """
        known = self._synced.get(name) if name is not None else None
        if known is not None:
            length, digest, tail, _ = known
            if 0 < len(tokens) - length <= MAX_NEW and _tail(tokens[:length]) == tail:
                return digest, tokens[length:].tolist()
        border = len(tokens) - num_new
        return Digest(tokens[:border]), tokens[border:].tolist()

    def mark_synced(self, name: str | None, tokens: TokenArray, digest: Digest) -> None:
        """All these tokens are told now; this is their digest."""
        if name is None:
            return
        known = self._synced.get(name)
        seed = (
            known[3] if known is not None and known[0] <= len(tokens) else int.from_bytes(os.urandom(8), "little") >> 2
        )
        self._synced[name] = (len(tokens), digest, _tail(tokens), seed)
        self._synced.move_to_end(name)
        if len(self._synced) > _MOST:
            self._synced.popitem(last=False)

    def seed_of(self, name: str | None) -> int:
        """A random number that belongs to a sequence that was noted."""
        known = self._synced.get(name) if name is not None else None
        return known[3] if known is not None else 0


def _tail(tokens: TokenArray) -> bytes:
    return tokens[-_TAIL:].tobytes()


class PrefetchedDrafts:
    """By name of a sequence: what was told last. Answers are taken once; the oldest make way."""

    def __init__(self) -> None:
        self._synced: OrderedDict[bytes, dict[tuple[int, ...], VerdictDraft]] = OrderedDict()

    def store(self, ahead: PrefetchPush) -> None:
        """Take in what the service tells."""
        for row in ahead.rows:
            self._synced[row.before] = {tuple(outcome.committed): outcome for outcome in row.outcomes}
            self._synced.move_to_end(row.before)
            if len(self._synced) > _MAX_OUTCOMES:
                self._synced.popitem(last=False)

    def pop(self, before: bytes, committed: Sequence[int]) -> VerdictDraft | None:
        """What to submit now that these tokens were committed; None if nobody has said."""
        return self._synced.pop(before, {}).get(tuple(committed))

    def clear(self) -> None:
        """Forget all: another service may answer from now on."""
        self._synced.clear()
