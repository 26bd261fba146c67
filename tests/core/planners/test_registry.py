"""Planners of other people: registered by name, used like ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from specbranch.core import planners
from specbranch.core.node import Node
from specbranch.core.planners import Planner, SettingError, Settings, make_planner, planner_names, register_planner
from specbranch.core.planners.baselines import PearlPlanner
from specbranch.core.round import Round
from tests.toys import SOME


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it."""
    monkeypatch.setattr(planners, "_PLANNERS", dict(planners._PLANNERS))
    yield


class Idle(Planner[Settings]):
    def submit(self, round: Round) -> Sequence[Node]:
        return ()

    def rows_to_run(self, round: Round) -> Sequence[Node]:
        return ()


def test_a_registered_planner_is_made_by_its_name() -> None:
    assert register_planner("idle")(Idle) is Idle

    assert isinstance(make_planner("idle", {}, SOME), Idle)
    assert planner_names()[-1] == "idle"


@pytest.mark.parametrize("name", ["idel", 7, None, ["pearl"]])
def test_what_is_no_name_of_a_planner_is_refused(name: Any) -> None:
    with pytest.raises(SettingError, match="no planner is called"):
        make_planner(name, {}, SOME)


def test_the_same_planner_may_be_registered_twice_but_no_name_has_two_planners() -> None:
    register_planner("idle")(Idle)
    register_planner("idle")(Idle)

    with pytest.raises(SettingError, match="'pearl' is the name of another planner already"):
        register_planner("pearl")(Idle)
    assert isinstance(make_planner("pearl", {}, SOME), PearlPlanner)


@pytest.mark.parametrize("name", ["", "x" * 65])
def test_a_name_that_the_wire_cannot_carry_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match="1 to 64 characters"):
        register_planner(name)


@pytest.mark.parametrize("planner", [object, "idle", None])
def test_only_planner_classes_can_be_registered(planner: Any) -> None:
    with pytest.raises(SettingError, match="subclass of specbranch"):
        register_planner("idle")(planner)
