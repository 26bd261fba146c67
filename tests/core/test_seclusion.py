"""A sequence whose random numbers may come again teaches no other: drafts must not depend on what will test them."""

from __future__ import annotations

import pytest

from specbranch.core.calibration import Calibration
from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution, RequestSampling
from specbranch.core.node import GreedyPicker
from specbranch.core.session import Session
from tests.toys import planner_of

LIKELY = Distribution((1, 2, 3), (0.6, 0.3, 0.1), 0.9)
ANSWER = [4, 5, 6, 7, 8]


def session_of(costs: PairModel, sampling: RequestSampling | None = None) -> Session:
    session = Session([9, 9], planner_of("budget", {"gamma": 3, "cost_aware": False}), GreedyPicker(), costs)
    session.set_sampling(sampling)
    session.skip_round()
    return session


def answer(session: Session, tokens: list[int]) -> None:
    """Let a sequence go on by these tokens, one at a time, with a draft that always says the same."""
    for token in tokens:
        for node in session.rows():
            session.add_distribution(node, LIKELY)
        session.commit([token], 0)
    session.count_rollback()


def chances(calibration: Calibration) -> list[float]:
    """What was learned."""
    guessed = [calibration.guess_accept_prob((source, 3)) for source in ("text", "memory")]
    return [
        calibration.top1_accept_prob(LIKELY),
        calibration.accept_prob(LIKELY, 2),
        calibration.sampled_accept_prob(LIKELY),
        *guessed,
    ]


@pytest.mark.parametrize("sampling", [None, RequestSampling(1.0, seed=3)])
def test_a_secluded_sequence_is_not_remembered_and_not_learned_from(sampling: RequestSampling | None) -> None:
    costs = PairModel()
    session = session_of(costs, sampling)
    session.seclude()
    answer(session, ANSWER)

    assert costs.history.num_tokens == 0
    assert chances(costs.calibration) == chances(costs.sampled) == chances(Calibration())
    used = session.round.costs  # what it learns for itself
    assert chances(used.calibration if sampling is None else used.sampled) != chances(Calibration())


def test_other_sequences_are_remembered_and_learned_from() -> None:
    costs = PairModel()
    answer(session_of(costs), ANSWER)

    assert costs.history.continuation(ANSWER[:3], 9) == (ANSWER[3:], 3)
    assert chances(costs.calibration) != chances(Calibration())


def test_a_sequence_that_is_secluded_later_leaves_what_it_taught_before() -> None:
    costs = PairModel()
    session = session_of(costs)
    answer(session, ANSWER)
    learned = chances(costs.calibration)
    session.seclude()
    session.seclude()  # it is said with every verdict
    answer(session, [1, 2, 3])

    assert costs.history.num_tokens == len(ANSWER)
    assert chances(costs.calibration) == learned


def test_a_secluded_sequence_may_use_what_others_taught() -> None:
    costs = PairModel()
    answer(session_of(costs), ANSWER)
    session = session_of(costs)
    session.seclude()
    answer(session, ANSWER[:3])

    assert session.propose() == ANSWER[3:]
    assert session.round.costs.draft is costs.draft and session.round.costs.target is costs.target
