"""A session: rounds, endings and counters."""

from __future__ import annotations

import pytest

from specbranch.core.calibration import Calibration, Grounds
from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution, RequestSampling
from specbranch.core.node import GreedyPicker
from specbranch.core.round import AcceptanceHint, Signal, Stats, Verdict
from specbranch.core.session import Session, StopCondition
from tests.toys import nodes, planner_of

SURE = Distribution((1, 2), (0.9, 0.1), 0.3)


def submitted_session(ending: StopCondition | None = None) -> Session:
    """Three tokens under verification."""
    session = Session([0], planner_of("sps", {"gamma": 3}), GreedyPicker(), PairModel(), ending)
    while session.propose() is None:
        for node in session.rows():
            session.add_distribution(node, SURE)
    return session


def test_asking_again_repeats_the_proposal() -> None:
    session = submitted_session()

    assert session.propose() == session.propose() == [1, 1, 1]


def test_a_verdict_emits_what_it_accepts_and_its_own_token() -> None:
    session = submitted_session()

    assert session.commit(Verdict(2, 7).committed(session.submitted)) == [1, 1, 7]
    assert session.tokens == [0, 1, 1, 7]
    assert session.round.index == 1


def test_a_verdict_cannot_accept_what_was_not_submitted() -> None:
    with pytest.raises(ValueError, match="accepts 4 of 3"):
        Verdict(4, 7).committed([1, 1, 1])


def test_an_end_token_inside_the_submission_ends_the_sequence_there() -> None:
    session = submitted_session(StopCondition(eos_ids=frozenset({1})))

    assert session.commit(Verdict(3, 7).committed(session.submitted)) == [1]
    assert session.is_finished
    assert session.stats.accepted == session.stats.emitted == 1


def test_the_token_limit_inside_a_submission_holds() -> None:
    session = submitted_session(StopCondition(max_new_tokens=2))

    assert session.commit(Verdict(3, 7).committed(session.submitted)) == [1, 1]
    assert session.is_finished
    with pytest.raises(ValueError, match="the sequence is over"):
        session.commit([7])


def test_a_sequence_that_may_go_on_is_not_finished() -> None:
    session = submitted_session(StopCondition(max_new_tokens=5, eos_ids=frozenset({9})))

    session.commit(Verdict(3, 7).committed(session.submitted))

    assert not session.is_finished


@pytest.mark.parametrize(
    ("tokens", "num_submitted", "accepted", "rejected"),
    [
        ([1, 1, 7], 3, 2, 1),
        ([1, 1, 1, 7], 3, 3, 0),
        ([7], 3, 0, 3),
        ([7], 0, 0, 0),
        ([1, 7], 1, 1, 0),
        ([1, 9, 9, 9], 3, 1, 2),
    ],
)
def test_an_engine_that_drives_itself_reports_by_content(
    tokens: list[int], num_submitted: int, accepted: int, rejected: int
) -> None:
    session = submitted_session()

    session.commit(tokens, num_submitted)
    session.count_rollback()

    assert session.tokens == [0, *tokens]
    assert (session.stats.accepted, session.stats.rejected) == (accepted, rejected)
    assert session.round.index == 1


def test_an_outlook_is_for_the_round_that_begins_and_for_no_other() -> None:
    hint = AcceptanceHint(Signal.ALL)
    session = submitted_session()
    found = [session.round.hint]
    session.commit(Verdict(2, 7).committed(session.submitted), hint=hint)
    found.append(session.round.hint)
    session.commit([5], 0)
    found.append(session.round.hint)
    session.commit([5], 0, hint)
    found.append(session.round.hint)

    assert found == [None, hint, None, hint]


def test_an_engine_may_go_on_without_a_submission_but_not_without_a_token() -> None:
    session = Session([0], planner_of("sps"), GreedyPicker(), PairModel())
    session.commit([5, 6], 0)

    assert session.tokens == [0, 5, 6]
    with pytest.raises(ValueError, match="at least the target's own token"):
        session.commit([], 0)


def test_standing_aside_submits_nothing_and_only_while_the_target_waits() -> None:
    session = Session([0], planner_of("sps"), GreedyPicker(), PairModel())
    session.skip_round()
    other = submitted_session()
    other.skip_round()

    assert session.submitted == []
    assert other.submitted == [1, 1, 1]


def test_a_distribution_that_lands_after_a_rollback_does_no_harm() -> None:
    session = Session([0], planner_of("pearl", {"gamma": 4}), GreedyPicker(), PairModel())
    session.propose()
    session.add_distribution(session.rows()[0], SURE)
    late = session.rows()[0]
    session.commit(Verdict(0, 5).committed(session.submitted))

    session.add_distribution(late, SURE)

    assert session.propose() == []
    assert list(nodes(session.tree)) == []


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one committed token"):
        Session([], planner_of("none"), GreedyPicker(), PairModel())


def test_counters_add_up_and_ratios_follow() -> None:
    session = submitted_session()
    session.commit(Verdict(2, 7).committed(session.submitted))
    session.count_rollback()
    total = Stats(wait_s=1.0, target_s=3.0)
    total.add(session.stats)

    assert (total.rounds, total.submitted, total.accepted, total.emitted, total.rows) == (1, 3, 2, 3, 3)
    assert (total.used, total.rolled_back, total.hit_rate) == (2, 1, 0.0)
    assert (total.accepted_per_round, total.emitted_per_round, total.rows_per_round) == (2, 3, 3)
    assert total.wait_share == 0.25


def test_ratios_of_nothing_are_zero() -> None:
    stats = Stats()

    ratios = (stats.hit_rate, stats.accepted_per_round, stats.emitted_per_round, stats.rows_per_round, stats.wait_share)
    assert ratios == (0.0,) * 5


def test_a_sum_is_that_of_its_parts_and_a_difference_what_came_since() -> None:
    earlier, later = Stats(rounds=2, hits=1, wait_s=0.5), Stats(rounds=5, hits=3, rejected=4, wait_s=0.75)

    assert Stats.total([earlier, later]) == Stats(rounds=7, hits=4, rejected=4, wait_s=1.25)
    assert Stats.total([]) == Stats()
    assert later.since(earlier) == Stats(rounds=3, hits=2, rejected=4, wait_s=0.25)


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
    guessed = [calibration.guess_accept_prob(Grounds.of(source, 3, 1.0)) for source in ("text", "memory")]
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

    assert [(match.length, match.position) for match in costs.history.matches(ANSWER[:3])] == [(3, 3)]
    assert chances(costs.calibration) != chances(Calibration())


def test_a_sequence_that_is_secluded_later_leaves_what_it_taught_before() -> None:
    costs = PairModel()
    session = session_of(costs)
    answer(session, ANSWER)
    learned = chances(costs.calibration)
    session.seclude()
    session.seclude()  # it is said with every verdict
    answer(session, [1, 2, 3])

    assert costs.history.num_tokens == len(ANSWER) - 1
    assert chances(costs.calibration) == learned


def test_a_secluded_sequence_may_use_what_others_taught() -> None:
    costs = PairModel()
    answer(session_of(costs), ANSWER)
    session = session_of(costs)
    session.seclude()
    answer(session, ANSWER[:3])

    assert session.propose() == ANSWER[3:]
    assert session.round.costs.draft is costs.draft and session.round.costs.target is costs.target
