"""Tokens drawn by chance in a session: what is drawn, what is told of it, what is learned from it."""

from __future__ import annotations

import pytest

from specbranch.core.calibration import Calibration, Grounds
from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution, RequestSampling, inverse_cdf, seeded_uniform
from specbranch.core.node import GreedyPicker, Node, RejectionPicker, WithoutReplacementPicker, rejection_picker
from specbranch.core.session import Session
from specbranch.core.tree import Tree
from tests.toys import planner_of, stream

GROUNDS = Grounds.of("text", 3, 1.0)
LIKELY = Distribution((1, 2, 3), (0.5, 0.3, 0.2), 1.0)
SURE = Distribution((1, 2), (0.999, 0.001), 0.01)
NOTHING = Distribution((), (), 0.0)


def sampled_session(seed: int = 3, gamma: int = 3) -> Session:
    session = Session([7, 8], planner_of("sps", {"gamma": gamma}), GreedyPicker(), PairModel())
    session.set_sampling(RequestSampling(1.0, seed=seed))
    return session


def fill(session: Session, steps: int = 3, distribution: Distribution = LIKELY) -> None:
    for _ in range(steps):
        for node in session.rows():
            session.add_distribution(node, distribution)


def test_tokens_are_drawn_by_the_number_of_their_place() -> None:
    session = sampled_session(seed=5)
    fill(session)
    tokens = session.propose()

    q = RequestSampling(1.0).apply(LIKELY)
    text = [7, 8]
    for _ in range(3):
        text.append(q.ids[inverse_cdf(q.probs, seeded_uniform(5, len(text), text))])
    assert tokens == text[2:]
    assert [one.ids for one in session.sampled_from if one] == [LIKELY.ids] * 3


def test_what_follows_is_drawn_the_same_way_after_a_verdict() -> None:
    session = sampled_session(seed=5)
    fill(session)
    tokens = session.propose() or []
    fill(session)
    session.commit([tokens[0], 9])
    fill(session)

    q = RequestSampling(1.0).apply(LIKELY)
    text = [7, 8, tokens[0], 9]
    expected = q.ids[inverse_cdf(q.probs, seeded_uniform(5, 4, text))]
    assert (session.propose() or [])[0] == expected


def test_a_sequence_may_change_how_it_is_sampled() -> None:
    session = sampled_session()
    session.set_sampling(RequestSampling(1.0, seed=3))  # the same changes nothing
    session.set_sampling(None)
    fill(session)

    assert not session.is_sampled
    assert session.propose() == [1, 1, 1] and session.sampled_from == [None] * 3


def test_where_the_likeliest_is_kept_more_often_it_is_proposed_as_certain() -> None:
    calibration = Calibration()
    for _ in range(200):
        calibration.observe_drawn(LIKELY, 3, 1, LIKELY)  # what was drawn is never kept
    draw = RejectionPicker(lambda one: one, lambda node, probs: 1, calibration)
    node = Node(0, None, 0, 0, distribution=LIKELY)

    assert draw.first(node, is_tested=True) == (1, None)
    assert RejectionPicker(lambda one: one, lambda node, probs: 1, Calibration()).first(node, is_tested=True) == (
        2,
        LIKELY,
    )
    assert draw.first(node, is_tested=False) == (1, None)


@pytest.mark.parametrize("distribution", [None, NOTHING])
def test_without_a_distribution_there_is_nothing_to_draw(distribution: Distribution | None) -> None:
    node = Node(0, None, 0, 0, distribution=distribution)

    assert GreedyPicker().first(node, is_tested=True) is None
    assert WithoutReplacementPicker(stream(1)).first(node, is_tested=True) is None
    assert rejection_picker(RequestSampling(1.0), [0], Calibration()).first(node, is_tested=True) is None


def test_behind_a_submission_the_likeliest_comes_first() -> None:
    """There the target says a token of its own; what was drawn before is one guess of it among others."""
    calibration = Calibration()
    tree = Tree([0], RejectionPicker(lambda one: one, lambda node, probs: 2, calibration), calibration)
    tree.set_distribution(tree.root, LIKELY)
    (drawn,) = tree.chain(tree.root, 1)
    assert (drawn.token, drawn.sampled_from) == (3, LIKELY)
    tree.submit(())

    assert drawn.sampled_from is None
    assert [child.token for child in tree.children(tree.root, 3)] == [3, 1, 2]
    later = Tree([0], RejectionPicker(lambda one: one, lambda node, probs: 2, calibration), calibration)
    later.submit(())
    later.set_distribution(later.root, LIKELY)
    assert [child.token for child in later.children(later.root, 3)] == [1, 2, 3]


