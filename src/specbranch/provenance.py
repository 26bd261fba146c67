"""Where a result comes from: version, commit, CPU and its instruction sets, without the name of the host."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specbranch.version import __version__

_INSTRUCTION_SETS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
# What a CPU must name for each limit of oneDNN to be one: without it, this limit and none mean the same.
_LIMITS = {"AVX512_CORE_VNNI": "amx_int8", "AVX512_CORE": "avx512_vnni", "AVX2_VNNI": "avx_vnni", "AVX2": "avx2"}


def cache_bytes() -> int | None:
    """Size of the processor's last cache, where Linux tells it."""
    sizes = [_read(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    kib = [int(size[:-1]) for size in sizes if size[:-1].isdigit() and size.endswith("K")]
    return max(kib) * 1024 if kib else None


def provenance() -> dict[str, Any]:
    """Where the figures come from, without the name of the host."""
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
    """The commit that a checkout stands at, with `+` if it was changed since; None for an installed package."""
    try:
        command = ["git", "-C", str(directory), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit_note(source: Mapping[str, Any]) -> str | None:
    """What a reader must know of a result without a clean commit, from its provenance; None where it has one."""
    recorded = source.get("commit")
    if not recorded:
        return "No clean commit: the file does not say which code made it."
    if recorded.endswith("+"):
        return f"No clean commit: made by {recorded.removesuffix('+')} with changes that were not committed."
    return None


def cpu_name(cpuinfo: str) -> str | None:
    """The model name in the text of /proc/cpuinfo."""
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return names[0] if names else None


def instruction_sets(cpuinfo: str) -> list[str]:
    """Of the instruction sets that decide how fast a model runs, those in the text of /proc/cpuinfo."""
    lines = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("flags")]
    return [name for name in _INSTRUCTION_SETS if lines and name in lines[0]]


def onednn_limits(named: Sequence[str]) -> list[str]:
    """Values of ONEDNN_MAX_CPU_ISA that make a CPU with these instruction sets behave like others; ALL is no limit."""
    return ["ALL", *(limit for limit, needed in _LIMITS.items() if needed in named)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
