"""The output distribution of every method equals the target's, with no tolerance; and breaking a rule is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specbranch.core.distribution import RandomSource
from specbranch.core.node import Node
from specbranch.core.planner import Planner, Predictor
from specbranch.core.planners.budget import BudgetPlanner, BudgetSettings
from specbranch.core.planners.predictors import ConstantPredictor, RandomPredictor
from specbranch.core.planners.specbranch import SpecbranchPlanner, SpecbranchSettings
from specbranch.core.round import Round, Signal, Verdict
from specbranch.core.session import Session, StopCondition
from specbranch.simulation import scripted
from specbranch.simulation.scripted import Rule, TextScript, served_candidates
from tests.enumeration import exact_distribution
from tests.toys import (
    assert_every_drafted_token_is_accounted_for,
    decode,
    greedy,
    misaligned_pair,
    plain,
    planner_of,
    random_script,
    stream,
    three_token_pair,
    two_token_pair,
)

Pair = tuple[TextScript, TextScript]
Make = Callable[[RandomSource], Planner[Any]]

_PREDICTORS: dict[str, Callable[[RandomSource], Predictor]] = {
    "always none": lambda chance: ConstantPredictor(Signal.NONE),
    "confidence": lambda chance: ConstantPredictor(Signal.SOME),
    "always all": lambda chance: ConstantPredictor(Signal.ALL),
    "random": RandomPredictor,
}


def _methods() -> Iterator[Any]:
    plain_settings: list[tuple[str, dict[str, Any]]] = [
        ("none", {}),
        ("sps", {"gamma": 2}),
        ("adaedl", {"gamma": 2, "threshold": 0.65}),
        ("pearl", {"gamma": 2}),
        ("ssd", {"gamma": 1, "num_guesses": 2}),
        ("ssd", {"gamma": 2, "num_guesses": 2, "fallback": "fast"}),
        ("budget", {"gamma": 2, "max_rows": 2, "uses_text": False, "uses_memory": False}),
        ("budget", {"gamma": 2, "takes_turns": True, "uses_text": False, "uses_memory": False}),
    ]
    for name, chosen in plain_settings:
        yield pytest.param(
            lambda chance, n=name, s=chosen: planner_of(n, s), id=f"{name} {' '.join(map(str, chosen.values()))}"
        )
    for label, predictor in _PREDICTORS.items():
        for form, is_ours in (("paper", False), ("ours", True)):
            chosen = {
                "gamma": 2,
                "confidence": 0.6,
                "max_branches": 4,
                "wait_for_draft": not is_ours,
                "cost_aware": is_ours,
            }
            yield pytest.param(
                lambda chance, s=chosen, p=predictor: planner_of("specbranch", s, p(chance)),
                id=f"specbranch {form} {label}",
            )


METHODS = list(_methods())
PAPER = {"max_branches": 6, "wait_for_draft": True, "cost_aware": False}


def emitted_distribution(
    pair: Pair, make: Make, rule: Rule, ending: StopCondition, c: float | None = None
) -> dict[tuple[int, ...], Fraction]:
    target, draft = pair
    # Rule B draws drafted tokens by chance; a shorter overlap keeps the number of ways in bounds.
    c = c or (2.0 if rule == "match" else 1.0)
    return exact_distribution(
        lambda chance: tuple(decode(target, draft, make(chance), chance, rule=rule, c=c, ending=ending).output)
    )


def target_distribution(pair: Pair, ending: StopCondition) -> dict[tuple[int, ...], Fraction]:
    return exact_distribution(lambda chance: tuple(plain(pair[0], chance, (0,), ending)))


@pytest.mark.parametrize("make", METHODS)
@pytest.mark.parametrize("rule", ["match", "reject", "serve"])
def test_emitted_sequences_follow_the_target_distribution_exactly(make: Make, rule: Rule) -> None:
    """Two tokens, three of them emitted: every way that chance can go, in rational numbers."""
    ending = StopCondition(max_new_tokens=3)

    assert emitted_distribution(two_token_pair(), make, rule, ending) == target_distribution(two_token_pair(), ending)


@pytest.mark.parametrize(
    ("make", "length"), [pytest.param(*m.values, 4 if "random" in str(m.id) else 5, id=m.id) for m in METHODS]
)
def test_the_distribution_is_exact_for_rule_a_on_three_tokens_with_an_end_token(make: Make, length: int) -> None:
    """The end token may be submitted, may be a root, and may follow a cut; what stands behind it is never emitted.

    Where the predictor is random too, each further token makes more than three times as many ways.
    """
    ending = StopCondition(max_new_tokens=length, eos_ids=frozenset({2}))

    assert emitted_distribution(three_token_pair(), make, "match", ending) == target_distribution(
        three_token_pair(), ending
    )


def test_what_is_guessed_leaves_the_distribution_exact() -> None:
    """Two tokens repeat themselves at once: after the second most submissions hold some that no draft proposed.

    And many draft steps run guesses behind the node that they follow.
    """
    ending = StopCondition(max_new_tokens=6)
    planted: list[int] = []
    deepened: list[bool] = []

    class Noting(BudgetPlanner):
        def submit(self, round: Round) -> Sequence[Node]:
            chain = super().submit(round) or ()
            planted.append(sum(node.parent is not None and node.parent.distribution is None for node in chain))
            return chain

        def rows_to_run(self, round: Round) -> Sequence[Node]:
            nodes = super().rows_to_run(round)
            deepened.append(any(node.parent in nodes for node in nodes))
            return nodes

    def make(chance: RandomSource) -> Planner[Any]:
        settings = BudgetSettings(gamma=3, max_rows=2, cost_aware=False)  # else few are submitted so early
        return Noting(settings, ConstantPredictor(Signal.SOME))

    pair = two_token_pair()
    assert emitted_distribution(pair, make, "match", ending) == target_distribution(pair, ending)
    assert sum(planted) > len(planted) / 4
    assert sum(deepened) > 20


@pytest.mark.parametrize("make", [m for m in METHODS if "random" not in str(m.id) and "ssd" not in str(m.id)])
def test_the_distribution_is_exact_for_rule_b_on_three_tokens_with_an_end_token(make: Make) -> None:
    ending = StopCondition(max_new_tokens=2, eos_ids=frozenset({2}))

    assert emitted_distribution(three_token_pair(), make, "reject", ending) == target_distribution(
        three_token_pair(), ending
    )


@pytest.mark.parametrize("make", [m for m in METHODS if "random" not in str(m.id) and "ssd" not in str(m.id)])
def test_the_distribution_is_exact_for_the_served_form_of_rule_b_on_three_tokens(make: Make) -> None:
    ending = StopCondition(max_new_tokens=3, eos_ids=frozenset({2}))

    assert emitted_distribution(three_token_pair(), make, "serve", ending) == target_distribution(
        three_token_pair(), ending
    )


@pytest.mark.parametrize(("cost_aware", "c"), [(False, 2.0), (True, 1.5)])
def test_guesses_and_drawn_tokens_in_one_submission_leave_the_distribution_exact(cost_aware: bool, c: float) -> None:
    """What nobody drew is certain: kept with the target's own probability. Both kinds are in many submissions."""
    ending = StopCondition(max_new_tokens=4)
    kinds: list[tuple[bool, ...]] = []

    class Noting(BudgetPlanner):
        def submit(self, round: Round) -> Sequence[Node]:
            chain = super().submit(round) or ()
            kinds.append(tuple(node.sampled_from is not None for node in chain))
            return chain

    def make(chance: RandomSource) -> Planner[Any]:
        return Noting(BudgetSettings(gamma=3, max_rows=2, cost_aware=cost_aware), ConstantPredictor(Signal.SOME))

    pair = two_token_pair()
    assert emitted_distribution(pair, make, "serve", ending, c) == target_distribution(pair, ending)
    assert any(len(set(kind)) == 2 for kind in kinds)


