"""Reads the tokens of a GGUF file, and nothing else of it.

The `gguf` package reads all metadata one value at a time: 15 seconds for a vocabulary of 150,000 tokens on a slow core.
A file may be cut short or made to deceive; every length is checked against what is left of it.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from specbranch.engines.protocol import EngineError

_KEY = b"tokenizer.ggml.tokens"
_VERSIONS = (2, 3)
_MOST_PAIRS = 1 << 16
_MOST_ITEMS = 1 << 24
_STRING, _ARRAY = 8, 9
_FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by the number of a type
_HEAD = struct.Struct("<IQQ")  # version, tensors, pairs
_ITEMS = struct.Struct("<IQ")  # type and number of an array's items
_NUMBER = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def read_tokens(path: Path) -> list[str] | None:
    """The tokens by their ids; None if the file has none, or has a version that we do not know.

    Raises `EngineError` for a file that is not GGUF, is cut short, or contradicts itself.
    """
    try:
        with path.open("rb") as file:
            return _Metadata(path, file).tokens()
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error}; check the path and its rights") from error


class _Metadata:
    """The pairs of key and value at the beginning of a file, read one after the other."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._left = path.stat().st_size

    def tokens(self) -> list[str] | None:
        if self._take(4) != b"GGUF":
            raise self._broken("it does not begin like one")
        version, _, num_pairs = _HEAD.unpack(self._take(_HEAD.size))
        if version not in _VERSIONS:
            return None
        if num_pairs > _MOST_PAIRS:
            raise self._broken(f"it claims {num_pairs} metadata entries")
        for _ in range(num_pairs):
            key, kind = self._string(), self._number()
            if key == _KEY and kind == _ARRAY:
                return self._tokens()
            self._skip(kind)
        return None

    def _tokens(self) -> list[str]:
        kind, count = self._items()
        if kind != _STRING:
            raise self._broken("its tokens are no strings")
        tokens, read = [], self._file.read
        for _ in range(count):  # many and short: `_string` for each would take twice as long
            length = int.from_bytes(read(8), "little")
            self._count(8 + length)
            tokens.append(read(length).decode(errors="replace"))
        return tokens

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._pass(self._length())
        elif kind == _ARRAY:
            item, count = self._items()
            if item == _STRING:
                for _ in range(count):
                    self._pass(self._length())
            else:
                self._pass(count * self._size(item))
        else:
            self._pass(self._size(kind))

    def _items(self) -> tuple[int, int]:
        """Type and number of an array's items."""
        kind, count = _ITEMS.unpack(self._take(_ITEMS.size))
        if count > _MOST_ITEMS:
            raise self._broken(f"it claims an array of {count} items")
        return kind, count

    def _size(self, kind: int) -> int:
        if kind not in _FIXED:
            raise self._broken(f"it has a value of the unknown type {kind}")
        return _FIXED[kind]

    def _string(self) -> bytes:
        return self._take(self._length())

    def _length(self) -> int:
        length: int = _LENGTH.unpack(self._take(8))[0]
        return length

    def _number(self) -> int:
        number: int = _NUMBER.unpack(self._take(4))[0]
        return number

    def _take(self, length: int) -> bytes:
        self._count(length)
        data = self._file.read(length)
        if len(data) < length:  # it became shorter just now
            raise self._broken("it ends too early")
        return data

    def _pass(self, length: int) -> None:
        self._count(length)
        self._file.seek(length, 1)

    def _count(self, length: int) -> None:
        if length > self._left:
            raise self._broken("it ends too early")
        self._left -= length

    def _broken(self, why: str) -> EngineError:
        return EngineError(f"{self._path} is not a complete GGUF file: {why}; download it again")
