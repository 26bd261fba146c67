"""Predictors without a network say what they were made to say, for the place that a round is at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specbranch.core.planners.predictors import HintPredictor, OraclePredictor, ReplayPredictor
from specbranch.core.round import AcceptanceHint, Signal


def round_at(position: int, hint: AcceptanceHint | None = None) -> Any:
    return SimpleNamespace(tree=SimpleNamespace(root=SimpleNamespace(position=position)), hint=hint)


@pytest.mark.parametrize(
    ("accepted", "expected"), [(0, Signal.NONE), (3, Signal.SOME), (4, Signal.ALL), (9, Signal.ALL)]
)
def test_an_oracle_knows_what_follows_the_root(accepted: int, expected: Signal) -> None:
    asked: list[int] = []

    def accepted_from(position: int) -> int:
        asked.append(position)
        return accepted

    assert OraclePredictor(accepted_from, window=4).predict(round_at(7)) is expected
    assert asked == [8]


def test_a_replay_repeats_the_signal_of_the_answers_token_and_knows_none_at_the_prompt() -> None:
    predictor = ReplayPredictor([Signal.NONE, Signal.ALL], num_before=5)

    assert [predictor.predict(round_at(position)) for position in (4, 5, 6)] == [Signal.SOME, Signal.NONE, Signal.ALL]


def test_a_hint_that_came_with_the_verdict_decides() -> None:
    assert HintPredictor().predict(round_at(0)) is Signal.SOME
    assert HintPredictor().predict(round_at(0, AcceptanceHint(Signal.ALL))) is Signal.ALL
