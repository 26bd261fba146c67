"""What each planner submits and prepares, seen step by step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest

from specbranch.core.calibration import TEXT, Grounds, prior_guess_prob
from specbranch.core.costs import AnswerLength, PairModel, StepCost, StepTimeModel
from specbranch.core.distribution import Distribution, RequestSampling
from specbranch.core.node import GreedyPicker, Node
from specbranch.core.planners import PLANNERS, SettingError, draft_length_limit, make_planner, setting_names
from specbranch.core.planners.baselines import AdaedlPlanner, AdaedlSettings
from specbranch.core.planners.budget import frontier
from specbranch.core.planners.predictors import ConstantPredictor
from specbranch.core.planners.ssd import fan_out
from specbranch.core.round import Signal, Verdict
from specbranch.core.session import Session
from specbranch.core.tree import Tree
from tests.core.test_tree import branching_tree
from tests.toys import SOME

SURE = Distribution((1, 2, 3, 4, 5, 6), (0.9, 0.04, 0.03, 0.01, 0.01, 0.01), 0.5)
DOUBTFUL = Distribution((1, 2, 3, 4, 5, 6), (0.2, 0.2, 0.2, 0.2, 0.1, 0.1), 1.7)


def session_of(
    name: str,
    signal: Signal = Signal.SOME,
    costs: PairModel | None = None,
    prompt: Sequence[int] = (0,),
    **settings: Any,
) -> Session:
    if name == "budget":
        settings.setdefault("cost_aware", False)  # the first submissions of a target whose cost is unknown are short
    planner = make_planner(name, settings, ConstantPredictor(signal))
    return Session(prompt, planner, GreedyPicker(), costs or PairModel())


def paper_specbranch(signal: Signal = Signal.SOME, costs: PairModel | None = None, **settings: Any) -> Session:
    return session_of("specbranch", signal, costs, wait_for_draft=True, cost_aware=False, **settings)


def run(session: Session, distribution: Distribution = SURE, steps: int = 1) -> None:
    """Draft steps in which every row gets the same distribution."""
    for _ in range(steps):
        for node in session.rows():
            session.add_distribution(node, distribution)


def depths(rows: Sequence[Node]) -> list[int]:
    return [node.position for node in rows]


def test_none_submits_and_prepares_nothing() -> None:
    session = session_of("none")

    assert session.propose() == []
    assert session.rows() == ()


def test_sps_lets_the_target_wait_for_gamma_tokens_then_rests() -> None:
    session = session_of("sps", gamma=3)

    proposals = []
    for _ in range(4):
        proposals.append(session.propose())
        run(session)

    assert proposals == [None, None, None, [1, 1, 1]]
    assert session.rows() == ()


def test_adaedl_submits_up_to_and_with_the_first_doubtful_token() -> None:
    session = session_of("adaedl", gamma=9, threshold=0.5)
    run(session, SURE, 2)
    run(session, DOUBTFUL)

    assert session.propose() == [1, 1, 1]
    assert session.rows() == ()


def test_adaedl_stops_at_gamma_and_at_an_exhausted_distribution() -> None:
    session = session_of("adaedl", gamma=2)
    run(session, SURE, 2)
    empty = session_of("adaedl", gamma=2)
    run(empty, Distribution((), (), 0.0))

    assert session.propose() == [1, 1]
    assert empty.propose() == []


def test_adaedl_raises_its_threshold_when_too_much_is_refused_and_lowers_it_again() -> None:
    session = session_of("adaedl", gamma=1)
    planner = session._planner
    assert isinstance(planner, AdaedlPlanner)
    seen = [planner.threshold]
    for verdict in (Verdict(0, 2), Verdict(1, 2), Verdict(1, 2), Verdict(1, 2), Verdict(1, 2)):
        run(session)
        session.propose()
        session.commit(verdict.committed(session.submitted))
        seen.append(planner.threshold)

    assert seen[1] > seen[0]
    assert seen[-1] < seen[-2]


def test_adaedl_learns_nothing_from_an_empty_submission() -> None:
    session = session_of("adaedl")
    planner = session._planner
    assert isinstance(planner, AdaedlPlanner)
    session.skip_round()
    session.commit(Verdict(0, 2).committed(session.submitted))

    assert planner.threshold == AdaedlSettings().threshold


def test_pearl_submits_nothing_after_a_miss_and_drafts_a_window_meanwhile() -> None:
    session = session_of("pearl", gamma=3)

    assert session.propose() == []
    run(session, steps=9)
    assert session.tree.num_drafted == 3
    assert session.rows() == ()


def test_pearl_submits_the_rest_of_the_window_after_a_hit_and_goes_on_drafting() -> None:
    session = session_of("pearl", gamma=3)
    session.propose()
    run(session, steps=3)
    session.commit(Verdict(0, 1).committed(session.submitted))

    assert session.rows() == ()
    assert session.propose() == [1, 1]
    assert depths(session.rows()) == [3]


def test_ssd_waits_for_gamma_tokens_then_guesses_at_every_stop_point() -> None:
    session = session_of("ssd", gamma=2, num_guesses=6, acceptance=0.5, decay=1.0)
    run(session, steps=2)

    assert session.rows() == ()
    assert session.propose() == [1, 1]
    rows = session.rows()
    assert rows[0] is session.tree.end
    assert depths(rows) == [2, 1, 1, 2, 2]
    run(session, steps=1)
    assert sum(node.parent is session.tree.end for node in session.rows()) == 2


def test_ssd_fast_goes_without_a_draft_after_a_miss_and_jit_waits() -> None:
    fast = session_of("ssd", fallback="fast")
    jit = session_of("ssd", fallback="jit")

    assert fast.propose() == []
    assert jit.propose() is None
    assert depths(jit.rows()) == [0]


def test_ssd_submits_what_it_has_guessed_right() -> None:
    session = session_of("ssd", gamma=2, num_guesses=6, fallback="fast")
    session.propose()
    run(session, steps=4)
    session.commit(Verdict(0, 3).committed(session.submitted))

    assert session.round.is_hit
    assert session.propose() == [1, 1]


def test_fan_out_spends_the_whole_budget_and_falls_with_the_stop_point() -> None:
    counts = fan_out(24, 7, 0.8, 1.34)

    assert sum(counts) == 24
    assert list(counts[:-1]) == sorted(counts[:-1], reverse=True)
    assert counts[-1] > counts[-2]
    assert fan_out(5, 0, 0.8, 1.0) == (5,)


def test_specbranch_drafts_to_the_first_doubtful_distribution_and_branches_there() -> None:
    session = paper_specbranch(gamma=8, confidence=0.3, max_branches=5)
    run(session, SURE, 2)
    assert session.propose() is None
    run(session, DOUBTFUL)

    assert session.propose() == [1, 1]
    rows = session.rows()
    assert [node.token for node in rows] == [1, 2, 3, 4]
    assert all(node.parent is session.tree.end for node in rows)


def test_specbranch_without_hope_submits_nothing_and_branches_at_once() -> None:
    session = paper_specbranch(Signal.NONE, gamma=4)

    assert session.propose() == []
    assert depths(session.rows()) == [0]
    run(session, DOUBTFUL)
    assert depths(session.rows()) == [1, 1, 1, 1]


def test_specbranch_with_full_hope_drafts_a_whole_window_through_doubt() -> None:
    session = paper_specbranch(Signal.ALL, gamma=3)
    run(session, DOUBTFUL, 3)

    assert session.rows() == ()
    assert session.propose() == [1, 1, 1]


def test_a_sure_distribution_gets_one_branch() -> None:
    session = paper_specbranch(Signal.NONE, gamma=4)
    session.propose()
    run(session, SURE)

    assert len(session.rows()) == 1


def test_specbranch_cuts_the_surviving_branch_and_starts_the_target_at_once() -> None:
    """Posterior drafting: the cut comes after the verdict; what it leaves out stays as the first branch."""
    session = paper_specbranch(Signal.SOME, gamma=4, confidence=0.3)
    run(session, DOUBTFUL)
    session.propose()
    run(session, SURE)
    run(session, DOUBTFUL)
    session.commit(Verdict(0, 2).committed(session.submitted))

    assert session.round.is_hit
    assert session.propose() == [1]
    assert [node.token for node in session.rows()] == [1, 2, 3, 4]


def test_after_a_hit_specbranch_submits_what_is_there_without_a_wait() -> None:
    session = paper_specbranch(Signal.ALL, gamma=4)
    run(session, SURE, 4)
    session.propose()
    run(session, SURE, 3)
    session.commit(Verdict(4, 1).committed(session.submitted))

    assert session.propose() == [1, 1]
    assert depths(session.rows()) == [7]


@pytest.mark.parametrize(
    ("step_s", "length"), [(2.4, 2), (2.6, 3), (4 / 1.03, 4), (5 - 1e-15, 5), (5 + 1e-15, 5), (0.2, 1), (1e300, 8)]
)
def test_a_branch_has_as_many_tokens_as_draft_steps_fit_best_into_the_targets_step(step_s: float, length: int) -> None:
    """Never more than gamma, and at least its root. A ratio just below a whole number is that number."""
    costs = PairModel()
    costs.draft.observe(1, 1.0)
    costs.target.observe(1, 0, step_s)
    session = paper_specbranch(Signal.NONE, costs=costs, gamma=8)
    session.propose()
    run(session, SURE, 9)

    assert session.tree.num_drafted == length


def test_specbranch_stops_where_the_distribution_is_exhausted() -> None:
    session = paper_specbranch(Signal.ALL)
    run(session, Distribution((), (), 0.0))

    assert session.propose() == []


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_is_made_by_name_with_its_defaults(name: str) -> None:
    assert make_planner(name, {}, SOME).submit is not None


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("specbrunch", {}, "did you mean 'specbranch'"),
        ("zzz", {}, "it takes none, sps"),
        ("sps", {"gama": 3}, "did you mean 'gamma'"),
        ("none", {"gamma": 3}, "it takes none"),
        ("sps", {"gamma": 0}, "from 1 to 64"),
        ("pearl", {"gamma": 2.5}, "whole number"),
        ("specbranch", {"confidence": 1.5}, "from 0 to 1"),
        ("ssd", {"fallback": "wait"}, "choose from jit, fast"),
        ("ssd", {"acceptance": 1.0}, "between 0 and 1"),
    ],
)
def test_bad_names_and_values_raise_with_a_advice(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make_planner(name, settings, SOME)


def test_a_planner_has_its_own_longest_submission() -> None:
    assert [draft_length_limit(name) for name in ("budget", "pearl", "none")] == [15, 5, 8]


def test_settings_can_be_listed() -> None:
    assert setting_names("specbranch") == ("gamma", "confidence", "max_branches", "wait_for_draft", "cost_aware")


def test_after_a_miss_specbranch_does_not_let_the_target_wait() -> None:
    session = session_of("specbranch", gamma=4)
    session.propose()
    run(session, SURE, 2)
    session.commit(Verdict(0, 6).committed(session.submitted))

    assert not session.round.is_hit
    assert session.propose() == []
    assert depths(session.rows()) == [1]


def test_a_thrifty_specbranch_runs_the_rows_that_give_the_most_chance_for_their_time() -> None:
    """A second row that costs half of the first pays if it is at least half as likely; equal ones all pay."""
    costs = PairModel()
    for rows in (1, 2, 4):
        costs.draft.observe(rows, StepCost(1.0, 0.5).at(rows))
    for distribution, expected in ((SURE, [1]), (DOUBTFUL, [1, 2, 3, 4])):
        session = session_of("specbranch", Signal.NONE, costs, gamma=4, max_branches=4)
        session.propose()
        run(session, distribution)

        assert [node.token for node in session.rows()] == expected


def test_a_thrifty_specbranch_runs_one_row_while_it_knows_no_cost_and_stops_at_its_window() -> None:
    session = session_of("specbranch", Signal.NONE, gamma=2, max_branches=4)
    session.propose()
    run(session, SURE)
    assert depths(session.rows()) == [1]
    run(session, SURE, 2)

    assert depths(session.rows()) == [1]  # the chain is full; the likeliest of what is left is another root
    run(session, SURE, 40)
    assert session.rows() == []


def test_budget_submits_all_that_is_drafted_and_never_waits() -> None:
    session = session_of("budget", gamma=3)

    assert session.propose() == []
    run(session, SURE, 5)
    session.commit(Verdict(0, 1).committed(session.submitted))
    assert session.propose() == [1, 1, 1]


def test_budget_prepares_for_refusals_half_way_where_they_are_likely() -> None:
    """Rows cost next to nothing: behind a doubtful first token its rivals are worth more than the far end."""
    costs = PairModel()
    for rows in (1, 2, 4):
        costs.draft.observe(rows, 1.0)
    session = session_of("budget", costs=costs, gamma=2, max_rows=3)
    session.skip_round()
    session.commit(Verdict(0, 0).committed(session.submitted))
    even = Distribution((1, 2, 3), (0.5, 0.4, 0.1), 0.9)
    session.add_distribution(session.tree.root, even)
    session.propose()
    assert session.submitted == [1]
    run(session, SURE)

    # The submitted token was run, and with it 2, which stands where 1 may be refused.
    assert [child.distribution is not None for child in session.tree.root.children[:2]] == [True, True]
    assert depths(session.rows())[0] == session.tree.root.position + 2


def test_with_expensive_rows_budget_is_one_chain() -> None:
    costs = PairModel()
    for rows in (1, 2, 4):
        costs.draft.observe(rows, 2.0 * rows - 1)
    session = session_of("budget", costs=costs, gamma=4)
    session.skip_round()
    run(session, DOUBTFUL)

    assert len(session.rows()) == 1


def test_budget_submits_what_the_text_said_before_where_the_draft_has_nothing() -> None:
    session = session_of("budget", prompt=[5, 6, 7, 8, 9, 5, 6, 7], gamma=4)

    assert session.propose() == [8, 9, 5, 6]  # three tokens agree
    session.commit(Verdict(2, 4).committed(session.submitted))
    assert session.tokens[-3:] == [8, 9, 4]
    assert session.propose() == [], "8 9 4 never stood there"


def test_budget_lets_the_target_wait_if_it_is_told_to() -> None:
    session = session_of("budget", gamma=3, wait_for_draft=True)
    proposals = []
    for _ in range(4):
        proposals.append(session.propose())
        run(session)

    assert proposals == [None, None, None, [1, 1, 1]]


def test_budget_does_not_wait_for_what_will_hardly_come_true() -> None:
    session = session_of("budget", gamma=9, wait_for_draft=True)
    run(session, DOUBTFUL, 30)

    assert len(session.propose() or ()) in range(1, 9)


def costs_of_turns(draft_s: float, target_s: float = 5.0) -> PairModel:
    costs = PairModel()
    for _ in range(40):
        costs.draft.observe(1, draft_s)
        costs.target.observe(1, 0, target_s, 1)
        costs.target.observe(1, 3, target_s, 3)
    return costs


def test_in_turns_budget_lets_the_target_wait_for_as_many_draft_tokens_as_pay() -> None:
    lengths = []
    for draft_s in (0.01, 0.3, 1.0, 5.0):
        session = session_of("budget", costs=costs_of_turns(draft_s), gamma=15, takes_turns=True, uses_text=False)
        while (found := session.propose()) is None:
            run(session, DOUBTFUL)
        lengths.append(len(found))

    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[1] > lengths[2] > lengths[3] == 0


def test_in_turns_budget_drafts_only_while_the_target_waits_and_one_token_at_a_time() -> None:
    session = session_of("budget", costs=costs_of_turns(0.5), gamma=2, takes_turns=True)

    assert list(session.rows()) == [], "the target has not asked"
    assert session.propose() is None
    assert list(session.rows()) == [session.tree.root]
    run(session)
    assert session.propose() is None
    assert [node.position - session.tree.root.position for node in session.rows()] == [1]
    run(session)
    assert list(session.rows()) == [], "two tokens are drafted"
    assert session.propose() == [1, 1]
    assert list(session.rows()) == [], "the target computes"
    assert session.drafts_by_verdict(4) == []
    session.commit([1, 1, 1])
    assert list(session.rows()) == []


def test_in_turns_the_draft_stops_before_the_step_that_the_target_does_not_wait_for() -> None:
    """The draft thread asks for rows as soon as a step has ended, before the target got its reply."""
    lengths = []
    for draft_s in (0.3, 1.0):
        session = session_of("budget", costs=costs_of_turns(draft_s), gamma=15, takes_turns=True, uses_text=False)
        assert session.propose() is None
        while session.rows():
            run(session, DOUBTFUL)
        lengths.append(len(session.propose() or []))

    assert lengths[0] > lengths[1] > 0


def test_only_in_turns_budget_lets_the_target_wait_for_prefill() -> None:
    assert [session_of("budget", takes_turns=turns).waits_for_prefill for turns in (False, True)] == [False, True]
    assert not session_of("sps").waits_for_prefill


@pytest.mark.parametrize(
    ("prefill_s", "answer_len", "rounds"),
    [(0.005, 1, 0), (50.0, 1, 17), (50.0, 64, 0), (500.0, 64, None), (500.0, 1000, 0)],
)
def test_in_turns_a_prefill_waits_until_drafts_are_expected_to_save_its_time(
    prefill_s: float, answer_len: int, rounds: int | None
) -> None:
    """A step takes five seconds, and drafts are right in 0.7 of all cases, so with them a token takes 2.3 s."""
    costs = costs_of_turns(0.01)
    costs.draft.prefill_token_s = prefill_s / 100
    session = session_of("budget", costs=costs, gamma=2, takes_turns=True, uses_text=False, uses_memory=False)
    costs.answer_len = AnswerLength()
    costs.answer_len.add(answer_len - 100)  # it starts with one of 100 tokens
    for index in range(40):
        session.commit([index % 5], 0)
        session.round.num_unprefilled = 100
        if index and session.propose() is None:
            assert index - 1 == rounds
            assert session.propose() is None, "it goes on to wait in this round"
            assert session.rows()
            return
        assert not session.rows(), "nothing is prefilled before"
    assert rounds is None


def test_in_turns_time_is_worth_what_the_sequence_emits_in_it_and_not_what_others_do() -> None:
    """Another answer was a copy, of which a step has verified fifteen tokens."""
    costs = costs_of_turns(0.5)
    for _ in range(200):
        costs.target.observe(1, 15, 5.0, 16)
    session = session_of("budget", costs=costs, takes_turns=True, uses_text=False, uses_memory=False)
    waits = []
    for num_rounds in (2, 8):
        for _ in range(num_rounds):
            session.commit([1], 0)
        waits.append(session.propose() is None)

    assert waits == [False, True], "at first it is taken for a copy too"


def test_in_turns_a_slow_first_draft_step_does_not_keep_the_draft_off() -> None:
    """The first step after a start takes three times as long as later ones, and alone it would not pay."""
    costs = costs_of_turns(0.01)
    costs.draft = StepTimeModel()
    costs.draft.observe(1, 20.0)
    session = session_of("budget", costs=costs, takes_turns=True)

    assert session.propose() is None
    for _ in range(7):
        costs.draft.observe(1, 20.0)
    assert session_of("budget", costs=costs, takes_turns=True).propose() == []


def test_in_turns_a_draft_that_was_slow_for_a_while_is_tried_again() -> None:
    costs = costs_of_turns(20.0)
    num_tried = []
    for _ in range(10):  # answers of 32 rounds
        session = session_of("budget", costs=costs, takes_turns=True, uses_text=False, uses_memory=False)
        waits = 0
        for index in range(32):
            session.commit([index % 5], 0)
            if session.propose() is None:
                waits += 1
                run(session)
                costs.draft.observe(1, 0.5)
                while session.propose() is None:
                    run(session)
        num_tried.append(waits)

    assert num_tried[0] == 0
    assert num_tried[-1] > 16, num_tried


def test_in_turns_the_first_token_of_an_answer_waits_for_no_draft() -> None:
    session = session_of("budget", costs=costs_of_turns(0.01), takes_turns=True)
    session.commit([1])

    assert session.propose() == []
    session.commit([1])
    assert session.propose() is None


def test_in_turns_what_is_drafted_at_the_deadline_is_submitted() -> None:
    session = session_of("budget", costs=costs_of_turns(0.01), takes_turns=True, uses_text=False)
    assert session.propose() is None
    run(session)
    assert session.propose() is None
    session.submit_ready()

    assert session.submitted == [1]


def test_in_turns_budget_does_not_wait_where_the_text_is_as_good_a_guess() -> None:
    costs = costs_of_turns(1.0)
    for length in (3, 4, 5, 6) * 200:
        costs.calibration.observe_guess(Grounds.of(TEXT, length, 1.0), is_right=True)
    session = session_of("budget", prompt=[5, 6, 7, 8, 9, 5, 6, 7], costs=costs, gamma=4, takes_turns=True)

    assert session.propose() == [8, 9, 5, 6][: len(session.submitted)] != []


def test_in_turns_the_wait_makes_tokens_cheaper_than_the_targets_own_time_says() -> None:
    """A wait of two steps' time halves the rate, so a token of the target may cost twice as much draft time."""
    costs = costs_of_turns(0.5)
    rate = costs.target.rate
    for _ in range(200):
        costs.target.observe_wait(5.0)
    costs.target.observe(1, 3, 5.0, 3)

    assert costs.target.rate == pytest.approx(rate / 2, rel=0.05)


