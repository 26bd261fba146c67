"""Query the machine: memory, NUMA nodes, GPUs, CPU features, and the provenance of a result.

A parameter `root` is the directory below which /proc and /sys are read; tests pass another directory.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from specbranch.version import __version__

_INSTRUCTION_SETS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
# The instruction set that makes each limit of oneDNN effective: on a CPU without it, the limit changes nothing.
_LIMITS = {"AVX512_CORE_VNNI": "amx_int8", "AVX512_CORE": "avx512_vnni", "AVX2_VNNI": "avx_vnni", "AVX2": "avx2"}
_GPU_VENDORS = ("0x10de", "0x1002", "0x8086")  # Nvidia, AMD, Intel: not the graphics of a server's own board
_GPU_CLASSES = ("0x03", "0x12")  # display or 3D controller, accelerator
_LIST_S = 20.0  # how long listing the GPUs may take


def host_memory(root: Path = Path("/")) -> int | None:
    """Return the host's memory in bytes; None if the system does not report it."""
    return _meminfo(root, "MemTotal")


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that are free, within a container's limit if there is one; None if unknown."""
    known = [free for free in (_meminfo(root, "MemAvailable"), _left_in_container(root)) if free is not None]
    return min(known) if known else None


def process_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of main memory that this process occupies; None if the system does not report it."""
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
    """Return the bytes of memory that a container's limit (cgroup v2) leaves, counting the page cache as free.

    Returns None if there is no limit, or if it cannot be read.
    """
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(int(limit) - used + _reclaimable(stats), 0)


def _reclaimable(stats: dict[str, str]) -> int:
    """Return the bytes that the kernel can free when memory is needed, from the entries of `memory.stat`."""
    return sum(int(stats.get(name, 0)) for name in ("inactive_file", "active_file", "slab_reclaimable"))


def cache_bytes() -> int | None:
    """Return the bytes of the processor's last-level cache; None if Linux does not report them."""
    sizes = [_read(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    kib = [int(size[:-1]) for size in sizes if size[:-1].isdigit() and size.endswith("K")]
    return max(kib) * 1024 if kib else None


def provenance() -> dict[str, Any]:
    """Return the versions and hardware that a result depends on, without the host's name."""
    cpuinfo = _read(Path("/proc/cpuinfo"))
    return {
        "version": __version__,
        "commit": commit(Path(__file__).parent),
        "cpu": cpu_name(cpuinfo),
        "instruction_sets": instruction_sets(cpuinfo),
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "num_cores": os.cpu_count(),
        "cache_bytes": cache_bytes(),
        "numpy": np.__version__,
    }


def commit(directory: Path) -> str | None:
    """Return the git commit of a directory, with `+` if there are uncommitted changes; None if it is in no checkout."""
    try:
        command = ["git", "-C", str(directory), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit_note(source: Mapping[str, Any]) -> str | None:
    """Return a note for readers of a result whose provenance, `source`, has no clean commit; None if it has one."""
    recorded = source.get("commit")
    if not recorded:
        return "No clean commit: the file does not say which code made it."
    if recorded.endswith("+"):
        return f"No clean commit: made by {recorded.removesuffix('+')} with changes that were not committed."
    return None


def cpu_name(cpuinfo: str) -> str | None:
    """Return the CPU's model name in the text of /proc/cpuinfo; None if it has none."""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return names[0] if names else None


def instruction_sets(cpuinfo: str) -> list[str]:
    """Return the instruction sets in the text of /proc/cpuinfo, but only those that matter for speed."""
    lines = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("flags")]
    return [name for name in _INSTRUCTION_SETS if lines and name in lines[0]]


def onednn_limits(named: Sequence[str]) -> list[str]:
    """Return the values of ONEDNN_MAX_CPU_ISA that have an effect on a CPU with the instruction sets `named`.

    The first is ALL, which sets no limit. With another value, oneDNN uses fewer instruction sets than the CPU has.
    """
    return ["ALL", *(limit for limit, needed in _LIMITS.items() if needed in named)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Topology:
    """The cores of each NUMA node, and the number of GPUs attached to each node, by node number."""

    cores: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    gpus: Mapping[int, int] = field(default_factory=dict)


def read_topology(system: Path = Path("/sys")) -> Topology:
    """Return this machine's topology, read from `system`; it is empty if the system does not report it."""
    cores = {}
    for file in system.glob("devices/system/node/node*/cpulist"):
        numbers = parse_cores(_read(file))
        if numbers:  # some nodes are memory only
            cores[int(file.parent.name.removeprefix("node"))] = numbers
    gpus: Counter[int] = Counter()
    for device in system.glob("bus/pci/devices/*"):
        node = _read(device / "numa_node")
        is_gpu = _read(device / "vendor") in _GPU_VENDORS and _read(device / "class").startswith(_GPU_CLASSES)
        if is_gpu and node.isdecimal():  # it is -1 if no node is nearer than the others
            gpus[int(node)] += 1
    return Topology(cores, gpus)


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse a list of cores in the format of Linux, such as 0-3,8, and return the core numbers."""
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def num_gpus() -> int:
    """Return the number of GPUs of this machine that CUDA_VISIBLE_DEVICES allows.

    The GPUs are those that nvidia-smi lists or, if it cannot be run, those on the PCI bus.
    """
    return visible_gpus(_list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(num_installed: int, visible: str | None) -> int:
    """Return how many of the installed GPUs a value of CUDA_VISIBLE_DEVICES allows; None means that it is not set.

    CUDA ignores all entries from the first invalid one on.
    """
    if visible is None or not num_installed:
        return num_installed
    count = 0
    for name in (part.strip() for part in visible.split(",")):
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdecimal() and int(name) < num_installed):
            break
        count += 1
    return count


@cache
def _list_gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_LIST_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return sum(read_topology().gpus.values())
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
