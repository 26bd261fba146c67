"""The scripted engine passes the suite that every engine passes, and binds trees to handles without a leak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from specbranch.core.calibration import TEXT, Grounds
from specbranch.core.costs import PairModel, StepCost
from specbranch.core.distribution import Dense, distribution_of
from specbranch.core.node import GreedyPicker, WithoutReplacementPicker
from specbranch.core.round import Verdict
from specbranch.core.session import Session, StopCondition
from specbranch.engines.base import DraftEngine
from specbranch.engines.tree_cache import NUM_FIRST, TreeCache
from specbranch.errors import EngineFull
from specbranch.simulation.loop import Loop
from specbranch.simulation.scripted import (
    Candidates,
    ScriptedEngine,
    ScriptedTarget,
    accept_prob,
    match,
    recovery_distribution,
    reject,
    reject_in_turn,
    renormalized_without,
)
from tests.engines.conformance import STATEFUL, EngineConformance, machine_for
from tests.enumeration import exact_distribution
from tests.toys import CheckedLane, greedy, planner_of, random_script, stream, text_to


class TestScriptedEngine(EngineConformance):
    @pytest.fixture
    def engine(self) -> DraftEngine:
        return ScriptedEngine(random_script(0, 6))


def test_random_histories_never_give_a_wrong_distribution_or_leave_a_handle() -> None:
    engine = ScriptedEngine(random_script(0, 6))

    run_state_machine_as_test(machine_for(engine, lambda a, b: a == b), settings=STATEFUL)

    assert engine.num_handles == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), name=st.sampled_from(["sps", "pearl", "ssd", "specbranch"]), c=st.floats(0.5, 6))
def test_handles_follow_the_trees_of_several_sessions_and_all_are_given_back(seed: int, name: str, c: float) -> None:
    """`CheckedLane` holds every distribution against a fresh reading of the text, so a wrong handle cannot hide."""
    base = random_script(seed, 5)
    costs = PairModel()
    sessions = [
        Session(
            [token], planner_of(name, {"gamma": 3}), GreedyPicker(), costs, StopCondition(max_new_tokens=12 + token)
        )
        for token in range(3)
    ]
    lane = CheckedLane(random_script(seed + 1, 5, like=base, share=0.7), StepCost(1.0, 0.1))

    Loop(sessions, ScriptedTarget(greedy(base), StepCost(c), stream(0)), lane, costs).run()
    lane.close()

    assert lane.engine.num_handles == 0


def test_a_tree_on_one_chain_needs_one_handle() -> None:
    engine = ScriptedEngine(random_script(0, 5))
    tree_cache = TreeCache(engine)
    session = Session([0, 1], planner_of("pearl", {"gamma": 4}), GreedyPicker(), PairModel())
    session.propose()
    fed = []
    for _ in range(4):
        (feed,) = tree_cache.rows_for(session.tokens, session.tree, session.rows())
        fed.append(feed.row.tokens)
        session.add_distribution(session.rows()[0], engine.run([feed.row])[0])

    assert fed[0] == (0, 1)
    assert all(len(tokens) == 1 for tokens in fed[1:])
    assert tree_cache.num_handles == engine.num_handles == 1


def test_a_long_text_is_fed_in_pieces_and_the_last_one_brings_the_distribution() -> None:
    engine = ScriptedEngine(random_script(0, 5))
    tree_cache = TreeCache(engine)
    session = Session([0, 1, 2, 3, 4], planner_of("pearl"), GreedyPicker(), PairModel())
    session.propose()
    feeds = []
    for _ in range(3):
        feeds += tree_cache.rows_for(session.tokens, session.tree, session.rows(), 2)
        engine.run([feeds[-1].row])

    assert [feed.row.tokens for feed in feeds] == [(0, 1), (2, 3), (4,)]
    assert [feed.nodes for feed in feeds] == [(None,), (None,), (session.tree.root,)]
    tree_cache.close()
    assert engine.num_handles == 0


def test_a_window_has_the_first_tokens_and_the_last_ones() -> None:
    engine = ScriptedEngine(random_script(0, 5))
    tree_cache = TreeCache(engine)
    tree_cache.window = 3
    session = Session([*range(5)] * 6, planner_of("pearl"), GreedyPicker(), PairModel())
    session.propose()

    assert tree_cache.num_unprefilled(session.tree) == 19
    (feed,) = tree_cache.rows_for(session.tokens, session.tree, session.rows())
    engine.run([feed.row])
    assert feed.row.tokens == (*session.tokens[:16], 2, 3, 4)
    assert (feed.nodes, tree_cache.num_skipped) == ((session.tree.root,), 11)
    assert tree_cache.fork_prefix(session.tokens, session.tree, 29) is None, "another session would miss the middle"


def test_a_verdict_in_the_middle_of_the_text_goes_on_from_what_was_fed() -> None:
    engine = ScriptedEngine(random_script(0, 5))
    tree_cache = TreeCache(engine)
    session = Session([0, 1, 2, 3], planner_of("pearl"), GreedyPicker(), PairModel())
    session.propose()
    (first,) = tree_cache.rows_for(session.tokens, session.tree, session.rows(), 2)
    engine.run([first.row])
    session.commit([4], 0)
    session.propose()
    (second,) = tree_cache.rows_for(session.tokens, session.tree, session.rows(), 2)

    assert second.row.tokens == (2, 3)
    assert second.nodes == (None,)


class Crowded(ScriptedEngine):
    """An engine without room for a fork."""

    def fork(self, handle: int, length: int) -> int:
        raise EngineFull("no handle left")


def test_rows_that_find_no_handle_are_left_out() -> None:
    engine = Crowded(random_script(0, 5))
    tree_cache = TreeCache(engine)
    session = Session(
        [0], planner_of("ssd", {"gamma": 2, "num_guesses": 3, "fallback": "fast"}), GreedyPicker(), PairModel()
    )
    session.propose()
    for _ in range(2):
        nodes = session.rows()
        feeds = tree_cache.rows_for(session.tokens, session.tree, nodes)
        for feed, distribution in zip(feeds, engine.run([feed.row for feed in feeds]), strict=True):
            (node,) = feed.nodes
            assert node is not None
            session.add_distribution(node, distribution)

    assert len(nodes) == 3
    assert len(feeds) == 1


class Legible(ScriptedEngine):
    """An engine whose handles can be read."""

    def text(self, handle: int) -> tuple[int, ...]:
        return self._cells[handle].state  # type: ignore[return-value]


def test_a_cache_is_lent_only_as_far_as_it_holds_the_committed_text() -> None:
    """The verdict is not settled yet: nothing but the tree's shape tells that the drafted tokens are lost."""
    engine = Legible(random_script(0, 5))
    tree_cache = TreeCache(engine)
    session = Session([0, 0, 0], planner_of("pearl", {"gamma": 4}), GreedyPicker(), PairModel())
    session.propose()
    for _ in range(4):
        draft_step(engine, tree_cache, session)
    kept, lost = (node.token for node in session.tree.chain(session.tree.root, 2))
    other = (lost + 1) % 5
    session.commit([kept, other, other], 0)

    assert tree_cache.fork_prefix(session.tokens, session.tree, 5) is None
    handle = tree_cache.fork_prefix(session.tokens, session.tree, 4)
    assert handle is not None and engine.text(handle) == (0, 0, 0, kept)


