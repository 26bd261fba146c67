"""What a planner's decision costs on every verdict, and what it costs the target's side to draw its tokens again."""

from __future__ import annotations

import statistics
import time
from functools import partial

import numpy as np
import pytest

from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution, RequestSampling, inverse_cdf, seeded_uniform
from specbranch.core.node import GreedyPicker
from specbranch.core.planners import PLANNERS, make_planner, setting_names
from specbranch.core.round import Verdict
from specbranch.core.session import Session
from specbranch.service.client.filters import resample_draft
from specbranch.service.wire.payloads import pack_probs, unpack_probs
from tests.measuring import num_calls
from tests.toys import SOME

BRANCHES, LENGTH = 24, 8
FLAT = Distribution(tuple(range(1, 33)), (1 / 32,) * 32, 3.4)
VOCAB, WINDOW, TOP = 151_936, 8, 32


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


def draft_of(seed: int) -> tuple[list[int], bytes]:
    """A draft of eight tokens behind a text, each drawn from 32."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    sampled_from = []
    for place in range(WINDOW):
        weights = np.sort(rng.random(TOP) ** 8)[::-1]
        ids = tuple(rng.choice(VOCAB, TOP, replace=False).tolist())
        q = RequestSampling(1.0).apply(Distribution(ids, tuple((weights / weights.sum()).tolist()), 1.0))
        tokens.append(q.ids[inverse_cdf(q.probs, seeded_uniform(seed, 40 + place, [*range(40), *tokens]))])
        sampled_from.append(q)
    return tokens, pack_probs(sampled_from)


class Target:
    """The target's side, with drafts that it was told for some rows."""

    def __init__(self, num_rows: int) -> None:
        self.told = [draft_of(seed) for seed in range(1, num_rows + 1)]
        self.drawn: list[tuple[list[int], list[Distribution | None]]] = []

    def draw(self) -> None:
        self.drawn = [
            resample_draft(list(range(40)), 40, tokens, unpack_probs(packed, len(tokens)), seed, VOCAB)
            for seed, (tokens, packed) in enumerate(self.told, start=1)
        ]


def test_drawing_again_makes_calls_for_tokens_and_not_for_the_vocabulary() -> None:
    """Counted, so that it holds on any machine: eight rows make at most eight times the calls of one."""
    counts = []
    for num_rows in (1, 8):
        target = Target(num_rows)
        counts.append(num_calls(target.draw))
        assert [tokens for tokens, _ in target.drawn] == [tokens for tokens, _ in target.told]

    assert counts[1] <= 8 * counts[0] and counts[0] < 100 * WINDOW


@pytest.mark.nightly
@pytest.mark.parametrize("num_rows", [1, 8])
def test_drawing_again_takes_few_milliseconds(num_rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    target = Target(num_rows)
    draw_s = []
    for _ in range(50):
        start = time.perf_counter()
        target.draw()
        draw_s.append(time.perf_counter() - start)
    with capsys.disabled():
        print(f"\n{num_rows} rows of {WINDOW} tokens: drawn again {statistics.median(draw_s) * 1e3:.2f} ms")
    assert min(draw_s) < 0.002 * num_rows + 0.001