def test_a_distribution_that_was_not_drawn_from_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that tells another temperature than it draws at."""

    def wrong(session: Session, vocab_len: int) -> list[scripted.Candidates]:
        told = served_candidates(session, vocab_len)
        return [
            scripted.Candidates(offer.distribution**2 / (offer.distribution**2).sum(), offer.tokens)
            if offer.tokens
            else offer
            for offer in told
        ]

    monkeypatch.setattr("specbranch.simulation.scripted.served_candidates", wrong)
    ending = StopCondition(max_new_tokens=3)
    make = lambda chance: planner_of("sps", {"gamma": 2})  # noqa: E731

    assert emitted_distribution(two_token_pair(), make, "serve", ending) != target_distribution(
        two_token_pair(), ending
    )


def test_testing_a_drawn_token_by_what_follows_it_is_noticed() -> None:
    """Why `budget` may not ask what the whole chain would bring: the chain depends on its first token."""

    class Choosy(SpecbranchPlanner):
        def submit(self, round: Round) -> list[Node] | None:
            tree = round.tree
            if tree.next_unrun(tree.root, 2):
                return None
            chain = tree.chain(tree.root, 2)
            last = chain[-1].parent
            is_sure = last is not None and last.distribution is not None and last.distribution.confidence > 0.6
            return chain if is_sure else []

        def rows_to_run(self, round: Round) -> list[Node]:
            tip = round.tree.next_unrun(round.tree.root if round.is_waiting else round.tree.end, 2)
            return [tip] if tip else []

    def make(chance: RandomSource) -> Planner[Any]:
        return Choosy(SpecbranchSettings(gamma=2), ConstantPredictor(Signal.SOME))

    ending = StopCondition(max_new_tokens=3)
    assert emitted_distribution(two_token_pair(), make, "match", ending) == target_distribution(
        two_token_pair(), ending
    )
    assert emitted_distribution(two_token_pair(), make, "serve", ending) != target_distribution(
        two_token_pair(), ending
    )


class TokenStop(SpecbranchPlanner):
    """The mistake that invites itself: the drawn token's own probability decides if it is submitted or forgotten."""

    def submit(self, round: Round) -> list[Node] | None:
        chain: list[Node] = []
        node = round.tree.root
        while len(chain) < 2:
            if node.distribution is None:
                return chain if round.is_hit else None
            (child,) = round.tree.children(node, 1)
            if dict(zip(node.distribution.ids, node.distribution.probs, strict=True))[child.token] < Fraction(1, 2):
                node.children.clear()
                break
            chain.append(child)
            node = child
        return chain

    def rows_to_run(self, round: Round) -> list[Node]:
        tip = round.tree.next_unrun(round.tree.root if round.is_waiting else round.tree.end, 2)
        return [tip] if tip else []


