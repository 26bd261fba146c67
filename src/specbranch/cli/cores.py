"""Where target and draft run on this machine: the device of the draft, and the CPU cores of both."""

from __future__ import annotations

import os
from collections.abc import Iterable

from specbranch.cli.installation import target_on_cpu
from specbranch.cli.placement import Choice, Cores, choose_device, split, usable_cores
from specbranch.cli.values import numbers
from specbranch.engines.models import weight_bytes
from specbranch.engines.registry import engine_for, runs_on_gpu
from specbranch.errors import EngineError, UsageError
from specbranch.machine import num_gpus, read_topology
from specbranch.plugins.vllm.layout import Layout


def stay_on(text: str) -> None:
    """Pin this process to the cores of `--cores`."""
    cores, before = numbers("--cores", text), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, OverflowError) as error:
        raise _no_such_cores("--cores", cores, before) from error
    # Linux ignores cores that do not exist as long as one of them does.
    if os.sched_getaffinity(0) != set(cores):
        os.sched_setaffinity(0, before)
        raise _no_such_cores("--cores", cores, before)


def place_draft(asked: str, model: str | None, engine: str | None, layout: Layout) -> Choice:
    """The device of a draft beside a target with this layout. Without a model there is no draft, and no device."""
    if model is None:
        return Choice("none", "there is no draft")
    on_cpu = target_on_cpu()
    is_open = asked == "auto" and not on_cpu  # only then does it matter what else is here
    return choose_device(
        asked,
        num_gpus=num_gpus() if is_open else 0,
        target_on_cpu=on_cpu,
        num_target_devices=layout.num_devices,
        engine_runs_on_gpu=is_open and _runs_on_gpu(engine or engine_for(model)),
        weight_bytes=(weight_bytes(model) or None) if is_open else None,
    )


def _runs_on_gpu(engine: str) -> bool:
    """Whether an engine can use a GPU; one that is not installed cannot, and is refused elsewhere."""
    try:
        return runs_on_gpu(engine)
    except EngineError:
        return False


def divide_cores(draft_device: str, target_cores: str | None = None, draft_cores: str | None = None) -> Cores:
    """Cores for a target in vLLM and for its draft, from `--target-cores` and `--draft-cores`, else shared out."""
    on_cpu = target_on_cpu()
    return split(
        usable_cores(),
        target_on_cpu=on_cpu,
        draft_on_cpu=draft_device == "cpu",
        target=_asked("--target-cores", target_cores),
        draft=_asked("--draft-cores", draft_cores),
        topology=None if on_cpu else read_topology(),
    )


def _asked(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    cores, allowed = numbers(option, text), os.sched_getaffinity(0)
    if not set(cores) <= allowed:
        raise _no_such_cores(option, cores, allowed)
    return cores


def _no_such_cores(option: str, cores: Iterable[int], before: Iterable[int]) -> UsageError:
    asked, have = (",".join(str(core) for core in sorted(some)) for some in (cores, before))
    return UsageError(f"{option} is {asked}; this process may use {have}")