def test_budget_learns_that_a_text_does_not_repeat_itself() -> None:
    costs = PairModel()
    for _ in range(400):
        costs.calibration.observe_guess(Grounds.of(TEXT, 3, 1.0), is_right=False)
    session = session_of("budget", prompt=[5, 6, 7, 8, 9, 5, 6, 7], costs=costs, gamma=4)

    assert session.propose() == []


def test_what_was_planted_is_ranked_by_the_distribution_that_comes_later() -> None:
    """The text says 8, the draft is sure of 1: the chain turns to 1, and 8 stays as a rival."""
    session = session_of("budget", prompt=[5, 6, 7, 8, 9, 5, 6, 7], gamma=3)
    assert session.propose() == [8, 9, 5]
    session.add_distribution(session.tree.root, SURE)

    tree = session.tree
    assert [child.token for child in tree.root.children] == [1, 8]
    assert tree.path_prob(tree.root.children[0]) > 0.5 > tree.path_prob(tree.root.children[1])
    below = tree.root.children[1].children[0]
    assert tree.path_prob(below) < tree.path_prob(tree.root.children[1]), "what stands below sank with it"
    assert tree.submitted is not None and [node.token for node in tree.submitted] == [8, 9, 5]


def test_a_distribution_that_agrees_with_the_text_makes_it_likelier() -> None:
    session = session_of("budget", prompt=[5, 6, 1, 8, 9, 5, 6], gamma=3)
    session.propose()
    assert session.submitted[:1] == [1]
    before = session.tree.path_prob(session.tree.root.children[0])
    session.add_distribution(session.tree.root, SURE)

    assert [child.token for child in session.tree.root.children] == [1]
    assert session.tree.path_prob(session.tree.root.children[0]) > before


