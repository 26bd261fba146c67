"""The instruction sets that oneDNN can be held to on this machine, so that one machine behaves like others."""

from __future__ import annotations

from pathlib import Path

from specbranch.bench.profile import instruction_sets

ALL = "ALL"  # what oneDNN calls no limit
# What a CPU must name for each limit to be one: without it, this limit and none mean the same.
_NEEDS = {"AVX512_CORE_VNNI": "amx_int8", "AVX512_CORE": "avx512_vnni", "AVX2_VNNI": "avx_vnni", "AVX2": "avx2"}


def limits() -> list[str]:
    """Values of ONEDNN_MAX_CPU_ISA, none of which is beyond this CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    named = instruction_sets(cpuinfo.read_text()) if cpuinfo.exists() else []
    return [ALL, *(limit for limit, needed in _NEEDS.items() if needed in named)]
