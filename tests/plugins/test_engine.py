"""Calls into the workers of an engine, without vLLM: all of them are asked, and what goes wrong in one comes back."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from specbranch.launch import vllm_engine
from specbranch.launch.vllm_engine import WorkerError
from specbranch.plugins.vllm.settings import ProposerSettings


class Drafter:
    """The proposer of one worker."""

    def __init__(self, counts: Mapping[str, float]) -> None:
        self._counts = counts
        self.settings: ProposerSettings | None = None

    def counts(self) -> Mapping[str, float]:
        return self._counts

    def use(self, settings: ProposerSettings) -> None:
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
    vllm_engine.use(Llm(drafters), settings)

    assert [drafter.settings for drafter in drafters] == [settings, settings]


def test_a_worker_that_refuses_settings_does_not_keep_the_others_from_answering(drafters: list[Drafter]) -> None:
    with pytest.raises(WorkerError, match="not this one"):
        vllm_engine.use(Llm(drafters), ProposerSettings(planner="pearl"))

    assert drafters[1].settings is not None


def test_ctrl_c_still_reaches_this_process() -> None:
    before = signal.getsignal(signal.SIGINT)
    vllm_engine.ignore_interrupts(Llm([Drafter({})]))

    assert signal.getsignal(signal.SIGINT) is before