def test_budget_runs_what_the_text_says_behind_a_node_in_the_same_step() -> None:
    costs = PairModel()
    for rows in (1, 2, 4, 8):
        costs.draft.observe(rows, 1.0 + 0.01 * rows)
    session = session_of("budget", prompt=[5, 6, 7, 8, 9, 1, 2, 5, 6, 7], costs=costs, gamma=3)
    session.skip_round()
    chain = session.rows()

    assert [node.token for node in chain] == [7, 8, 9, 1]
    assert all(below.parent is above for above, below in itertools.pairwise(chain))
    for node in chain:  # the draft has other plans
        session.add_distribution(node, SURE)
    assert session.tree.root.children[0].token == 1
    session.commit([1], 0)
    assert session.submitted == [] and session.propose() != [8, 9, 1]


def test_guesses_that_the_target_confirms_or_not_are_learned_by_their_grounds() -> None:
    costs = PairModel()
    costs.draft.observe(1, 1.0)
    session = session_of("budget", prompt=[5, 6, 7, 8, 9, 1, 2, 5, 6, 7], costs=costs, gamma=3)
    calibration = costs.calibration
    session.skip_round()
    session.rows()
    session.commit([8, 4], 0)

    grounds = [Grounds.of(TEXT, length, 1.0) for length in (3, 4, 5)]
    changes = [calibration.guess_accept_prob(one) - prior_guess_prob(one) for one in grounds]
    assert changes[0] > 0 > changes[1], "right, then wrong"
    assert changes[2] == pytest.approx(0), "nobody saw whether the third guess was right"


