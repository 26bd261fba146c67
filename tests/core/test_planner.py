"""No setting that a planner cannot work with gets past the making of the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution
from specbranch.core.node import GreedyPicker
from specbranch.core.planner import Bounds, Settings, describe_setting
from specbranch.core.planners import PLANNERS, SettingError, make_planner, setting_names
from specbranch.core.planners.predictors import ConstantPredictor
from specbranch.core.round import Signal
from specbranch.core.session import Session

DISTRIBUTIONS = [
    Distribution((1, 2, 3, 4), (0.9, 0.05, 0.04, 0.01), 0.4),
    Distribution((2, 1, 3, 4), (0.3, 0.3, 0.2, 0.2), 1.37),
    Distribution((), (), 0.0),
]
ALL = [(planner, name) for planner in PLANNERS for name in setting_names(planner)]
SWITCHES = {"wait_for_draft", "takes_turns", "cost_aware", "uses_text", "uses_memory", "run_guesses"}
COUNTS = {"gamma", "num_guesses", "max_rows", "max_branches"}

NO_NUMBERS: list[Any] = ["", "x", "4", "0.5", b"4", None, [], [1], {}, (1,), 1j, math.nan, math.inf, -math.inf]
FAR_OFF: list[Any] = [-1, -0.5, -(2**40), 2**40, 2**2000, 1e300]


def distribution_for(seed: int) -> Distribution:
    return DISTRIBUTIONS[seed % len(DISTRIBUTIONS)]


def run_rounds(session: Session, num_rounds: int = 3) -> None:
    """Rounds with every kind of verdict, so that the planner is asked all it can be asked."""
    for number in range(num_rounds):
        for _ in range(3):
            session.propose()
            for node in session.rows():
                session.add_distribution(node, distribution_for(node.position + node.token + number))
        session.skip_round()
        for node in session.rows():
            session.add_distribution(node, distribution_for(node.position))
        accepted = session.submitted[: (0, 1, None)[number % 3]]
        session.commit([*accepted, 1 + number], len(session.submitted))


def session_with(planner: str, chosen: dict[str, Any]) -> Session:
    costs = PairModel()
    for rows in (1, 2, 4):
        costs.draft.observe(rows, 1.0 + 0.1 * rows)
    costs.target.observe(1, 0, 5.0)
    made = make_planner(planner, chosen, ConstantPredictor(Signal.SOME))
    return Session([1, 2, 3, 1, 2], made, GreedyPicker(), costs)


@pytest.mark.parametrize(("planner", "name"), ALL)
def test_every_setting_refuses_what_it_is_not(planner: str, name: str) -> None:
    wrong: list[Any] = [*NO_NUMBERS, *FAR_OFF]
    wrong += [0, 1, 0.5] if name in SWITCHES else [True, False]
    wrong += [0, 65, 2.5, 4.0] if name in COUNTS else []
    for value in wrong:
        with pytest.raises(SettingError, match=rf"Settings\.{name} is .*; (give|choose)"):
            make_planner(planner, {name: value}, ConstantPredictor(Signal.SOME))


@pytest.mark.parametrize(
    ("planner", "name", "values"),
    [(planner, name, (1, 64)) for planner, name in ALL if name in COUNTS]
    + [(planner, name, (False, True)) for planner, name in ALL if name in SWITCHES]
    + [("adaedl", name, (0, 0.0, 1, 1.0)) for name in setting_names("adaedl") if name != "gamma"]
    + [("specbranch", "confidence", (0, 0.0, 1, 1.0))]
    + [
        ("ssd", "acceptance", (5e-324, 1 - 1e-16)),
        ("ssd", "decay", (0, 0.0, 100)),
        ("ssd", "fallback", ("jit", "fast")),
    ],
)
def test_every_setting_works_at_its_bounds(planner: str, name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        session = session_with(planner, {name: value})
        run_rounds(session)

        assert session.stats.rounds == 3


VALUES = st.one_of(
    st.sampled_from(
        [*NO_NUMBERS, *FAR_OFF, True, False, 0, 1, 64, 65, 0.0, 1.0, 100, "jit", "fast", 5e-324, 1 - 1e-16]
    ),
    st.integers(-2, 70),
    st.floats(0, 1),
    st.floats(),
    st.text(max_size=8),
)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), planner=st.sampled_from(PLANNERS))
def test_settings_are_refused_or_a_session_runs_with_them(data: st.DataObject, planner: str) -> None:
    names = setting_names(planner)
    chosen = data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=3) if names else st.just({}))
    try:
        session = session_with(planner, chosen)
    except SettingError:
        return
    run_rounds(session)


def test_what_is_refused_is_named_with_its_value_and_what_is_allowed() -> None:
    with pytest.raises(SettingError) as refusal:
        make_planner("sps", {"gamma": 65}, ConstantPredictor(Signal.SOME))
    assert str(refusal.value) == "SpsSettings.gamma is 65; give a whole number from 1 to 64"
    with pytest.raises(SettingError) as refusal:
        make_planner("ssd", {"acceptance": 1.0}, ConstantPredictor(Signal.SOME))
    assert str(refusal.value) == "SsdSettings.acceptance is 1.0; give a number between 0 and 1, neither of them"
    with pytest.raises(SettingError) as refusal:
        make_planner("ssd", {"fallback": "wait\n" * 100}, ConstantPredictor(Signal.SOME))
    assert len(str(refusal.value)) < 100 and "\n" not in str(refusal.value)


def test_guesses_are_bounded_by_what_is_drafted_for_all_of_them() -> None:
    make_planner("ssd", {"gamma": 24, "num_guesses": 64}, ConstantPredictor(Signal.SOME))
    with pytest.raises(SettingError, match=r"gamma times num_guesses is 1600.*give 1536 at most"):
        make_planner("ssd", {"gamma": 40, "num_guesses": 40}, ConstantPredictor(Signal.SOME))


@dataclass(frozen=True, slots=True)
class PlainSettings(Settings):
    """Settings with plain types, as an author of a planner writes them first."""

    depth: int = 3
    share: float = 0.5
    is_bold: bool = False
    kind: Literal["a", "b"] = "a"
    name: str = "x"
    rows: Annotated[int, "of a step", Bounds(1, 4)] = 2


def test_settings_may_have_plain_types() -> None:
    assert PlainSettings(depth=-7, share=2, is_bold=True, kind="b", name="", rows=4).depth == -7
    for name, wrong, advice in (
        ("depth", 1.5, "give a whole number"),
        ("depth", True, "give a whole number"),
        ("share", math.inf, "give a number"),
        ("share", "1", "give a number"),
        ("is_bold", 1, "give true or false"),
        ("kind", "c", "choose from a, b"),
        ("name", 3, "give a text"),
        ("rows", 5, "give a whole number from 1 to 4"),
    ):
        with pytest.raises(SettingError, match=f"PlainSettings.{name} is .*; {advice}$"):
            PlainSettings(**{name: wrong})  # type: ignore[arg-type]


def test_what_a_setting_may_be_is_said_in_words() -> None:
    said = {field.name: describe_setting(PlainSettings, field.name) for field in fields(PlainSettings)}

    assert said == {
        "depth": "whole number",
        "share": "number",
        "is_bold": "true or false",
        "kind": "a, b",
        "name": "text",
        "rows": "whole number from 1 to 4",
    }


def test_a_setting_of_another_type_is_refused_with_the_types_there_are() -> None:
    @dataclass(frozen=True, slots=True)
    class Listed(Settings):
        sizes: tuple[int, ...] = ()

    with pytest.raises(SettingError, match="a setting is a bool, an int, a float, a str or a Literal"):
        Listed()
