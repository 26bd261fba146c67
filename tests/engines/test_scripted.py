"""The scripted engine passes the suite that every engine passes, and binds trees to handles without a leak."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from specbranch.core.costs import Costs, StepCost
from specbranch.core.draw import TopDraw
from specbranch.core.loop import Loop
from specbranch.core.session import Ending, Session
from specbranch.engines.binding import Binding
from specbranch.engines.protocol import DraftEngine, EngineFull
from specbranch.engines.scripted import ScriptedEngine, ScriptedTarget
from tests.engines.conformance import STATEFUL, EngineConformance, machine_for
from tests.toys import CheckedLane, greedy, planner_of, random_script, stream


class TestScriptedEngine(EngineConformance):
    @pytest.fixture
    def engine(self) -> DraftEngine:
        return ScriptedEngine(random_script(0, 6))


def test_random_histories_never_give_a_wrong_law_or_leave_a_handle() -> None:
    engine = ScriptedEngine(random_script(0, 6))

    run_state_machine_as_test(machine_for(engine, lambda a, b: a == b), settings=STATEFUL)

    assert engine.num_handles == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(["sps", "pearl", "ssd", "specbranch"]), c=st.floats(0.5, 6))
def test_handles_follow_the_trees_of_several_sessions_and_all_are_given_back(seed: int, name: str, c: float) -> None:
    """`CheckedLane` holds every law against a fresh reading of the text, so a wrong handle cannot hide."""
    base = random_script(seed, 5)
    costs = Costs()
    sessions = [
        Session([token], planner_of(name, {"gamma": 3}), TopDraw(), costs, Ending(max_new_tokens=12 + token))
        for token in range(3)
    ]
    lane = CheckedLane(random_script(seed + 1, 5, like=base, share=0.7), StepCost(1.0, 0.1))

    Loop(sessions, ScriptedTarget(greedy(base), StepCost(c), stream(0)), lane, costs).run()
    lane.close()

    assert lane.engine.num_handles == 0


def test_a_tree_on_one_chain_needs_one_handle() -> None:
    engine = ScriptedEngine(random_script(0, 5))
    binding = Binding(engine)
    session = Session([0, 1], planner_of("pearl", {"gamma": 4}), TopDraw(), Costs())
    session.propose()
    fed = []
    for _ in range(4):
        (feed,) = binding.feeds(session.tokens, session.tree, session.rows())
        fed.append(feed.row.tokens)
        session.grow(session.rows()[0], engine.run([feed.row])[0])

    assert fed[0] == (0, 1)
    assert all(len(tokens) == 1 for tokens in fed[1:])
    assert binding.num_handles == engine.num_handles == 1


def test_a_long_text_is_fed_in_pieces_and_the_last_one_brings_the_law() -> None:
    engine = ScriptedEngine(random_script(0, 5))
    binding = Binding(engine)
    session = Session([0, 1, 2, 3, 4], planner_of("pearl"), TopDraw(), Costs())
    session.propose()
    feeds = []
    for _ in range(3):
        feeds += binding.feeds(session.tokens, session.tree, session.rows(), 2)
        engine.run([feeds[-1].row])

    assert [feed.row.tokens for feed in feeds] == [(0, 1), (2, 3), (4,)]
    assert [feed.node for feed in feeds] == [None, None, session.tree.root]
    binding.close()
    assert engine.num_handles == 0


def test_a_verdict_in_the_middle_of_the_text_goes_on_from_what_was_fed() -> None:
    engine = ScriptedEngine(random_script(0, 5))
    binding = Binding(engine)
    session = Session([0, 1, 2, 3], planner_of("pearl"), TopDraw(), Costs())
    session.propose()
    (first,) = binding.feeds(session.tokens, session.tree, session.rows(), 2)
    engine.run([first.row])
    session.follow([4], 0)
    session.propose()
    (second,) = binding.feeds(session.tokens, session.tree, session.rows(), 2)

    assert second.row.tokens == (2, 3)
    assert second.node is None


class Crowded(ScriptedEngine):
    """An engine without room for a fork."""

    def fork(self, handle: int, length: int) -> int:
        raise EngineFull("no handle left")


def test_rows_that_find_no_handle_are_left_out() -> None:
    engine = Crowded(random_script(0, 5))
    binding = Binding(engine)
    session = Session([0], planner_of("ssd", {"gamma": 2, "num_guesses": 3, "fallback": "fast"}), TopDraw(), Costs())
    session.propose()
    for _ in range(2):
        nodes = session.rows()
        feeds = binding.feeds(session.tokens, session.tree, nodes)
        for feed, law in zip(feeds, engine.run([feed.row for feed in feeds]), strict=True):
            assert feed.node is not None
            session.grow(feed.node, law)

    assert len(nodes) == 3
    assert len(feeds) == 1