def test_beside_a_drawn_token_the_others_share_what_it_leaves() -> None:
    calibration = Calibration()
    tree = Tree([0], RejectionPicker(lambda one: one, lambda node, probs: 1, calibration), calibration)
    tree.set_distribution(tree.root, LIKELY)
    first, second, third = tree.children(tree.root, 3)

    assert [first.token, second.token, third.token] == [2, 1, 3]
    kept = calibration.sampled_accept_prob(LIKELY)
    assert tree.path_prob(first) == pytest.approx(kept)
    assert tree.path_prob(second) == pytest.approx((1 - kept) * 0.5 / 0.7)
    assert tree.path_prob(third) == pytest.approx((1 - kept) * 0.2 / 0.7)


def test_a_guess_that_is_drawn_after_all_was_drawn() -> None:
    calibration = Calibration()
    tree = Tree([0], RejectionPicker(lambda one: one, lambda node, probs: 0, calibration), calibration)
    guess = tree.add_guess(tree.root, 1, GROUNDS)
    tree.add_guess(tree.root, 9, GROUNDS)
    tree.set_distribution(tree.root, LIKELY)

    assert tree.children(tree.root, 1) == [guess] and guess.sampled_from == LIKELY


def test_a_guess_under_verification_stays_certain() -> None:
    calibration = Calibration()
    tree = Tree([0], RejectionPicker(lambda one: one, lambda node, probs: 0, calibration), calibration)
    guess = tree.add_guess(tree.root, 1, GROUNDS)
    tree.submit([guess])
    tree.set_distribution(tree.root, LIKELY)

    assert guess.sampled_from is None


def test_a_distribution_without_tokens_leaves_guesses_alone() -> None:
    tree = Tree([0], GreedyPicker())
    guess = tree.add_guess(tree.root, 1, GROUNDS)
    tree.set_distribution(tree.root, NOTHING)

    assert tree.children(tree.root, 2) == [guess]


def test_how_often_drawn_tokens_are_kept_is_learned_where_they_were_tested() -> None:
    session = sampled_session(gamma=1)
    calibration = session.tree.calibration
    before = calibration.sampled_accept_prob(LIKELY)
    for _ in range(30):
        fill(session, 1)
        (token,) = session.propose() or [0]
        session.commit([4 if token != 4 else 5])  # never kept
    assert calibration.sampled_accept_prob(LIKELY) < 0.7 * before

    untested = sampled_session(gamma=1)
    chance = untested.tree.calibration.sampled_accept_prob(LIKELY)
    untested.skip_round()
    fill(untested, 1)
    untested.commit([1])
    assert untested.tree.calibration.sampled_accept_prob(LIKELY) == chance


def test_what_comes_instead_of_a_drawn_token_is_learned_by_its_rank() -> None:
    calibration = Calibration()
    for _ in range(100):
        calibration.observe_drawn(LIKELY, 3, 1, LIKELY)

    left = 1 - calibration.sampled_accept_prob(LIKELY)
    assert calibration.alternative_accept_prob(LIKELY, 3, 1, LIKELY) / left > 0.8
    assert calibration.alternative_accept_prob(LIKELY, 2, 1, LIKELY) / left < 0.2
    with pytest.raises(ValueError, match="not in the top-k"):
        calibration.alternative_accept_prob(LIKELY, 9, 1, LIKELY)


def test_a_submission_is_judged_at_its_first_drawn_token() -> None:
    """Budget with a price: what follows a drawn token does not decide whether it is tested."""
    costs = PairModel()
    for _ in range(40):
        costs.target.observe(1, 0, 1.0)
        costs.target.observe(1, 2, 1.2)
        costs.target.observe(1, 4, 1.4)
    submitted = []
    for behind in (SURE, Distribution(tuple(range(20)), (0.05,) * 20, 3.0)):
        session = Session([7], planner_of("budget", {"gamma": 4, "uses_text": False}), GreedyPicker(), costs)
        session.set_sampling(RequestSampling(1.0, seed=3))
        session.add_distribution(session.tree.root, LIKELY)
        (node,) = session.tree.chain(session.tree.root, 1)
        session.add_distribution(node, behind)
        submitted.append((session.propose() or [0])[0])
    assert submitted[0] == submitted[1] == node.token


def test_at_a_deadline_what_was_drafted_in_time_goes() -> None:
    session = sampled_session(gamma=4)
    fill(session, 2)
    assert session.propose() is None
    session.submit_ready()
    assert len(session.submitted) == 2
    session.submit_ready()  # said once
    short = sampled_session(gamma=4)
    short.max_draft_tokens = 1
    fill(short, 2)
    short.submit_ready()
    assert len(short.submitted) == 1
    certain = Session([7, 8], planner_of("sps", {"gamma": 4}), GreedyPicker(), PairModel())
    fill(certain, 2)
    certain.submit_ready()
    assert certain.submitted == []


def test_ranks_far_down_are_learned_as_one() -> None:
    calibration = Calibration()
    flat = Distribution(tuple(range(20)), (0.05,) * 20, 3.0)
    calibration.observe_drawn(flat, 15, 0, flat)

    assert calibration.alternative_accept_prob(flat, 15, 0, flat) == calibration.alternative_accept_prob(
        flat, 19, 0, flat
    )
