"""What this machine has: NUMA nodes with their cores and GPUs. Read from the system, without CUDA or torch."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_GPU_VENDORS = ("0x10de", "0x1002", "0x8086")  # Nvidia, AMD, Intel: not the graphics of a server's own board
_GPU_CLASSES = ("0x03", "0x12")  # display or 3D controller, accelerator
_LIST_S = 20.0  # the longest time that listing the GPUs may take


@dataclass(frozen=True, slots=True)
class Topology:
    """The cores of each NUMA node, and how many GPUs are attached to it."""

    cores: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    gpus: Mapping[int, int] = field(default_factory=dict)


def read_topology(system: Path = Path("/sys")) -> Topology:
    """The topology of this machine; empty where the system does not tell."""
    cores = {}
    for file in system.glob("devices/system/node/node*/cpulist"):
        numbers = parse_cores(_text(file))
        if numbers:  # some nodes are memory only
            cores[int(file.parent.name.removeprefix("node"))] = numbers
    gpus: Counter[int] = Counter()
    for device in system.glob("bus/pci/devices/*"):
        node = _text(device / "numa_node")
        is_gpu = _text(device / "vendor") in _GPU_VENDORS and _text(device / "class").startswith(_GPU_CLASSES)
        if is_gpu and node.isdecimal():  # it is -1 where no node is nearer than the others
            gpus[int(node)] += 1
    return Topology(cores, gpus)


def parse_cores(text: str) -> tuple[int, ...]:
    """The cores of a list such as 0-3,8."""
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def num_gpus() -> int:
    """How many GPUs programs see here, by Nvidia's own tool or else by the bus, and by CUDA_VISIBLE_DEVICES."""
    return visible_gpus(_list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(num_installed: int, visible: str | None) -> int:
    """How many of the GPUs a value of CUDA_VISIBLE_DEVICES leaves; CUDA stops at the first one that is not there."""
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


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
