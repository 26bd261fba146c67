"""Choose the draft's device, and divide the cores of this process between target and draft."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbranch.engines.models import weight_bytes
from specbranch.engines.registry import engine_for, runs_on_gpu
from specbranch.errors import EngineError, FlagError, UsageError
from specbranch.launch.child import join_cores
from specbranch.launch.vllm_install import target_on_cpu
from specbranch.machine import Topology, num_gpus, read_topology
from specbranch.plugins.vllm.settings import ParallelLayout

_MAX_CORES = 16  # of a draft next to a target on GPUs; more do not make one row faster
_READ_BYTES_PER_S = 50e9  # memory bandwidth that one NUMA node of a server has at least
_MIN_DRAFT_STEPS = 3  # in one step of the target, for drafts to pay

# The page on the choice of a draft says the same. 30 ms are three times 0.5 GB at 50 GB/s.
HOST_CPU = (
    "a draft on the host CPU helps a target on GPUs whose step takes at least as long as three of the draft's: about "
    "30 ms for a draft of 0.5B weights in int8, 60 ms in bfloat16"
)
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """The device of the draft, the reason for choosing it, and a warning if it is a bad choice, else None."""

    device: str
    reason: str
    warning: str | None = None


def choose_device(
    asked: str,
    *,
    num_gpus: int,
    target_on_cpu: bool,
    num_target_devices: int,
    engine_runs_on_gpu: bool,
    weight_bytes: int | None = None,
) -> DevicePlacement:
    """Choose the device of the draft: `asked`, or for `auto` the first GPU that the target does not use, else the CPU.

    A target on GPUs uses the first `num_target_devices` of them. `weight_bytes` is the size of the draft's weights,
    None if unknown.
    """
    if asked != "auto":
        return DevicePlacement(asked, "as asked for", None if target_on_cpu else overlap(asked, num_target_devices))
    if target_on_cpu:
        return DevicePlacement("cpu", "the target runs on the CPU too")
    if num_gpus > num_target_devices and engine_runs_on_gpu:
        return DevicePlacement(f"cuda:{num_target_devices}", f"the target uses {num_target_devices} of {num_gpus} GPUs")
    if not num_gpus:
        return DevicePlacement("cpu", "no GPU was found here")
    if num_gpus > num_target_devices:
        reason = "a GPU is free, but the draft's engine was built without GPUs"
    else:
        reason = f"the target uses all of the {num_gpus} GPUs here"
    return DevicePlacement("cpu", reason, _host_cpu_advice(weight_bytes))


def overlap(device: str, num_target_devices: int) -> str | None:
    """Return a warning if the draft's device is one of the GPUs that the target uses; None if it is not.

    The target uses the first `num_target_devices` GPUs.
    """
    kind, _, index = device.partition(":")
    if kind not in ("cuda", "gpu") or not (index or "0").isdecimal() or int(index or 0) >= num_target_devices:
        return None
    return (
        f"the draft on {device} shares a GPU with the target, which uses the first {num_target_devices}: they take "
        f"turns on it, and vLLM may not find the memory that it asks for; give the draft another device, such as "
        f"cuda:{num_target_devices}, or vLLM a lower --gpu-memory-utilization"
    )


def _host_cpu_advice(weight_bytes: int | None) -> str:
    """Return a message that says when a draft on the CPU helps a target on GPUs.

    If `weight_bytes`, the size of the draft's weights, is known, the message includes an estimate for this draft.
    """
    if weight_bytes is None:
        return f"{HOST_CPU}; `specbranch plan` measures it"
    target_ms = 1e3 * _MIN_DRAFT_STEPS * weight_bytes / _READ_BYTES_PER_S
    return (
        f"{HOST_CPU}; for this draft about {target_ms:.0f} ms (an estimate: {weight_bytes / 1e9:.1f} GB of weights at "
        f"{_READ_BYTES_PER_S / 1e9:.0f} GB/s, less in int8); `specbranch plan` measures it"
    )


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """The cores of the target and of the draft; None means not pinned."""

    target: tuple[int, ...] | None
    draft: tuple[int, ...] | None


def usable_cores() -> list[int]:
    """Return the cores of this process, one for each physical core: a second hyperthread adds no computing power."""
    allowed = sorted(os.sched_getaffinity(0))
    return without_siblings({core: _physical(core) for core in allowed})


def without_siblings(physical: Mapping[int, str]) -> list[int]:
    """Return one logical core of each physical core, or all logical cores if there is only one physical core.

    `physical` maps each logical core to a name of its physical core.
    """
    first = {name: core for core, name in sorted(physical.items(), reverse=True)}
    return sorted(first.values()) if len(first) > 1 else sorted(physical)


def split_cores(
    cores: Sequence[int],
    *,
    target_on_cpu: bool,
    draft_on_cpu: bool,
    target: Sequence[int] | None = None,
    draft: Sequence[int] | None = None,
    topology: Topology | None = None,
) -> CoreSplit:
    """Divide `cores` between target and draft; `target` and `draft` are cores that the user has fixed.

    If both run on the CPU, the draft gets half of the cores, or those that the user has not given to the target. A
    target on GPUs is not pinned, and a draft on the CPU next to it gets the cores that `beside_gpus` chooses.
    """
    if not draft_on_cpu:
        return CoreSplit(tuple(target or cores) if target_on_cpu else None, _tuple(draft))
    if not target_on_cpu:
        return CoreSplit(None, tuple(draft or beside_gpus(cores, topology or Topology())))
    if draft is None:
        left = [core for core in cores if core not in (target or ())] or list(cores)
        draft = left if target else left[-max(1, len(cores) // 2) :]
    if target is None:
        target = [core for core in cores if core not in draft] or list(cores)
    return CoreSplit(tuple(target), tuple(draft))


def beside_gpus(cores: Sequence[int], topology: Topology) -> tuple[int, ...]:
    """Choose the cores of a draft next to a target on GPUs: at most 16, all of one NUMA node.

    It chooses the node with the fewest GPUs; of several such nodes it avoids the first, and then prefers the node with
    the most cores. If the node is the only one, or has GPUs, a quarter of its cores stays free for the processes that
    feed the GPUs.
    """
    allowed = {node: [core for core in own if core in cores] for node, own in topology.cores.items()}
    nodes = {node: own for node, own in sorted(allowed.items()) if own}
    if len(nodes) < 2:
        return _without_quarter(cores)
    first = min(nodes)
    node = min(nodes, key=lambda node: (topology.gpus.get(node, 0), node == first, -len(nodes[node])))
    return _without_quarter(nodes[node]) if topology.gpus.get(node) else tuple(nodes[node][-_MAX_CORES:])


def _without_quarter(cores: Sequence[int]) -> tuple[int, ...]:
    quarter = max(1, len(cores) // 4)
    return tuple(cores[quarter:][-_MAX_CORES:] or cores)


def _tuple(cores: Sequence[int] | None) -> tuple[int, ...] | None:
    return tuple(cores) if cores else None


def _physical(core: int) -> str:
    """Return a name that all hyperthreads of one physical core share."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return siblings.read_text().strip()
    except OSError:
        return str(core)


