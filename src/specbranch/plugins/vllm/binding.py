"""Which cores the workers of a target on the CPU use; vLLM reads it from its environment when it starts them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from specbranch.errors import FlagError
from specbranch.plugins.vllm.layout import Layout

_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_THREADS = "OMP_NUM_THREADS"


def is_bound_by_user() -> bool:
    """Whether the user has bound the workers to cores himself."""
    return os.environ.get(_BIND, "auto") != "auto"


def threads_of_workers(cores: Sequence[int], num_workers: int) -> dict[str, str]:
    """Variables that give each worker its share of the cores, equally many; none if the user has bound them himself."""
    refuse_too_few(cores, num_workers)
    each = len(cores) // num_workers
    shares = (cores[index * each : (index + 1) * each] for index in range(num_workers))
    return {} if is_bound_by_user() else {_BIND: "|".join(",".join(str(core) for core in share) for share in shares)}


def threads(cores: Sequence[int], layout: Layout) -> dict[str, str]:
    """Variables of an engine in this process, which has these cores. A number of threads that the user set stands."""
    if not layout.in_one_process:
        return threads_of_workers(cores, layout.num_devices)
    return {} if _THREADS in os.environ else {_THREADS: str(len(cores))}


def refuse_too_few(cores: Sequence[int], num_workers: int) -> None:
    """Raise if there is not a core for each worker, unless the user has bound them himself."""
    if len(cores) < num_workers and not is_bound_by_user():
        have = ",".join(str(core) for core in cores)
        raise FlagError(
            f"{num_workers} workers need as many cores, and the target has {have}; give more by --target-cores"
        )