@pytest.mark.parametrize(
    ("distribution", "cost_aware", "expected"),
    [(SURE, True, [1, 1, 1]), (DOUBTFUL, True, []), (DOUBTFUL, False, [1, 1, 1])],
)
def test_where_verifying_costs_time_budget_submits_what_is_worth_it(
    distribution: Distribution, cost_aware: bool, expected: list[int]
) -> None:
    costs = PairModel()
    for num_submitted in (0, 2, 4) * 4:  # of each of three sequences; a further token of each takes half a second
        costs.observe_step(3, 3 * num_submitted, 8, 1.0 + 0.5 * num_submitted)  # 2.67 tokens each in about 2 s
    session = session_of("budget", costs=costs, gamma=3, cost_aware=cost_aware)
    node = session.tree.root
    for _ in range(3):
        session.add_distribution(node, distribution)
        (node,) = session.tree.children(node, 1)

    assert costs.target.min_accept_prob == pytest.approx(0.67, abs=0.01)
    assert session.propose() == expected


@pytest.mark.parametrize(("min_accept_prob", "expected"), [(0.0, 3), (0.5, 1), (0.99, 0)])
def test_what_is_less_likely_than_asked_for_is_not_submitted_even_where_it_is_free(
    min_accept_prob: float, expected: int
) -> None:
    session = session_of("budget", gamma=3, min_accept_prob=min_accept_prob)
    node = session.tree.root
    for _ in range(3):
        session.add_distribution(node, Distribution((1, 2, 3), (0.65, 0.2, 0.15), 0.9))
        (node,) = session.tree.children(node, 1)

    assert len(session.propose() or ()) == expected


