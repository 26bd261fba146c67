"""The worker of `specbranch check`: a run during which the draft stood still is decoded again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from specbranch.plugins.vllm.exactness import worker
from specbranch.plugins.vllm.exactness.runs import Ask, Done, Run
from specbranch.plugins.vllm.target import Piece, Request

RUN = Run("distribution", [Ask("a", {}), Ask("b", {}), Ask("c", {})], batch=2)


class FakeTarget:
    """Answers with the number of the attempt; a batch of the attempt in which the draft comes back has drafts."""

    def __init__(self, returns_in: int | None) -> None:
        self.returns_in = returns_in
        self.num_answers = 0
        self.drafts = (7, 5)

    def encode(self, text: str) -> list[int]:
        return [ord(text)]

    def draft_tokens(self) -> tuple[int, int]:
        return self.drafts

    def stream(self, requests: Sequence[Request]) -> Iterator[Piece]:
        attempt = self.num_answers // len(RUN.asks) + 1
        self.num_answers += len(requests)
        if self.returns_in is not None and attempt >= self.returns_in:
            self.drafts = (self.drafts[0] + 2, self.drafts[1] + 1)
        for index in range(len(requests)):
            yield Piece(index, [attempt], str(attempt), "stop", 0.0)


def decoded(target: Any, is_drafted: bool = True) -> tuple[int, Done]:
    news = list(worker.decode(target, RUN, is_drafted))
    assert news[-1].done is not None
    return sum(one.num_ended for one in news), news[-1].done


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_PAUSE_S", 0.0)


def test_a_run_with_drafts_is_decoded_once() -> None:
    num_ended, done = decoded(FakeTarget(1))

    assert num_ended == 3
    assert [answer.text for answer in done.answers] == ["1", "1", "1"]
    assert (done.submitted, done.accepted, done.attempts) == (4, 2, 1)


def test_a_run_without_an_accepted_draft_is_decoded_again_and_counted_once() -> None:
    num_ended, done = decoded(FakeTarget(3))

    assert num_ended == 3
    assert [answer.text for answer in done.answers] == ["3", "3", "3"]
    assert (done.submitted, done.accepted, done.attempts) == (4, 2, 3)


def test_it_is_given_up_in_the_end() -> None:
    _, done = decoded(FakeTarget(None))

    assert (done.accepted, done.attempts) == (0, 4)


def test_a_bare_engine_has_one_attempt() -> None:
    _, done = decoded(FakeTarget(None), is_drafted=False)

    assert done.attempts == 1
