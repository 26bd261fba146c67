"""Presets: their figures, and that made traces have the shape they claim."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from specbranch.simulation.presets import (
    CONCENTRATION,
    PAIRS,
    SECOND_SHARE,
    fit_shape,
    make_trace,
    pearl_emitted,
    pearl_speed,
    solve_acceptance,
)
from specbranch.simulation.simulate import Layout, Method, SimulationResult, simulate
from specbranch.trace import read_trace
from tests.root import ROOT
from tests.toys import make_iid_trace

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


@pytest.mark.parametrize("correlation", [0.2, 0.48])
def test_confidences_of_neighbours_are_alike_if_the_pair_says_so(correlation: float) -> None:
    pair = replace(PAIRS["vicuna-68m-13b"], correlation=correlation)
    shape = fit_shape(make_trace(pair, 40, 500, random.Random(3)))

    assert shape.neighbour_correlation == pytest.approx(correlation, abs=0.04)
    assert shape.mean == pytest.approx(pair.acceptance, abs=0.018)
    assert shape.concentration == pytest.approx(CONCENTRATION, rel=0.15)


def test_recorded_confidences_of_neighbours_are_alike() -> None:
    """The range that `simulate --help` names."""
    found = [fit_shape(read_trace(path)).neighbour_correlation for path in ROOT.glob("traces/*.gz")]

    assert len(found) == 4
    assert round(min(found), 2) == 0.18 and round(max(found), 2) == 0.48


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


RUNS = 24


def accepted_len(acceptance: float, gamma: int) -> float:
    """Mean number of accepted tokens in a window of gamma: a truncated geometric."""
    return sum(acceptance**k for k in range(1, gamma + 1))


def sps_emitted(acceptance: float, gamma: int) -> float:
    """Tokens per round of plain speculative decoding, the target's own included."""
    return 1 + accepted_len(acceptance, gamma)


def sps_speed(acceptance: float, gamma: int, c: float) -> float:
    """Speed of plain speculative decoding over plain decoding."""
    return sps_emitted(acceptance, gamma) * c / (gamma + c)


def theorem_1_speed(acceptance: float, gamma: int, c: float) -> float:
    """The SpecBranch paper's Theorem 1 as a speed over plain decoding. It leaves out the target's own token."""
    return (1 + acceptance**gamma) * accepted_len(acceptance, gamma) * c / (2 * max(gamma, c))


def runs(planner: str, acceptance: float, gamma: int, c: float) -> list[SimulationResult]:
    """Independent runs of 600 tokens on the papers' assumption."""
    return [
        simulate(make_iid_trace(acceptance, 1, 600, random.Random(seed)), Method(planner, {"gamma": gamma}), Layout(c))
        for seed in range(RUNS)
    ]


def assert_mean_is(values: list[float], expected: float) -> None:
    """Within 4.5 standard errors of the runs' own mean; with 23 degrees of freedom a false alarm in 6,000.

    The window at the end of a run is cut short, which biases a run by less than gamma tokens in 600.
    """
    error = statistics.stdev(values) / len(values) ** 0.5
    assert abs(statistics.mean(values) - expected) < 4.5 * error + 0.005 * expected


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize(("gamma", "c"), [(3, 5.0), (8, 8.0)])
def test_simulated_sps_agrees_with_its_formula(acceptance: float, gamma: int, c: float) -> None:
    outcomes = runs("sps", acceptance, gamma, c)

    assert_mean_is([out.stats.emitted_per_round for out in outcomes], sps_emitted(acceptance, gamma))
    assert_mean_is([out.speedup for out in outcomes], sps_speed(acceptance, gamma, c))


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("gamma", [2, 5, 8])
def test_simulated_pearl_agrees_with_its_two_state_chain(acceptance: float, gamma: int) -> None:
    outcomes = runs("pearl", acceptance, gamma, float(gamma))

    assert_mean_is([out.stats.emitted_per_round for out in outcomes], pearl_emitted(acceptance, gamma))
    assert_mean_is([out.speedup for out in outcomes], pearl_speed(acceptance, gamma, float(gamma)))


def test_a_wrong_formula_would_be_noticed() -> None:
    """Theorem 1 leaves out the target's own token; the check above tells it from the chain."""
    outcomes = runs("pearl", 0.6, 5, 5.0)

    with pytest.raises(AssertionError):
        assert_mean_is([out.speedup for out in outcomes], theorem_1_speed(0.6, 5, 5.0))


@pytest.mark.parametrize(("acceptance", "tokens"), [(0.5, 1.33), (0.7, 1.91), (0.9, 3.88)])
def test_the_chain_gives_known_tokens_per_round(acceptance: float, tokens: float) -> None:
    assert pearl_emitted(acceptance, 8) == pytest.approx(tokens, abs=0.005)


@pytest.mark.parametrize(("acceptance", "tokens"), [(0.5, 0.50), (0.7, 1.16), (0.9, 3.67)])
def test_theorem_1_gives_known_tokens_per_round(acceptance: float, tokens: float) -> None:
    assert theorem_1_speed(acceptance, 8, 8.0) == pytest.approx(tokens, abs=0.005)


def test_an_acceptance_is_solved_from_a_speed() -> None:
    assert solve_acceptance(lambda a: pearl_speed(a, 8, 8.0), pearl_speed(0.66, 8, 8.0)) == pytest.approx(0.66)


def test_a_speed_out_of_reach_is_refused() -> None:
    with pytest.raises(ValueError, match="no acceptance"):
        solve_acceptance(lambda a: pearl_speed(a, 4, 4.0), 5.0)
