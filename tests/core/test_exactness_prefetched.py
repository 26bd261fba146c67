"""The path of a service that tells drafts ahead: the distribution equals the target's, with no tolerance.

A session is driven as the service and its client drive it. While a verdict is awaited, messages tell what to submit
after the likeliest ones (`foresee`). Whichever message came last counts; the target verifies what it told, or a part of
it, and the session hears of it afterwards (`adopt`). Where nothing was told the target asks, and may not wait to the
end. All of this is decided by chance, and every way that chance can go is gone through in rational numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest

from specbranch.core import session as core_session
from specbranch.core.calibration import Calibration
from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution, Prob, RandomSource, RequestSampling
from specbranch.core.node import GreedyPicker, Node, RejectionPicker
from specbranch.core.round import Verdict
from specbranch.core.session import Session, StopCondition
from specbranch.simulation.scripted import Candidates, TextScript, match, reject
from tests.enumeration import exact_distribution
from tests.toys import plain, planner_of, text_to, three_token_pair, two_token_pair

Pair = tuple[TextScript, TextScript]
Submission = list[tuple[int, Distribution | None]]  # tokens, and what each was drawn from
Messages = dict[tuple[int, ...], Submission]  # what to submit after a verdict
GAMMA = 2
NOWHERE = Distribution((), (), 0.0)
PROMPT = (0, 1, 0, 1)  # it repeats itself, so that guesses from the text begin at once

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "budget": ("budget", {"gamma": GAMMA, "max_rows": 2}),
    "budget without guesses": ("budget", {"gamma": GAMMA, "max_rows": 2, "uses_text": False, "uses_memory": False}),
    "specbranch": ("specbranch", {"gamma": GAMMA, "confidence": 0.6, "max_branches": 4}),
}


class Target:
    """A target with a client: what it was told, what it verifies, and how often it did so without asking."""

    def __init__(self, pair: Pair, rule: str, chance: RandomSource, lengths: tuple[int, int], loses: bool) -> None:
        self._model, self._draft = pair
        self._rule = rule
        self._chance = chance
        self._lengths = lengths  # that are allowed
        self._loses = loses  # whether a message may be lost
        self.counts: Counter[str] = Counter()

    def decode(self, session: Session) -> None:
        """Decode the sequence to its end."""
        session.skip_round()
        submission: Submission = []
        while True:
            known = self._last_message(session)
            tokens = self._verify(session, submission).committed([token for token, _ in submission])
            session.commit(tokens, len(submission))
            if session.is_finished:
                return
            submission = self._next(session, known.get(tuple(tokens)))

    def _last_message(self, session: Session) -> Messages:
        """What was told when the verdict comes: the message after the first or the second draft step, or nothing."""
        messages: list[Messages] = [{}] if self._loses else []
        for _ in range(2):
            self._draft_step(session)
            messages.append(_told(session))
        return messages[self._chance.pick([1] * len(messages))]

    def _next(self, session: Session, told: Submission | None) -> Submission:
        self.counts["asked" if told is None else "told ahead"] += 1
        if told is None:
            return self._cut(self._ask(session))
        taken = self._cut(told)
        session.mark_submitted([token for token, _ in taken])
        return taken

    def _ask(self, session: Session) -> Submission:
        """Wait until the planner answers, or give up at once."""
        if session.propose() is None and self._chance.pick([1, 1]):
            session.submit_ready()
        while session.propose() is None:
            self._draft_step(session)
        return list(zip(session.submitted, session.sampled_from, strict=True))

    def _cut(self, submission: Submission) -> Submission:
        """A request, or the room for its text, allows so many tokens, whatever was proposed."""
        length = self._lengths[self._chance.pick([1, 1])]
        self.counts["cut"] += length < len(submission)
        self.counts["drawn"] += any(q is not None for _, q in submission[:length])
        return submission[:length]

    def _draft_step(self, session: Session) -> None:
        for node in list(session.rows()):
            session.add_distribution(node, self._draft.distribution(text_to(session, node)))

    def _verify(self, session: Session, submission: Submission) -> Verdict:
        text = tuple(session.tokens)
        tokens = [token for token, _ in submission]
        laws = [self._model.distribution((*text, *tokens[:index])) for index in range(len(tokens) + 1)]
        if self._rule == "match":
            return match(tokens, lambda index: laws[index].ids[self._chance.pick(laws[index].probs)])
        size = self._model.vocab_len
        offers = [Candidates((q or Distribution((token,), (1,), 0.0)).dense(size), (token,)) for token, q in submission]
        return reject([*offers, Candidates(NOWHERE.dense(size), ())], [law.dense(size) for law in laws], self._chance)


def _told(session: Session) -> Messages:
    return {
        tuple(committed): [(node.token, node.sampled_from) for node in nodes]
        for committed, nodes in session.drafts_by_verdict(4)
    }


@pytest.fixture
def chances(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RandomSource]]:
    """Where sessions find the chance that their tokens are drawn by: one draw for each text, as a seed gives."""
    current: list[RandomSource] = []

    def served_draw(sampling: RequestSampling, tokens: Sequence[int], calibration: Calibration) -> RejectionPicker:
        drawn: dict[tuple[int, ...], int] = {}

        def pick_at(node: Node, probs: Sequence[Prob]) -> int:
            text = (*tokens, *node.path())
            if text not in drawn:
                drawn[text] = current[-1].pick(probs)
            return drawn[text]

        return RejectionPicker(lambda one: one, pick_at, calibration)

    monkeypatch.setattr(core_session, "rejection_picker", served_draw)
    yield current


def emitted(
    pair: Pair, method: tuple[str, dict[str, Any]], rule: str, ending: StopCondition, chances: list[RandomSource]
) -> tuple[dict[tuple[int, ...], Fraction], Counter[str]]:
    """The distribution of what is emitted, and how often each thing happened on the way."""
    counts: Counter[str] = Counter()

    def run(chance: RandomSource) -> tuple[int, ...]:
        chances[:] = [chance]
        session = Session(PROMPT, planner_of(*method), GreedyPicker(), _costs(), ending)
        if rule == "serve":
            session.set_sampling(RequestSampling(1.0))
        is_budget = method[0] == "budget"
        # The others seldom submit more than one token here, so that one is to be cut.
        target = Target(pair, rule, chance, (1, GAMMA) if is_budget else (0, GAMMA), is_budget)
        target.decode(session)
        counts.update(target.counts)
        return tuple(session.output)

    return exact_distribution(run), counts


def _costs() -> PairModel:
    """Of a target that has shown that drafts cost it little; before that hardly any are submitted."""
    costs = PairModel()
    for num_submitted in (0, 1, 0, 2):
        costs.observe_step(1, num_submitted, 1, 1.0 + 0.1 * num_submitted)
    return costs


def of_target(pair: Pair, ending: StopCondition) -> dict[tuple[int, ...], Fraction]:
    return exact_distribution(lambda chance: tuple(plain(pair[0], chance, PROMPT, ending)))


@pytest.mark.parametrize("rule", ["match", "serve"])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_told_ahead_leaves_the_distribution_exact(name: str, rule: str, chances: list[RandomSource]) -> None:
    pair, ending = two_token_pair(), StopCondition(max_new_tokens=4 if name == "specbranch" else 3)
    distribution, counts = emitted(pair, METHODS[name], rule, ending, chances)

    assert distribution == of_target(pair, ending)
    assert counts["asked"] > 20
    assert counts["told ahead"] > 20 or "budget" not in name, "the others let the target wait"
    assert counts["cut"] > 20 or name == "budget without guesses"
    assert counts["drawn"] > 20 or rule == "match"


@pytest.mark.parametrize(("name", "rule"), [("budget", "match"), ("specbranch", "serve")])
def test_what_is_told_ahead_is_exact_on_three_tokens(name: str, rule: str, chances: list[RandomSource]) -> None:
    pair, ending = three_token_pair(), StopCondition(max_new_tokens=3)

    assert emitted(pair, METHODS[name], rule, ending, chances)[0] == of_target(pair, ending)


def test_telling_ahead_by_the_value_of_a_drawn_token_is_noticed(
    monkeypatch: pytest.MonkeyPatch, chances: list[RandomSource]
) -> None:
    """The comparison above can fail: here a submission is told only if its first token is token 0."""
    foresee: Callable[..., Any] = Session.drafts_by_verdict

    def choosy(session: Session, count: int) -> list[tuple[list[int], Sequence[Node]]]:
        return [(tokens, nodes if nodes[0].token == 0 else ()) for tokens, nodes in foresee(session, count)]

    monkeypatch.setattr(Session, "drafts_by_verdict", choosy)
    pair, ending = two_token_pair(), StopCondition(max_new_tokens=3)

    assert emitted(pair, METHODS["budget"], "match", ending, chances)[0] == of_target(pair, ending)
    assert emitted(pair, METHODS["budget"], "serve", ending, chances)[0] != of_target(pair, ending)