def _token_stop(chance: RandomSource) -> Planner[Any]:
    return TokenStop(SpecbranchSettings(gamma=2), ConstantPredictor(Signal.SOME))


def test_stopping_on_the_token_instead_of_the_distribution_is_noticed_under_rule_b() -> None:
    ending = StopCondition(max_new_tokens=3)

    assert emitted_distribution(two_token_pair(), _token_stop, "reject", ending) != target_distribution(
        two_token_pair(), ending
    )


def test_stopping_on_the_token_is_noticed_in_the_served_form() -> None:
    ending = StopCondition(max_new_tokens=3)

    assert emitted_distribution(two_token_pair(), _token_stop, "serve", ending) != target_distribution(
        two_token_pair(), ending
    )


def test_rule_a_is_immune_to_stopping_on_the_token() -> None:
    ending = StopCondition(max_new_tokens=3)

    assert emitted_distribution(two_token_pair(), _token_stop, "match", ending) == target_distribution(
        two_token_pair(), ending
    )


_MUTATIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "accepts everything": ("accept_prob", lambda p, q, token: Fraction(1)),
    "ratio upside down": ("accept_prob", lambda p, q, token: min(Fraction(1), q[token] / p[token] if p[token] else 1)),
    "keeps by p alone": ("accept_prob", lambda p, q, token: p[token]),
    "recovers from p": ("recovery_distribution", lambda p, q: p),
    "recovers from q": ("recovery_distribution", lambda p, q: q),
    "puts drawn roots back": ("renormalized_without", lambda q, token: q),
}