def pin_process(text: str) -> None:
    """Pin this process to the cores in `text`, the value of `--cores`; raise `UsageError` if one cannot be used."""
    cores, before = parse_ints("--cores", text), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, OverflowError) as error:
        raise _no_such_cores("--cores", cores, before) from error
    # Linux ignores cores that do not exist as long as one of them does.
    if os.sched_getaffinity(0) != set(cores):
        os.sched_setaffinity(0, before)
        raise _no_such_cores("--cores", cores, before)


def place_draft(asked: str, model: str, engine: str | None, layout: ParallelLayout) -> DevicePlacement:
    """Choose the device of a draft that runs next to a target with this layout on this machine.

    `asked` is the device that the user wrote, or `auto`. Without `engine`, the draft's model decides the engine.
    """
    on_cpu = target_on_cpu()
    is_open = asked == "auto" and not on_cpu  # only then do GPUs and the draft's size matter
    return choose_device(
        asked,
        num_gpus=num_gpus() if is_open else 0,
        target_on_cpu=on_cpu,
        num_target_devices=layout.num_devices,
        engine_runs_on_gpu=is_open and _runs_on_gpu(engine or engine_for(model)),
        weight_bytes=(weight_bytes(model) or None) if is_open else None,
    )


def _runs_on_gpu(engine: str) -> bool:
    """Return whether an engine can use a GPU; False if the engine is not installed."""
    try:
        return runs_on_gpu(engine)
    except EngineError:
        return False


