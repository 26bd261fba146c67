"""The file of a Unix socket that this process listens at. Two threads use it."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


class SocketFile:
    """Known by its inode: what others put at the same path is never touched.

    While it is hidden nobody new can connect; who is connected already stays.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hidden = path.with_name(f".{path.name}.{os.getpid()}")
        self._identity = _identity(path)
        self._is_hidden = False
        self._lock = threading.Lock()

    @property
    def is_ours(self) -> bool:
        """Whether it is still there, seen or hidden."""
        with self._lock:
            return self._is_there()

    def replace(self, file: SocketFile) -> None:
        """The file was lost; this is the new one at the same path."""
        with self._lock:
            self._identity, self._is_hidden = file._identity, False

    def hide(self) -> bool:
        """Let nobody new connect; False if that is so already, or if the file is not ours."""
        with self._lock:
            return not self._is_hidden and self._move(self._path, self._hidden)

    def show(self) -> bool:
        """Let others connect again; False if they could all the time."""
        with self._lock:
            return self._is_hidden and self._move(self._hidden, self._path)

    def remove(self) -> None:
        """Delete it, if it is still ours."""
        with self._lock:
            if self._is_there():
                self._where.unlink(missing_ok=True)

    @property
    def _where(self) -> Path:
        return self._hidden if self._is_hidden else self._path

    def _is_there(self) -> bool:
        return _identity(self._where) == self._identity

    def _move(self, source: Path, target: Path) -> bool:
        if not self._is_there():
            return False
        with contextlib.suppress(OSError):
            if self._is_hidden:
                os.link(source, target)  # fails, unlike a rename, if somebody else has put one there meanwhile
                source.unlink()
            else:
                source.rename(target)
            self._is_hidden = not self._is_hidden
            return True
        return False


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