@pytest.mark.parametrize("name", _MUTATIONS)
def test_a_broken_rule_b_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exactness test above can fail: each of these one-line mistakes changes the enumerated distribution."""
    attribute, broken = _MUTATIONS[name]
    monkeypatch.setattr(scripted, attribute, broken)
    pair = misaligned_pair()
    ending = StopCondition(max_new_tokens=2)
    make = lambda chance: planner_of("specbranch", {**PAPER, "gamma": 1, "confidence": 0.7})  # noqa: E731

    assert emitted_distribution(pair, make, "reject", ending) != target_distribution(pair, ending)


def test_the_distribution_of_the_pair_that_shows_mutations_is_exact_without_them() -> None:
    ending = StopCondition(max_new_tokens=2)
    make = lambda chance: planner_of("specbranch", {**PAPER, "gamma": 1, "confidence": 0.7})  # noqa: E731

    assert emitted_distribution(misaligned_pair(), make, "reject", ending) == target_distribution(
        misaligned_pair(), ending
    )


def test_a_broken_rule_a_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(submitted: list[int], sample: Callable[[int], int]) -> Verdict:
        return Verdict(len(submitted), sample(len(submitted)))

    monkeypatch.setattr("specbranch.simulation.scripted.match", lenient)
    ending = StopCondition(max_new_tokens=3)
    make = lambda chance: planner_of("sps", {"gamma": 2})  # noqa: E731

    assert emitted_distribution(two_token_pair(), make, "match", ending) != target_distribution(
        two_token_pair(), ending
    )


@st.composite
def any_method(draw: st.DrawFn) -> tuple[str, dict[str, Any], str]:
    name = draw(st.sampled_from(["none", "sps", "adaedl", "pearl", "ssd", "specbranch", "budget"]))
    chosen: dict[str, Any] = {} if name == "none" else {"gamma": draw(st.integers(1, 8))}
    if name == "ssd":
        chosen |= {"num_guesses": draw(st.integers(1, 8)), "fallback": draw(st.sampled_from(["jit", "fast"]))}
    if name == "specbranch":
        chosen |= {"max_branches": draw(st.integers(1, 6)), "confidence": draw(st.floats(0, 1))}
        chosen |= {"wait_for_draft": draw(st.booleans()), "cost_aware": draw(st.booleans())}
    if name == "budget":
        chosen |= {
            "max_rows": draw(st.integers(1, 6)),
            **{
                name: draw(st.booleans())
                for name in ("uses_text", "uses_memory", "run_guesses", "cost_aware", "wait_for_draft", "takes_turns")
            },
        }
    return name, chosen, draw(st.sampled_from(list(_PREDICTORS)))


@settings(max_examples=300, deadline=None)
@given(
    method=any_method(),
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.0, 0.7, 0.95]),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    limit=st.integers(1, 24),
    eos=st.sampled_from([frozenset[int](), frozenset({0}), frozenset({1, 3})]),
    c=st.floats(0.3, 9),
)
@example(
    ("budget", {"gamma": 3, "max_rows": 3, "uses_memory": False, "cost_aware": False}, "always none"),
    29,
    0.0,
    [0],
    5,
    frozenset(),
    2.0,
)  # two guesses after one node whose distribution is not computed
def test_greedy_output_equals_plain_greedy_token_by_token(
    method: tuple[str, dict[str, Any], str],
    seed: int,
    share: float,
    prompt: list[int],
    limit: int,
    eos: frozenset[int],
    c: float,
) -> None:
    name, chosen, predictor = method
    base = random_script(seed, 5)
    target, draft = greedy(base), random_script(seed + 1, 5, like=base, share=share)
    planner = planner_of(name, chosen, _PREDICTORS[predictor](stream(seed)))
    ending = StopCondition(limit, eos)

    session = decode(target, draft, planner, stream(seed), prompt=prompt, c=c, ending=ending)

    assert session.output == plain(target, stream(seed), prompt, ending)
    assert_every_drafted_token_is_accounted_for(session)


@settings(max_examples=150, deadline=None)
@given(method=any_method(), seed=st.integers(0, 2**32), limit=st.integers(1, 24))
def test_sampled_output_equals_plain_sampling_with_the_same_stream(
    method: tuple[str, dict[str, Any], str], seed: int, limit: int
) -> None:
    """Rule A takes one number per emitted token, so equal streams give equal texts at temperature 1."""
    name, chosen, predictor = method
    target = random_script(seed, 5)
    draft = random_script(seed + 1, 5, like=target, share=0.8)
    planner = planner_of(name, chosen, _PREDICTORS[predictor](stream(seed)))
    ending = StopCondition(max_new_tokens=limit)

    session = decode(target, draft, planner, stream(seed + 2), prompt=(1, 2), ending=ending)

    assert session.output == plain(target, stream(seed + 2), (1, 2), ending)
