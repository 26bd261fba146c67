"""Which cores the target and the draft use when both live on the same processor."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores of the target and of the draft; None means that nothing is pinned."""

    target: tuple[int, ...] | None
    draft: tuple[int, ...] | None


def usable_cores() -> list[int]:
    """The cores of this process, one of each pair of hyperthreads: compute gains nothing from the second."""
    allowed = sorted(os.sched_getaffinity(0))
    return without_siblings({core: _physical(core) for core in allowed})


def without_siblings(physical: Mapping[int, str]) -> list[int]:
    """One core of each physical one; all of them where there is only one physical core."""
    first = {name: core for core, name in sorted(physical.items(), reverse=True)}
    return sorted(first.values()) if len(first) > 1 else sorted(physical)


def split(
    cores: Sequence[int],
    *,
    target_on_cpu: bool,
    draft_on_cpu: bool,
    target: Sequence[int] | None = None,
    draft: Sequence[int] | None = None,
) -> Cores:
    """Which side gets which of `cores`; what `target` and `draft` ask for is respected.

    Side by side, the draft gets half of the cores, and whoever asked for nothing gets what the other left. Beside
    a target on a GPU, whose own processes are not pinned, the draft leaves a quarter of the cores to them.
    """
    quarter = max(1, len(cores) // 4)
    if not draft_on_cpu:
        return Cores(tuple(target or cores) if target_on_cpu else None, _tuple(draft))
    if not target_on_cpu:
        return Cores(None, tuple(draft or cores[: len(cores) - quarter] or cores))
    if draft is None:
        left = [core for core in cores if core not in (target or ())] or list(cores)
        draft = left if target else left[-max(1, len(cores) // 2) :]
    if target is None:
        target = [core for core in cores if core not in draft] or list(cores)
    return Cores(tuple(target), tuple(draft))


def _tuple(cores: Sequence[int] | None) -> tuple[int, ...] | None:
    return tuple(cores) if cores else None


def _physical(core: int) -> str:
    """A name that hyperthreads of one physical core share."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return siblings.read_text().strip()
    except OSError:
        return str(core)
