"""Files and directories that only this user may touch.

The default one is this user's alone. One that was chosen by name may be seen by others, but changed only by its owner
and its group.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal

from specbranch.errors import SpecBranchError


class DirectoryError(SpecBranchError, RuntimeError):
    """A directory that others could misuse; the message says why and what would help."""


def runtime_directory() -> Path:
    """The default directory of this user."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/specbranch-{os.getuid()}")


def ensure_runtime_directory() -> Path:
    """The default directory, made if it is not there yet; raises unless it is this user's alone."""
    directory = runtime_directory()
    advice = "or set XDG_RUNTIME_DIR to a directory of your own, or choose an address"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        flaw = _flaw(directory)
    except OSError as error:
        raise DirectoryError(f"{directory} cannot be made: {error}; make it, {advice}") from error
    if flaw is not None:
        raise DirectoryError(f"{directory} {flaw}; remove it, give it to you alone (chmod 700), {advice}")
    return directory


def is_private(directory: Path) -> bool:
    """Whether a directory is there and is this user's alone."""
    try:
        return _flaw(directory) is None
    except OSError:
        return False


def can_hold_sockets(path: Path) -> bool:
    """Whether the directory of a socket is there; raises if somebody else could have put the socket into it.

    In a directory for all, such as /tmp, nobody can replace the file of another, so there the file's owner counts.
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
    """Why a directory is not this user's alone; None if it is."""
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
    """Open a file to write to; one that is there already keeps its rights."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))