@pytest.mark.parametrize(("gamma", "cost_aware", "expected"), [(2, True, 0), (2, False, 2), (8, True, 8)])
def test_where_the_first_draft_token_is_expensive_budget_submits_much_or_nothing(
    gamma: int, cost_aware: bool, expected: int
) -> None:
    costs = PairModel()
    for num_submitted in (0, 1, 3, 11) * 4:
        costs.target.observe(1, num_submitted, 1.0 if not num_submitted else 3.5 + 0.1 * num_submitted)
    session = session_of("budget", costs=costs, gamma=gamma, cost_aware=cost_aware)
    node = session.tree.root
    for _ in range(gamma):
        session.add_distribution(node, SURE)
        (node,) = session.tree.children(node, 1)

    assert len(session.propose() or []) == expected


def test_in_turns_a_sampled_token_is_submitted_or_not_whichever_it_is() -> None:
    """After one of two equally likely tokens the text has a guess, so there the target does not wait for the draft.

    After the other it waits, here until the deadline. Both must end in the same decision about the sampled token.
    """
    for drafted_s, expected in ((0.32, set()), (0.1, {7, 8})):
        submitted = set()
        for seed in range(20):
            costs = PairModel()
            for length in (1, 2, 3) * 200:
                costs.sampled.observe_guess(Grounds.of(TEXT, length, 1.0), True)
            for _ in range(40):
                costs.draft.observe(1, 0.03)
                costs.target.observe(1, 0, 0.1, 1)
            for _ in range(40):
                costs.target.observe(1, 1, drafted_s, 2)
                costs.target.observe(1, 3, drafted_s + 0.0001, 2)
            prompt = [1, 5, 7, 9, 3, 2, 5, 7, 9, 3, 4, 6]
            session = session_of("budget", prompt=prompt, costs=costs, gamma=4, takes_turns=True, cost_aware=True)
            session.set_sampling(RequestSampling(1.0, seed=seed))
            assert session.propose() is None
            run(session, Distribution((7, 8), (0.5, 0.5), math.log(2)))
            if session.propose() is None:
                session.submit_ready()
            submitted |= set(session.submitted[:1])
        assert submitted == expected


