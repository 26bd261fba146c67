"""Which cores the target, its workers and the draft get, without vLLM."""

from __future__ import annotations

from functools import partial

import pytest

from specbranch.errors import FlagError
from specbranch.launch import placement
from specbranch.launch.draft_process import DraftServiceOptions, place_pair
from specbranch.launch.placement import (
    HOST_CPU,
    CoreSplit,
    DevicePlacement,
    beside_gpus,
    check_core_count,
    choose_device,
    omp_env,
    split_cores,
    without_siblings,
)
from specbranch.machine import Topology
from specbranch.plugins.vllm.settings import ParallelLayout
from tests.root import ROOT

TWO = ParallelLayout(tensor=2)


@pytest.mark.parametrize(
    ("num", "target", "draft"),
    [(1, (0,), (0,)), (2, (0,), (1,)), (3, (0, 1), (2,)), (8, (0, 1, 2, 3), (4, 5, 6, 7))],
)
def test_the_draft_gets_half_of_the_cores_and_at_least_one(
    num: int, target: tuple[int, ...], draft: tuple[int, ...]
) -> None:
    assert split_cores(range(num), target_on_cpu=True, draft_on_cpu=True) == CoreSplit(target, draft)


def test_cores_that_were_asked_for_stand_and_the_other_side_gets_the_rest() -> None:
    both = partial(split_cores, target_on_cpu=True, draft_on_cpu=True)

    assert both(range(4), target=[0]) == CoreSplit((0,), (1, 2, 3))
    assert both(range(4), draft=[1]) == CoreSplit((0, 2, 3), (1,))
    assert both(range(2), target=[0, 1]) == CoreSplit((0, 1), (0, 1))
    assert both(range(2), target=[0, 1], draft=[1]) == CoreSplit((0, 1), (1,))


def test_on_one_cpu_target_and_draft_take_turns_without_a_gate_unless_their_cores_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "target_on_cpu", lambda: True)
    monkeypatch.setattr(placement, "usable_cores", lambda: [0, 1, 2])
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    ask = partial(place_pair, DraftServiceOptions("small", engine="torch"), ParallelLayout(executor="uni"))
    section = {"planner": "budget", "settings": {"max_rows": 4}}

    pair = ask(may_take_turns=True)
    assert pair.takes_turns and pair.draft
    assert pair.target_cores == pair.draft.cores == (0, 1, 2)
    asked = pair.with_turns(section)
    assert asked["settings"] == {"max_rows": 4, "takes_turns": True}
    assert asked["is_gated"] is False and asked["deadline_ms"] > 100
    assert (
        pair.with_turns({**section, "is_gated": True, "deadline_ms": 7.0}).items()
        >= {
            "is_gated": True,
            "deadline_ms": 7.0,
        }.items()
    )

    for apart in (ask(), ask(target_cores="0", may_take_turns=True), ask(draft_cores="2", may_take_turns=True)):
        assert not apart.takes_turns and apart.draft and apart.draft.cores and apart.target_cores
        assert not {*apart.draft.cores} & {*apart.target_cores}
        assert apart.with_turns(section) == section


def test_beside_a_gpu_only_the_side_on_the_cpu_has_cores() -> None:
    assert split_cores(range(8), target_on_cpu=False, draft_on_cpu=True) == CoreSplit(None, tuple(range(2, 8)))
    assert split_cores(range(1), target_on_cpu=False, draft_on_cpu=True) == CoreSplit(None, (0,))
    assert split_cores(range(2), target_on_cpu=True, draft_on_cpu=False) == CoreSplit((0, 1), None)
    assert split_cores(range(2), target_on_cpu=False, draft_on_cpu=False) == CoreSplit(None, None)


def test_of_two_hyperthreads_one_is_used() -> None:
    assert without_siblings({0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}) == [0, 1]
    assert without_siblings({0: "0-1", 1: "0-1"}) == [0, 1]


def nodes(num_nodes: int, num_cores: int, *gpu_nodes: int) -> Topology:
    """So many nodes of so many cores each, and a GPU at each of these nodes."""
    cores = {node: tuple(range(node * num_cores, (node + 1) * num_cores)) for node in range(num_nodes)}
    return Topology(cores, {node: gpu_nodes.count(node) for node in gpu_nodes})


