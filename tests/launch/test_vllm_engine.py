"""Calls into the workers of an engine, without vLLM: all of them are asked, and what goes wrong in one comes back."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from specbranch.launch import vllm_engine
from specbranch.launch.vllm_engine import LocalEngineOptions, WorkerError
from specbranch.plugins.vllm import installed
from specbranch.plugins.vllm.settings import ProposerSettings


class Drafter:
    """The proposer of one worker."""

    def __init__(self, counts: Mapping[str, float]) -> None:
        self._counts = counts
        self.settings: ProposerSettings | None = None

    def counts(self) -> Mapping[str, float]:
        return self._counts

    def configure(self, settings: ProposerSettings) -> None:
        if settings.planner == "pearl" and self._counts:
            raise ValueError("not this one")
        self.settings = settings


class Llm:
    """An engine whose workers are elsewhere: whatever is sent to them is pickled, and what comes back too."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._workers = [SimpleNamespace(model_runner=SimpleNamespace(drafter=drafter)) for drafter in drafters]

    def collective_rpc(self, method: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        method, args = pickle.loads(pickle.dumps((method, args)))
        return [pickle.loads(pickle.dumps(method(worker, *args))) for worker in self._workers]


@pytest.fixture
def drafters() -> list[Drafter]:
    return [Drafter({"calls": 3.0, "wait_s": 0.5}), Drafter({})]


def test_counters_are_those_of_the_worker_that_drafts(drafters: list[Drafter]) -> None:
    assert vllm_engine.proposer_counts(Llm(drafters)) == {"calls": 3.0, "wait_s": 0.5}
    assert vllm_engine.proposer_counts(Llm(drafters[::-1])) == {"calls": 3.0, "wait_s": 0.5}


def test_all_workers_get_the_same_settings(drafters: list[Drafter]) -> None:
    settings = ProposerSettings(planner="sps", settings={"gamma": 3})
    vllm_engine.configure_proposers(Llm(drafters), settings)

    assert [drafter.settings for drafter in drafters] == [settings, settings]


def test_a_worker_that_refuses_settings_does_not_keep_the_others_from_answering(drafters: list[Drafter]) -> None:
    with pytest.raises(WorkerError, match="not this one"):
        vllm_engine.configure_proposers(Llm(drafters), ProposerSettings(planner="pearl"))

    assert drafters[1].settings is not None


def test_ctrl_c_still_reaches_this_process() -> None:
    before = signal.getsignal(signal.SIGINT)
    vllm_engine.ignore_interrupts(Llm([Drafter({})]))

    assert signal.getsignal(signal.SIGINT) is before


SETTINGS = ProposerSettings(address="ipc:///d", planner="sps")


def test_a_bare_engine_gets_the_arguments_as_they_are() -> None:
    given = {"tensor_parallel_size": 2, "additional_config": {"x": 1}}

    assert LocalEngineOptions("m", arguments=given).all_arguments() == {"disable_log_stats": False, **given}


def test_the_proposer_is_added_to_the_users_own_additional_config() -> None:
    given = {"additional_config": {"x": 1, "specbranch": {"pad": "on"}}}
    arguments = LocalEngineOptions("m", SETTINGS, 6, given).all_arguments()

    assert arguments["speculative_config"]["num_speculative_tokens"] == 6
    assert arguments["additional_config"]["x"] == 1
    assert arguments["additional_config"]["specbranch"]["planner"] == "sps"
    assert given == {"additional_config": {"x": 1, "specbranch": {"pad": "on"}}}


@pytest.mark.parametrize(
    ("is_cuda", "capability", "asked", "is_invariant"),
    [
        (True, 90, None, True),
        (True, 80, None, True),
        (True, 75, None, False),
        (False, 90, None, False),
        (True, 90, "0", False),
    ],
)
def test_batch_invariance_is_used_where_vllm_has_it(
    monkeypatch: pytest.MonkeyPatch, is_cuda: bool, capability: int, asked: str | None, is_invariant: bool
) -> None:
    platform = SimpleNamespace(is_cuda=lambda: is_cuda, has_device_capability=lambda least: capability >= least)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=sys.modules["vllm.platforms"]))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "unset")
    if asked is None:
        monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    else:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", asked)

    assert installed.be_batch_invariant() == installed.is_batch_invariant() == is_invariant


def test_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "unset")  # so that it is restored
        monkeypatch.delenv(name)
    installed.run_in_this_process({"OMP_NUM_THREADS": "3"})

    found = {name: os.environ[name] for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS")}
    assert found == {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "3"}
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
