"""What a planner's decision costs: it is asked on every verdict of a serving engine, for every sequence."""

from __future__ import annotations

import statistics
import time
from functools import partial

import pytest

from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution
from specbranch.core.node import GreedyPicker
from specbranch.core.planners import PLANNERS, make_planner, setting_names
from specbranch.core.round import Verdict
from specbranch.core.session import Session
from tests.counting import num_calls
from tests.toys import SOME

BRANCHES, LENGTH = 24, 8
FLAT = Distribution(tuple(range(1, 33)), (1 / 32,) * 32, 3.4)


def grown_session(name: str, num_branches: int = BRANCHES) -> Session:
    """A session with branches of 8 tokens below its submission, where the planner can look at all of them."""
    settings = {"gamma": LENGTH} if "gamma" in setting_names(name) else {}
    if name == "ssd":
        settings |= {"num_guesses": num_branches}
    if name == "specbranch":
        settings |= {"max_branches": num_branches + 1}
    session = Session([0], make_planner(name, settings, SOME), GreedyPicker(), PairModel())
    session.add_distribution(session.tree.root, FLAT)
    session.propose()
    session.skip_round()
    for branch in session.tree.children(session.tree.root, num_branches):
        node = branch
        for _ in range(LENGTH - 1):
            node.distribution = FLAT
            (node,) = session.tree.chain(node, 1)
    return session


def decide(session: Session) -> None:
    """Tell a verdict and take the proposal that follows."""
    session.commit(Verdict(0, 3).committed(session.submitted))
    session.propose()


@pytest.mark.parametrize("name", PLANNERS)
def test_a_decision_makes_few_calls_and_preparing_grows_with_the_branches(name: str) -> None:
    """Counted, so that it holds on any machine: a verdict costs its own length, whatever was drafted beside it."""
    sessions = [grown_session(name, num_branches) for num_branches in (BRANCHES // 2, BRANCHES)]
    few, many = (num_calls(session.rows) for session in sessions)
    verdicts = [num_calls(partial(decide, session)) for session in sessions]

    assert many <= 2 * few and many < 1000
    assert verdicts[0] == verdicts[1] < 200


@pytest.mark.nightly
@pytest.mark.parametrize("name", PLANNERS)
def test_a_decision_costs_less_than_a_fifth_of_a_millisecond(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_s, verdict_s = [], []
    for _ in range(200):
        session = grown_session(name)
        start = time.perf_counter()
        session.rows()
        middle = time.perf_counter()
        decide(session)
        end = time.perf_counter()
        prepare_s.append(middle - start)
        verdict_s.append(end - middle)

    # The median is what is printed; the least of many is what a busy machine cannot change.
    prepare, verdict = statistics.median(prepare_s) * 1e6, statistics.median(verdict_s) * 1e6
    with capsys.disabled():
        print(
            f"\n{name}, {BRANCHES} branches of {LENGTH}: prepare {prepare:.0f} us, verdict to proposal {verdict:.0f} us"
        )
    assert min(prepare_s) < 200e-6
    assert min(verdict_s) < 200e-6
