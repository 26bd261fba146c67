"""Who holds the beginning of a sequence: the next turn of a chat, another sample of a prompt, a common system message.

Sequences are marked at every sixteenth token by the digest of all tokens up to there. What another session's cache
already holds need not be prefilled again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from specbranch.service.digest import Digest, as_bytes

MARK_LEN = 16

T = TypeVar("T")
Key = tuple[bytes, bytes]  # namespace, digest


class Marks:
    """The marks of one growing sequence."""

    def __init__(self) -> None:
        self._digest = Digest()
        self._length = 0

    def extend(self, tokens: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Length and digest of every mark passed since the last call; `tokens` is the whole sequence."""
        num_marks = (len(tokens) - self._length) // MARK_LEN
        packed = as_bytes(tokens[self._length : self._length + num_marks * MARK_LEN])
        mark_size = len(packed) // max(num_marks, 1)
        for start in range(0, len(packed), mark_size or 1):
            self._digest.update(packed[start : start + mark_size])
            self._length += MARK_LEN
            yield self._length, self._digest.name


class Prefixes(Generic[T]):
    """The latest holder of each beginning. Grows by one entry for sixteen tokens of a holder's sequence."""

    def __init__(self) -> None:
        self._holders: dict[Key, T] = {}
        self._marks: dict[T, tuple[Marks, list[Key]]] = {}

    def add(self, holder: T, namespace: bytes, tokens: Sequence[int]) -> tuple[T, int] | None:
        """Let a holder be found by its sequence, or by what its sequence has become.

        Returns who held most of the beginning of what is new in it, as `find` would.
        """
        marks, keys = self._marks.setdefault(holder, (Marks(), []))
        found = None
        for length, name in marks.extend(tokens):
            before = self._holders.get((namespace, name))
            if before is not None and length < len(tokens):
                found = (before, length)
            self._holders[namespace, name] = holder
            keys.append((namespace, name))
        return found

    def remove(self, holder: T) -> None:
        """Forget a holder."""
        _, keys = self._marks.pop(holder, (None, []))
        for key in keys:
            if self._holders.get(key) is holder:
                del self._holders[key]

    def find(self, namespace: bytes, tokens: Sequence[int]) -> tuple[T, int] | None:
        """Who holds most of the beginning of a sequence, and how many of its tokens; never all of them."""
        found = None
        for length, name in Marks().extend(tokens[:-1]):
            holder = self._holders.get((namespace, name))
            if holder is not None:
                found = (holder, length)
        return found
