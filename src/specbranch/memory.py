"""Memory of this host, as far as this process may use it."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def host_bytes() -> int | None:
    """All memory of the host; None where the system does not tell."""
    return _meminfo("MemTotal")


def total_bytes() -> int | None:
    """All memory that this process may use; None where the system does not tell."""
    return _least(host_bytes(), _number(_CGROUP / "memory.max"))


def free_bytes() -> int | None:
    """Memory that could be used now without swapping; None where the system does not tell."""
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    left = max(0, limit - used) if limit is not None and used is not None else None
    return _least(_meminfo("MemAvailable"), left)


def _least(*sizes: int | None) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def _meminfo(name: str) -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, rest = line.partition(":")
        if key == name:
            return 1024 * int(rest.split()[0])
    return None


def _number(path: Path) -> int | None:
    """The number in a file of a control group; None if there is no such limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
