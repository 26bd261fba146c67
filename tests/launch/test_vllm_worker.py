"""The process of a target: what its runs become, and that a run without accepted drafts is repeated where it may."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from specbranch.launch import vllm_worker
from specbranch.launch.vllm_engine import Engine, LocalEngineOptions, Request, StepOutput
from specbranch.launch.vllm_worker import (
    DecodeJob,
    DecodeResult,
    PromptRequest,
    TargetFailure,
    TargetProcess,
    step_gaps_s,
)
from specbranch.plugins.vllm.settings import ProposerSettings

ASKS = [PromptRequest("a", {}), PromptRequest("b", {}), PromptRequest("c", {}, is_chat=True)]
WORKER = """
import os, sys
import msgspec
from specbranch.launch.vllm_worker import DecodedOutput, DecodeJob, DecodeResult, WorkerEvent
from specbranch.launch.vllm_engine import Engine, LocalEngineOptions

def say(news):
    sys.stdout.buffer.write(msgspec.json.encode(news) + b"\\n")
    sys.stdout.buffer.flush()

options = msgspec.json.decode(sys.stdin.buffer.readline(), type=LocalEngineOptions)
say(WorkerEvent(engine=Engine({"vllm": options.model}, options.settings.planner, os.environ["OMP_NUM_THREADS"])))
for line in sys.stdin.buffer:
    run = msgspec.json.decode(line, type=DecodeJob)
    if run.batch:
        sys.exit("out of memory")
    for _ in run.asks:
        say(WorkerEvent(num_finished=1))
    answers = [DecodedOutput(text=ask.prompt, logprobs=[{3: -0.5}]) for ask in run.asks]
    say(WorkerEvent(done=DecodeResult(answers=answers, counts={"wait_s": run.settings.deadline_ms})))
"""
CORES = [min(os.sched_getaffinity(0))]
OPTIONS = LocalEngineOptions("large", ProposerSettings(planner="pearl"))


class FakeTarget:
    """Answers with the number of the attempt; a batch of the attempt in which the draft comes back has drafts."""

    def __init__(self, returns_in: int | None) -> None:
        self.returns_in = returns_in
        self.num_answers = 0
        self.drafts = (7, 5)

    def encode(self, text: str) -> list[int]:
        return [ord(text)]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [0, *(ord(message["content"]) for message in messages)]

    def proposer_counts(self) -> dict[str, float]:
        return {"calls": float(self.num_answers)}

    def draft_tokens(self) -> tuple[int, int]:
        return self.drafts

    def stream(self, requests: Sequence[Request]) -> Iterator[StepOutput]:
        attempt = self.num_answers // len(ASKS) + 1
        self.num_answers += len(requests)
        if self.returns_in is not None and attempt >= self.returns_in:
            self.drafts = (self.drafts[0] + 2, self.drafts[1] + 1)
        for index in range(len(requests)):
            yield piece(index, attempt, str(attempt), None)
            yield piece(index, attempt, "", "stop")


def piece(index: int, token: int, text: str, finish_reason: str | None) -> StepOutput:
    return StepOutput(index=index, tokens=[token], text=text, finish_reason=finish_reason, at_s=time.monotonic())


def decoded(target: Any, attempts: int = 4) -> tuple[int, DecodeResult]:
    news = list(vllm_worker.decode(target, DecodeJob(ASKS, batch=2, attempts=attempts)))
    assert news[-1].done is not None
    return sum(one.num_finished for one in news), news[-1].done


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_worker, "_PAUSE_S", 0.0)


def test_a_run_with_drafts_is_decoded_once() -> None:
    num_finished, done = decoded(FakeTarget(1))

    assert num_finished == 3
    assert [answer.text for answer in done.answers] == ["1", "1", "1"]
    assert (done.submitted, done.accepted, done.attempts) == (4, 2, 1)


def test_a_run_without_an_accepted_draft_is_decoded_again_and_counted_once() -> None:
    num_finished, done = decoded(FakeTarget(3))

    assert num_finished == 3
    assert [answer.text for answer in done.answers] == ["3", "3", "3"]
    assert (done.submitted, done.accepted, done.attempts) == (4, 2, 3)


def test_it_is_given_up_in_the_end() -> None:
    _, done = decoded(FakeTarget(None))

    assert (done.accepted, done.attempts) == (0, 4)


def test_a_run_that_may_not_be_repeated_has_one_attempt() -> None:
    _, done = decoded(FakeTarget(None), attempts=1)

    assert done.attempts == 1


def test_an_answer_has_its_prompt_its_tokens_and_its_steps() -> None:
    """Chat prompts go through the model's template; counters are of this run alone."""
    target = FakeTarget(1)
    _, done = decoded(target)

    assert [answer.prompt for answer in done.answers] == [[97], [98], [0, 99]]
    assert [answer.tokens for answer in done.answers] == [[1, 1]] * 3
    assert [answer.finish_reason for answer in done.answers] == ["stop"] * 3
    assert len(step_gaps_s(done.answers)) == 3
    assert 0 <= max(step_gaps_s(done.answers)) <= done.elapsed_s
    assert done.counts == {"calls": 3.0}


@pytest.fixture(autouse=True)
def fake_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(vllm_worker, "_WORKER", "fake_worker")


def test_options_and_runs_arrive_whole_and_their_outputs_come_back(tmp_path: Path) -> None:
    finished: list[int] = []
    with TargetProcess(OPTIONS, tmp_path / "log", cores=CORES) as target:
        done = target.run(
            DecodeJob([PromptRequest("a", {}), PromptRequest("b", {})], settings=ProposerSettings(deadline_ms=7)),
            finished.append,
        )

    assert target.engine == Engine({"vllm": "large"}, "pearl", "1")
    assert [answer.text for answer in done.answers] == ["a", "b"]
    assert done.answers[0].logprobs == [{3: -0.5}]
    assert done.counts == {"wait_s": 7.0}
    assert finished == [1, 1]


def test_a_target_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(TargetFailure, match=r"vLLM with large ended with code 1 .*\nout of memory"),
        TargetProcess(OPTIONS, tmp_path / "log", cores=CORES) as target,
    ):
        target.run(DecodeJob([], batch=1))


def test_a_target_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    bare = LocalEngineOptions("large")  # the fake one needs settings
    with (
        pytest.raises(TargetFailure, match="'NoneType' object has no attribute 'planner'"),
        TargetProcess(bare, tmp_path / "log"),
    ):
        pass