def seen_of(tree_cache: TreeCache, text: Sequence[int]) -> tuple[int, ...]:
    """What the draft sees of a text: all but the tokens that its window leaves out."""
    start = NUM_FIRST + tree_cache.num_skipped
    return (*text[:NUM_FIRST], *text[start:]) if tree_cache.num_skipped else tuple(text)


def draft_step(engine: Legible, tree_cache: TreeCache, session: Session, prefill_chunk: int = 1 << 30) -> None:
    """Run what the planner wants, whether verdicts are settled or not, and look at what every handle then holds."""
    nodes = session._planner.rows_to_run(session.round)
    feeds = tree_cache.rows_for(session.tokens, session.tree, nodes, prefill_chunk)
    distributions = iter(engine.run([feed.row for feed in feeds]))
    for feed in feeds:
        text = engine.text(feed.row.handle)
        if feed.nodes == (None,):
            assert text == seen_of(tree_cache, session.tokens)[: len(text)]
        elif feed.nodes[-1] is not None:
            assert text == seen_of(tree_cache, text_to(session, feed.nodes[-1]))
        for node in feed.nodes:
            distribution = next(distributions)
            if node is not None:
                assert distribution == engine._script.distribution(seen_of(tree_cache, text_to(session, node)))
                session.add_distribution(node, distribution)


