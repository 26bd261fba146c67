"""Predictors without a network say what they were made to say, for the place that a round is at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specbranch.core.planner import SettingError
from specbranch.core.planners.predictors import (
    CONSTANTS,
    HintPredictor,
    OraclePredictor,
    ReplayPredictor,
    make_predictor,
    predictor_names,
    register_predictor,
)
from specbranch.core.round import AcceptanceHint, Round, Signal


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


class Bold:
    """Always predicts that all tokens are accepted."""

    def predict(self, round: Round) -> Signal:
        return Signal.ALL


def test_a_registered_predictor_is_made_anew_for_each_sequence() -> None:
    assert register_predictor("bold")(Bold) is Bold
    assert register_predictor("bold")(Bold) is Bold, "again is no mistake"

    first, second = make_predictor("bold"), make_predictor("bold")
    assert isinstance(first, Bold) and first is not second
    assert make_predictor("all") is CONSTANTS["all"]
    assert predictor_names() == ("confidence", "none", "all", "bold")


@pytest.mark.parametrize(
    ("name", "predictor", "message"),
    [
        ("", Bold, "1 to 64 characters"),
        (Bold, Bold, "1 to 64 characters"),
        ("x" * 65, Bold, "1 to 64 characters"),
        ("mine", int, r"a class with a method predict\(round\)"),
        ("mine", Bold(), r"a class with a method predict\(round\)"),
        ("all", Bold, "another predictor already"),
        ("oracle", Bold, "another predictor already"),
        ("hrad", Bold, "another predictor already"),
    ],
)
def test_what_cannot_be_registered_is_refused(name: str, predictor: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        register_predictor(name)(predictor)


def test_an_unknown_predictor_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SettingError, match="did you mean 'confidence'"):
        make_predictor("confidense")