def test_the_frontier_holds_the_likeliest_nodes_that_were_not_run() -> None:
    tree = branching_tree()
    found = frontier(tree, tree.root, 9, 5, 0.01)

    assert [(node.token, round(chance, 4)) for node, chance in found] == [(3, 0.125), (8, 0.0833)]
    assert [node.token for node, _ in frontier(tree, tree.root, 9, 1, 0.01)] == [3]
    assert [node.token for node, _ in frontier(tree, tree.root, 9, 5, 0.1)] == [3]
    (end,) = frontier(tree, found[1][0], 9, 5, 0.01)
    assert end == (found[1][0], 1.0)
    assert frontier(tree, tree.root, 2, 5, 0.01) == []


def test_the_frontier_draws_no_child_that_cannot_be_likely_enough() -> None:
    tree = Tree([9], GreedyPicker())
    tree.root.distribution = Distribution((1, 2, 3), (0.7, 0.2, 0.1), 1.0)

    assert [node.token for node, _ in frontier(tree, tree.root, 1, 5, 0.25)] == [1]
    assert tree.num_drafted == 2  # 0.3 is left after the first, so the second might have been likely enough
    assert [node.token for node, _ in frontier(tree, tree.root, 1, 5, 0.15)] == [1, 2]
    assert tree.num_drafted == 2
