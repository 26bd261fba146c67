"""The disk of a simulated world: one trace file, and no more room on it whenever the world wants it so."""

from __future__ import annotations

import errno
import io
from typing import Any


class Disk:
    """A file in memory that outlives the service."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.is_full = False

    def open(self) -> io.BufferedWriter:
        """To append to."""
        return io.BufferedWriter(_File(self))


class _File(io.RawIOBase):
    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = bytes(data)
        if self._disk.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._disk.content += taken
        return len(taken)

    def truncate(self, size: int | None = None) -> int:
        assert size is not None
        del self._disk.content[size:]
        return size