@pytest.mark.parametrize(
    ("topology", "draft"),
    [
        (nodes(1, 8), range(2, 8)),
        (nodes(1, 8, 0), range(2, 8)),
        (nodes(1, 96, 0, 0), range(80, 96)),
        (nodes(2, 8), range(8, 16)),
        (nodes(2, 8, 1), range(8)),
        (nodes(2, 64, 0, 0), range(112, 128)),
        (nodes(2, 8, 0, 0, 1, 1), range(10, 16)),
        (nodes(2, 8, 0, 1, 1), range(2, 8)),
        (nodes(8, 4, 0, 1, 2, 3), range(16, 20)),
        (nodes(8, 4, *range(8)), range(5, 8)),
        (Topology(), range(2, 8)),
    ],
)
def test_beside_gpus_the_draft_gets_cores_of_one_node_far_from_the_gpus(topology: Topology, draft: range) -> None:
    cores = [core for own in topology.cores.values() for core in own] or range(8)

    assert beside_gpus(cores, topology) == tuple(draft)
    assert split_cores(cores, target_on_cpu=False, draft_on_cpu=True, topology=topology) == CoreSplit(
        None, tuple(draft)
    )


def test_beside_gpus_the_draft_gets_no_core_that_the_process_may_not_use() -> None:
    assert beside_gpus([0, 1, 2, 3, 9, 11], nodes(2, 8)) == (9, 11)
    assert beside_gpus([0, 1, 2, 3], nodes(2, 8)) == (1, 2, 3), "the other node is not ours"
    assert beside_gpus([5], nodes(1, 8)) == (5,)


def test_a_draft_of_no_given_device_gets_the_next_gpu_that_the_target_leaves() -> None:
    auto = partial(choose_device, "auto", target_on_cpu=False, engine_runs_on_gpu=True)

    assert auto(num_gpus=4, num_target_devices=2) == DevicePlacement("cuda:2", "the target uses 2 of 4 GPUs")
    assert auto(num_gpus=2, num_target_devices=2).device == "cpu"
    assert auto(num_gpus=0, num_target_devices=1).device == "cpu"
    assert auto(num_gpus=4, num_target_devices=2, engine_runs_on_gpu=False).device == "cpu"
    assert auto(num_gpus=4, num_target_devices=1, target_on_cpu=True) == DevicePlacement(
        "cpu", "the target runs on the CPU too"
    )


def test_a_draft_on_the_cpu_beside_gpus_is_told_when_it_helps() -> None:
    auto = partial(
        choose_device, "auto", num_gpus=1, target_on_cpu=False, num_target_devices=1, engine_runs_on_gpu=True
    )

    known, unknown = auto(weight_bytes=500_000_000).warning, auto().warning
    assert known is not None and "about 30 ms (an estimate: 0.5 GB of weights at 50 GB/s" in known
    assert unknown == f"{HOST_CPU}; `specbranch plan` measures it"


def test_without_gpus_nobody_is_warned_of_a_target_on_them() -> None:
    choice = choose_device("auto", num_gpus=0, target_on_cpu=False, num_target_devices=1, engine_runs_on_gpu=True)

    assert choice == DevicePlacement("cpu", "no GPU was found here")


def test_the_page_on_the_choice_of_a_draft_says_the_same_of_host_cpus() -> None:
    page = ROOT / "docs" / "choose.md"

    assert HOST_CPU.removeprefix("a ") in " ".join(page.read_text().split())


def test_a_draft_on_a_gpu_of_the_target_is_noticed() -> None:
    ask = partial(choose_device, num_gpus=4, target_on_cpu=False, num_target_devices=2, engine_runs_on_gpu=True)

    for device in ("cuda", "cuda:0", "cuda:1", "gpu:1"):
        choice = ask(device)
        assert choice.device == device
        assert choice.warning is not None
        assert "such as cuda:2" in choice.warning and "--gpu-memory-utilization" in choice.warning
    for device in ("cuda:2", "cpu", "mps"):
        assert ask(device) == DevicePlacement(device, "as asked for")
    assert ask("cuda:0", target_on_cpu=True) == DevicePlacement("cuda:0", "as asked for")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_one_worker_has_a_thread_for_each_core() -> None:
    assert (
        omp_env([2, 3, 5], ParallelLayout())
        == omp_env([2, 3, 5], ParallelLayout(executor="uni"))
        == {"OMP_NUM_THREADS": "3"}
    )


def test_workers_of_their_own_processes_share_the_cores() -> None:
    assert omp_env([2, 3, 5], TWO) == {"VLLM_CPU_OMP_THREADS_BIND": "2|3"}
    assert omp_env([2, 3, 5], ParallelLayout(executor="mp")) == {"VLLM_CPU_OMP_THREADS_BIND": "2,3,5"}


def test_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|0")

    assert omp_env([2], ParallelLayout()) == omp_env([2], TWO) == {}


def test_too_few_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FlagError, match="2 workers need as many cores, and the target has 2; give more"):
        omp_env([2], TWO)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|0")
    check_core_count([2], 2)
