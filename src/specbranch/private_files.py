"""Create and check files and directories that other users must not change.

Only this user may access the default directory. A directory that the user names may be readable by others, but only its
owner and group may write to it, unless it has the sticky bit, as /tmp does: users then cannot replace others' files.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal

from specbranch.errors import SpecBranchError


class DirectoryError(SpecBranchError, RuntimeError):
    """A directory cannot be created, or other users could misuse it; the message names the cause and a remedy."""


def runtime_directory() -> Path:
    """Return the default directory of this user's sockets and statistics, without creating it."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/specbranch-{os.getuid()}")


def ensure_runtime_directory() -> Path:
    """Create the default directory if needed and return it.

    Raises `DirectoryError` if it cannot be created, or if other users can access it.
    """
    directory = runtime_directory()
    advice = "or set XDG_RUNTIME_DIR to a directory of your own, or choose an address"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        flaw = _flaw(directory)
    except OSError as error:
        raise DirectoryError(f"{directory} cannot be created: {error}; create it, {advice}") from error
    if flaw is not None:
        raise DirectoryError(f"{directory} {flaw}; remove it, or restrict it to yourself (chmod 700), {advice}")
    return directory


def is_private(directory: Path) -> bool:
    """Return whether a directory exists and only this user can access it."""
    try:
        return _flaw(directory) is None
    except OSError:
        return False


def can_hold_sockets(path: Path) -> bool:
    """Return whether the directory of the socket `path` exists; create it first if it is the default directory.

    Raises `DirectoryError` if another user could have made the socket. In a directory with the sticky bit, such as
    /tmp, users cannot replace each other's files, so a socket that belongs to this user or to root is accepted.
    """
    if path.parent == runtime_directory():
        ensure_runtime_directory()
        return True
    try:
        found = path.parent.stat()
    except OSError:
        return False
    _require_trusted(path.parent, found)
    if not found.st_mode & stat.S_IWOTH:
        return True
    if not found.st_mode & stat.S_ISVTX:
        raise DirectoryError(
            f"anybody can replace files in {path.parent}; choose one that others cannot write to, such as "
            f"ipc://{path.parent}/specbranch/{path.name}, which the service makes for its owner only"
        )
    if path.exists():
        _require_trusted(path, path.lstat())
    return True


def _flaw(directory: Path) -> str | None:
    """Return a phrase that says why other users can access a directory; None if they cannot."""
    found = directory.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if found.st_uid != os.getuid():
        return f"belongs to user {found.st_uid}"
    if found.st_mode & 0o077:
        return f"can be reached by others (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _require_trusted(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.getuid()):
        raise DirectoryError(
            f"{path} belongs to user {found.st_uid}, who could read all prompts; choose an address in a directory of "
            "your own, or run both sides as one user"
        )


def open_private(path: Path, mode: Literal["ab", "xb"]) -> BinaryIO:
    """Open a file for writing and return it; only this user can read a new file, an old one keeps its permissions."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))
