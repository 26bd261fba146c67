"""The simulator against closed forms, and the closed forms against published numbers."""

from __future__ import annotations

import random
import statistics

import pytest

from specbranch.simulation.presets import pearl_emitted, pearl_speed, solve_acceptance
from specbranch.simulation.simulate import Layout, Method, SimulationResult, simulate
from tests.toys import make_iid_trace

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
