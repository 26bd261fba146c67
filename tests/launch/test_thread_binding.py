"""Cores of the workers of a target on the CPU, without vLLM."""

from __future__ import annotations

import pytest

from specbranch.errors import FlagError
from specbranch.launch.placement import check_core_count, omp_env
from specbranch.plugins.vllm.settings import ParallelLayout

TWO = ParallelLayout(tensor=2)


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
