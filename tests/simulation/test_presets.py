"""Presets: their figures, and that made traces have the shape they claim."""

from __future__ import annotations

import random

import pytest

from specbranch.simulation.presets import CONCENTRATION, PAIRS, SECOND_SHARE, fit_shape, make_trace, pearl_speed
from specbranch.trace import read_trace
from tests.root import ROOT

CHAT = ROOT / "traces" / "qwen-coder-chat.jsonl.gz"
PUBLISHED = {"llama-68m-7b": 1.74, "vicuna-68m-13b": 1.77, "deepseek-1.3b-33b": 2.93, "llama3-8b-70b": 3.38}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_reproduces_the_published_speed_of_pearl_by_its_chain(name: str) -> None:
    pair = PAIRS[name]

    assert pearl_speed(pair.acceptance, pair.gamma, pair.c) == pytest.approx(PUBLISHED[name])
    assert str(PUBLISHED[name]) in pair.source


def test_the_shape_of_made_distributions_is_that_of_the_recorded_chat() -> None:
    shape = fit_shape(read_trace(CHAT))

    assert shape.concentration == pytest.approx(CONCENTRATION, abs=0.05)
    assert shape.second_share == pytest.approx(SECOND_SHARE, abs=0.005)


@pytest.mark.parametrize("name", PAIRS)
def test_a_made_trace_has_the_acceptance_and_the_shape_of_its_pair(name: str) -> None:
    pair = PAIRS[name]
    trace = make_trace(pair, 40, 500, random.Random(3))
    shape = fit_shape(trace)

    # 20,000 tokens: five standard errors of a share are at most 0.018.
    assert trace.match_share() == pytest.approx(pair.acceptance, abs=0.018)
    assert shape.concentration == pytest.approx(CONCENTRATION, rel=0.15)
    assert abs(shape.neighbour_correlation) < 0.04


def test_the_token_ids_of_a_made_trace_tell_nothing_of_their_rank() -> None:
    """First and second choices, and what lies beyond the top-k, hardly ever have the same id again."""
    trace = make_trace(PAIRS["vicuna-68m-13b"], 4, 250, random.Random(5), top_k=2)
    distributions = [distribution for answer in trace.answers for distribution in answer.distributions]
    said = [token for answer in trace.answers for token in answer.tokens]
    beyond = [token for token, before in zip(said, distributions, strict=True) if token not in before.ids]

    # Of 1,000 draws of 32,000 ids about 16 meet an earlier one; 60 are eleven standard deviations away.
    assert len({distribution.ids[0] for distribution in distributions}) > 940
    assert len({distribution.ids[1] for distribution in distributions}) > 940
    assert len(set(beyond)) > 0.94 * len(beyond) > 20


def test_a_made_draft_is_calibrated() -> None:
    """Among distributions of one confidence, the target agrees as often as the confidence says."""
    trace = make_trace(PAIRS["vicuna-68m-13b"], 40, 500, random.Random(4))
    pairs = [
        (distribution, token)
        for a in trace.answers
        for distribution, token in zip(a.distributions, a.tokens, strict=True)
    ]
    for low, high in ((0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1.0)):
        chosen = [(distribution, token) for distribution, token in pairs if low <= distribution.confidence < high]
        said = sum(float(distribution.confidence) for distribution, _ in chosen) / len(chosen)
        seen = sum(distribution.ids[0] == token for distribution, token in chosen) / len(chosen)

        assert seen == pytest.approx(said, abs=5 * (0.25 / len(chosen)) ** 0.5)
