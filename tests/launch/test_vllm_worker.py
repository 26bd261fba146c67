"""The process of a target: what its runs become, and that a run without accepted drafts is repeated where it may."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from specbranch.launch import vllm_worker
from specbranch.launch.vllm_engine import Request, StepOutput
from specbranch.launch.vllm_worker import DecodeJob, DecodeResult, PromptRequest, step_gaps_s

ASKS = [PromptRequest("a", {}), PromptRequest("b", {}), PromptRequest("c", {}, is_chat=True)]


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