def test_what_is_guessed_behind_a_node_runs_in_the_same_step_in_one_row() -> None:
    engine = Legible(random_script(0, 5))
    tree_cache = TreeCache(engine)
    session = Session([0, 1], planner_of("pearl", {"gamma": 4}), GreedyPicker(), PairModel())
    session.propose()
    tree = session.tree
    first = tree.add_guess(tree.root, 3, Grounds.of(TEXT, 3, 1.0))
    second, other = (
        tree.add_guess(first, 4, Grounds.of(TEXT, 3, 1.0)),
        tree.add_guess(first, 2, Grounds.of(TEXT, 3, 1.0)),
    )
    feeds = tree_cache.rows_for(session.tokens, tree, (tree.root, first, second, other))
    distributions = engine.run([feed.row for feed in feeds])

    assert [(feed.row.tokens, feed.row.num_outputs) for feed in feeds] == [((0, 1, 3, 4), 3)]
    assert feeds[0].nodes == (tree.root, first, second)
    assert distributions == [engine._script.distribution(text) for text in ((0, 1), (0, 1, 3), (0, 1, 3, 4))]

    for node, distribution in zip((tree.root, first, second), distributions, strict=True):
        session.add_distribution(node, distribution)
    third, beside = (
        tree.add_guess(second, 1, Grounds.of(TEXT, 3, 1.0)),
        tree.add_guess(other, 1, Grounds.of(TEXT, 3, 1.0)),
    )
    feeds = tree_cache.rows_for(session.tokens, tree, (third, other, beside))
    distributions = engine.run([feed.row for feed in feeds])

    assert [(feed.row.tokens, feed.nodes) for feed in feeds] == [((1,), (third,)), ((2, 1), (other, beside))]
    assert [engine.text(feed.row.handle) for feed in feeds] == [(0, 1, 3, 4, 1), (0, 1, 3, 2, 1)]
    assert len(distributions) == 3


def test_what_is_guessed_waits_while_a_long_text_is_read() -> None:
    engine = Legible(random_script(0, 5))
    tree_cache = TreeCache(engine)
    session = Session([0, 1, 2], planner_of("pearl", {"gamma": 4}), GreedyPicker(), PairModel())
    session.propose()
    guess = session.tree.add_guess(session.tree.root, 3, Grounds.of(TEXT, 3, 1.0))
    feeds = []
    for _ in range(2):
        feeds += tree_cache.rows_for(session.tokens, session.tree, (session.tree.root, guess), 2)
        engine.run([feeds[-1].row])

    assert [(feed.row.tokens, feed.nodes) for feed in feeds] == [
        ((0, 1), (None,)),
        ((2, 3), (session.tree.root, guess)),
    ]


@dataclass(frozen=True)
class Turn:
    """Draft steps, a verdict that keeps some of what was drafted, and what happens before drafting goes on."""

    num_steps: int
    num_kept: int
    others: list[int]
    is_settled: bool
    num_lent: int  # tokens less than all
    is_closed: bool


