"""Memory of this host: how much there is, and how much of it this process takes and may still take."""

from __future__ import annotations

import os
from pathlib import Path


def host_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that the host has; None where the system does not tell."""
    return _meminfo(root, "MemTotal")


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without harm, by the system and by a container's limit; None if neither tells."""
    known = [free for free in (_meminfo(root, "MemAvailable"), _left_in_container(root)) if free is not None]
    return min(known) if known else None


def process_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process holds; None where the system does not tell."""
    try:
        pages = (root / "proc/self/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _meminfo(root: Path, name: str) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {key: rest for key, _, rest in (line.partition(":") for line in lines)}
    return 1024 * int(sizes[name].split()[0]) if name in sizes else None


def _left_in_container(root: Path) -> int | None:
    """What the limit of a container (cgroup v2) leaves; the page cache counts as free."""
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(int(limit) - used + _reclaimable(stats), 0)


def _reclaimable(stats: dict[str, str]) -> int:
    """What the kernel gives back when memory is needed."""
    return sum(int(stats.get(name, 0)) for name in ("inactive_file", "active_file", "slab_reclaimable"))
