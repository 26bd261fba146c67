"""What a session says before a verdict is what it says after it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specbranch.core.distribution import Distribution
from specbranch.core.planners import PLANNERS
from specbranch.core.session import Session, likely_verdicts
from tests.core.planners.test_planners import DOUBTFUL, SURE, run, session_of

LIKELY = Distribution((1, 2, 3), (0.6, 0.3, 0.1), 0.9)


def under_verification(distribution: Distribution = LIKELY, steps: int = 6, **settings: Any) -> Session:
    """A session of which up to three tokens are verified, with a tree behind and beside them."""
    session = session_of("budget", gamma=3, max_rows=4, **settings)
    session.skip_round()
    run(session, distribution, steps)
    session.commit([1])
    assert session.propose() == [1, 1, 1][: 3 if distribution is not DOUBTFUL else 1]
    run(session, distribution, steps)
    return session


def foreseen(session: Session) -> list[tuple[list[int], list[int]]]:
    return [(committed, [node.token for node in nodes]) for committed, nodes in session.drafts_by_verdict(16)]


@pytest.mark.parametrize("distribution", [SURE, LIKELY, DOUBTFUL], ids=["sure", "likely", "doubtful"])
@pytest.mark.parametrize("uses_text", [True, False])
def test_the_answer_after_a_verdict_is_the_one_that_was_told_before_it(
    distribution: Distribution, uses_text: bool
) -> None:
    told = foreseen(under_verification(distribution, uses_text=uses_text, uses_memory=False))

    assert told and all(proposal for _, proposal in told)
    for committed, proposal in told:
        session = under_verification(distribution, uses_text=uses_text, uses_memory=False)
        session.drafts_by_verdict(16)
        session.commit(committed)

        answer = session.propose()
        # What was committed may itself be repeated, which nobody could know before.
        assert answer is not None and answer[: len(proposal) if uses_text else None] == proposal


def test_outcomes_are_the_verdicts_that_may_come_the_likeliest_first() -> None:
    session = under_verification(DOUBTFUL)
    told = [node.path() for node in likely_verdicts(session.tree, 100, 0.01)]

    assert all(tokens[:-1] == [1] * (len(tokens) - 1) for tokens in told)  # some are accepted, then another token
    assert all(len(tokens) == 2 or tokens[-1] != 1 for tokens in told)
    assert len(set(map(tuple, told))) == len(told)
    chances = [math.prod(0.2 if token < 5 else 0.1 for token in tokens) for tokens in told]
    assert {len(tokens) for tokens in told} == {1, 2}
    assert max(chances) == pytest.approx(chances[0])
    assert likely_verdicts(session.tree, 2, 0.01) == likely_verdicts(session.tree, 100, 0.01)[:2]


def test_nothing_is_foreseen_while_the_target_waits_for_a_submission() -> None:
    session = session_of("budget")
    session.skip_round()
    run(session)
    session.commit([1])

    assert session.drafts_by_verdict(8) == []


@pytest.mark.parametrize("name", PLANNERS)
def test_a_planner_that_lets_the_target_wait_cannot_say_it_before(name: str) -> None:
    session = session_of(name)
    session.skip_round()
    run(session, steps=3)

    assert bool(session.drafts_by_verdict(8)) == (name == "budget")
    assert session._planner.may_block_target == (name not in ("budget", "none"))


def test_a_budget_that_waits_says_nothing_before() -> None:
    session = session_of("budget", wait_for_draft=True)
    session.skip_round()
    run(session, steps=3)

    assert session.drafts_by_verdict(8) == []


def test_no_more_is_submitted_nor_foreseen_than_the_request_allows() -> None:
    session = under_verification()
    session.max_draft_tokens = 2

    told = foreseen(session)
    assert max(len(proposal) for _, proposal in told) == 2
    session.commit(told[0][0])
    assert session.propose() == told[0][1]


def test_what_was_taken_is_under_verification() -> None:
    session = under_verification()
    (committed, proposal), *_ = foreseen(session)
    assert (committed, proposal) == ([2], [1, 1, 1])
    session.commit(committed)
    session.mark_submitted(proposal)

    assert session.submitted == proposal
    session.mark_submitted([5])  # it is said once
    assert session.submitted == proposal
    assert session.commit([*proposal, 9]) == [*proposal, 9]
    assert session.stats.accepted == 3


def test_what_the_tree_has_lost_does_not_count() -> None:
    session = under_verification()
    session.commit([1, 1, 1, 1])
    session.mark_submitted([1, 7, 7])

    assert session.submitted == [1]