TURNS = st.builds(
    Turn,
    num_steps=st.integers(0, 5),
    num_kept=st.integers(0, 3),
    others=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    is_settled=st.booleans(),
    num_lent=st.integers(0, 4),
    is_closed=st.sampled_from([False, False, False, True]),
)


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(["pearl", "ssd", "specbranch", "budget"]),
    prompt=st.lists(st.integers(0, 2), min_size=5, max_size=7),
    num_repeats=st.sampled_from([1, 5]),
    window=st.sampled_from([None, 1, 3, 30]),
    prefill_chunk=st.sampled_from([2, 19, 100]),
    turns=st.lists(TURNS, min_size=1, max_size=8),
)
def test_whatever_is_fed_or_lent_holds_the_committed_text(
    name: str, prompt: list[int], num_repeats: int, window: int | None, prefill_chunk: int, turns: list[Turn]
) -> None:
    engine = Legible(random_script(1, 3))
    tree_cache = TreeCache(engine)
    tree_cache.window = window
    session = Session(prompt * num_repeats, planner_of(name, {"gamma": 3}), GreedyPicker(), PairModel())
    for turn in turns:
        session.propose()
        for _ in range(turn.num_steps):
            draft_step(engine, tree_cache, session, prefill_chunk)
            session.propose()
        kept = [node.token for node in session.tree.chain(session.tree.root, turn.num_kept)]
        session.commit([*kept, *turn.others], len(session.submitted))
        if turn.is_settled:
            session.count_rollback()
        length = len(session.tokens) - turn.num_lent
        handle = tree_cache.fork_prefix(session.tokens, session.tree, length)
        if handle is not None:
            assert engine.text(handle) == tuple(session.tokens[:length])
            engine.close(handle)
        if turn.is_closed:
            tree_cache.close()
        assert engine.num_handles == tree_cache.num_handles


@st.composite
def distributions(draw: st.DrawFn, size: int = 3) -> Dense:
    parts = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size).filter(any))
    return np.array([Fraction(part, sum(parts)) for part in parts], dtype=object)


@given(p=distributions(), q=distributions())
def test_kept_mass_and_recovered_mass_make_the_target_distribution(p: Dense, q: Dense) -> None:
    kept = np.array([q[i] * accept_prob(p, q, i) if q[i] else Fraction(0) for i in range(3)], dtype=object)
    rejected = 1 - kept.sum()

    assert (kept + rejected * recovery_distribution(p, q) == p).all()


@given(p=distributions(), q=distributions(), count=st.integers(0, 3))
def test_a_root_drawn_without_replacement_and_chosen_by_rule_b_follows_the_target_distribution(
    p: Dense, q: Dense, count: int
) -> None:
    distribution = distribution_of(list(q))

    def run(chance: object) -> int:
        tokens: list[int] = []
        for _ in range(count):
            drawn = WithoutReplacementPicker(chance).further(distribution, tokens)  # type: ignore[arg-type]
            if drawn is not None:
                tokens.append(drawn)
        return reject_in_turn(p, Candidates(q, tuple(tokens)), chance)  # type: ignore[arg-type]

    found = exact_distribution(run)
    assert [found.get(i, Fraction(0)) for i in range(3)] == list(p)


def test_match_accepts_up_to_the_first_difference() -> None:
    assert match([4, 5, 6], [4, 5, 7, 8].__getitem__) == Verdict(2, 7)
    assert match([4, 5, 6], [4, 5, 6, 8].__getitem__) == Verdict(3, 8)
    assert match([], [4].__getitem__) == Verdict(0, 4)


def test_a_verdict_commits_what_it_accepts_and_the_targets_token() -> None:
    assert Verdict(1, 9).committed([4, 5, 6]) == [4, 9]


def test_rule_b_needs_an_offer_for_the_branch_point() -> None:
    with pytest.raises(ValueError, match="at least one offer"):
        reject([], [], chance=None)  # type: ignore[arg-type]


def test_equal_distributions_recover_to_themselves_and_an_exhausted_distribution_stays_empty() -> None:
    """Only rounding can ask for these; they must not divide by zero."""
    p = np.array([0.5, 0.5])

    assert (recovery_distribution(p, p) == p).all()
    assert (renormalized_without(np.array([1.0, 0.0]), 0) == 0).all()
