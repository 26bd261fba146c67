"""What a planner's decision costs: it is asked on every verdict of a serving engine, for every sequence."""

from __future__ import annotations

import statistics
import time

import pytest

from specbranch.core.costs import Costs
from specbranch.core.distribution import Distribution
from specbranch.core.draw import TopDraw
from specbranch.core.planners import PLANNERS, make_planner, setting_names
from specbranch.core.session import Session
from specbranch.core.verdict import Verdict
from tests.toys import SOME

BRANCHES, LENGTH = 24, 8
FLAT = Distribution(tuple(range(1, 33)), (1 / 32,) * 32, 3.4)


def grown_session(name: str) -> Session:
    """A session with 24 branches of 8 tokens below its submission, where the planner can look at all of them."""
    settings = {"gamma": LENGTH} if "gamma" in setting_names(name) else {}
    if name == "ssd":
        settings |= {"num_guesses": BRANCHES}
    if name == "specbranch":
        settings |= {"max_branches": BRANCHES + 1}
    session = Session([0], make_planner(name, settings, SOME), TopDraw(), Costs())
    session.grow(session.tree.root, FLAT)
    session.propose()
    session.stand_aside()
    for branch in session.tree.children(session.tree.root, BRANCHES):
        node = branch
        for _ in range(LENGTH - 1):
            node.distribution = FLAT
            (node,) = session.tree.walk(node, 1)
    return session


@pytest.mark.parametrize("name", PLANNERS)
def test_a_decision_costs_less_than_a_fifth_of_a_millisecond(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    prepare_s, verdict_s = [], []
    for _ in range(200):
        session = grown_session(name)
        start = time.perf_counter()
        session.rows()
        middle = time.perf_counter()
        session.commit(Verdict(0, 3).committed(session.submitted))
        session.propose()
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