def divide_cores(draft_device: str, target_cores: str | None = None, draft_cores: str | None = None) -> CoreSplit:
    """Divide the cores of this process between target and draft.

    `target_cores` and `draft_cores` are the values of `--target-cores` and `--draft-cores`, None if not given.
    """
    on_cpu = target_on_cpu()
    return split_cores(
        usable_cores(),
        target_on_cpu=on_cpu,
        draft_on_cpu=draft_device == "cpu",
        target=_parse_cores("--target-cores", target_cores),
        draft=_parse_cores("--draft-cores", draft_cores),
        topology=None if on_cpu else read_topology(),
    )


def _parse_cores(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    cores, allowed = parse_ints(option, text), os.sched_getaffinity(0)
    if not set(cores) <= allowed:
        raise _no_such_cores(option, cores, allowed)
    return cores


def _no_such_cores(option: str, cores: Iterable[int], before: Iterable[int]) -> UsageError:
    asked, allowed = (join_cores(sorted(some)) for some in (cores, before))
    return UsageError(f"{option} is {asked}; this process may use {allowed}, so name some of these")


def is_bound_by_user() -> bool:
    """Return whether the user has bound vLLM's workers to cores, by VLLM_CPU_OMP_THREADS_BIND."""
    return os.environ.get(_BIND, "auto") != "auto"


def omp_bind_env(cores: Sequence[int], num_workers: int) -> dict[str, str]:
    """Return the environment variable that divides the cores evenly among vLLM's workers.

    Empty if the user has bound the workers. Raises `FlagError` if there are fewer cores than workers.
    """
    check_core_count(cores, num_workers)
    each = len(cores) // num_workers
    shares = (cores[index * each : (index + 1) * each] for index in range(num_workers))
    return {} if is_bound_by_user() else {_BIND: "|".join(join_cores(share) for share in shares)}


def omp_env(cores: Sequence[int], layout: ParallelLayout) -> dict[str, str]:
    """Return the environment variable that makes a vLLM engine use `cores`, which are cores of this process.

    For an engine in one process it is OMP_NUM_THREADS, one thread for each core; else it is VLLM_CPU_OMP_THREADS_BIND,
    with the cores of each worker. Empty if the user has set that variable.
    """
    if not layout.in_one_process:
        return omp_bind_env(cores, layout.num_devices)
    return {} if _THREADS in os.environ else {_THREADS: str(len(cores))}


def check_core_count(cores: Sequence[int], num_workers: int) -> None:
    """Raise `FlagError` if there are fewer cores than workers.

    Do nothing if the user has bound the workers to cores by the environment variable VLLM_CPU_OMP_THREADS_BIND.
    """
    if len(cores) < num_workers and not is_bound_by_user():
        raise FlagError(
            f"{num_workers} workers need as many cores, and the target has {join_cores(cores)}; give more by "
            "--target-cores"
        )


def parse_ints(option: str, text: str) -> list[int]:
    """Return the whole numbers in `text`, which commas separate; raise `UsageError` for any other value of `option`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{option} is {text!r}; give whole numbers separated by commas")
    return [int(part) for part in parts]
