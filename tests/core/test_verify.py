"""The rules of verification, piece by piece, in rational numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbranch.core.distribution import Dense, distribution_of
from specbranch.core.node import WithoutReplacementPicker
from specbranch.core.round import Verdict
from specbranch.simulation.scripted import (
    Candidates,
    accept_prob,
    match,
    recovery_distribution,
    reject,
    reject_in_turn,
    renormalized_without,
)
from tests.enumeration import exact_distribution


@st.composite
def distributions(draw: st.DrawFn, size: int = 3) -> Dense:
    parts = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size).filter(any))
    return np.array([Fraction(part, sum(parts)) for part in parts], dtype=object)


@given(p=distributions(), q=distributions())
def test_kept_mass_and_recovered_mass_make_the_target_distribution(p: Dense, q: Dense) -> None:
    kept = np.array([q[i] * accept_prob(p, q, i) if q[i] else Fraction(0) for i in range(3)], dtype=object)
    rejected = 1 - kept.sum()

    assert (kept + rejected * recovery_distribution(p, q) == p).all()


@given(p=distributions(), q=distributions(), count=st.integers(0, 3))
def test_a_root_drawn_without_replacement_and_chosen_by_rule_b_follows_the_target_distribution(
    p: Dense, q: Dense, count: int
) -> None:
    distribution = distribution_of(list(q))

    def run(chance: object) -> int:
        tokens: list[int] = []
        for _ in range(count):
            drawn = WithoutReplacementPicker(chance).further(distribution, tokens)  # type: ignore[arg-type]
            if drawn is not None:
                tokens.append(drawn)
        return reject_in_turn(p, Candidates(q, tuple(tokens)), chance)  # type: ignore[arg-type]

    found = exact_distribution(run)
    assert [found.get(i, Fraction(0)) for i in range(3)] == list(p)


def test_match_accepts_up_to_the_first_difference() -> None:
    assert match([4, 5, 6], [4, 5, 7, 8].__getitem__) == Verdict(2, 7)
    assert match([4, 5, 6], [4, 5, 6, 8].__getitem__) == Verdict(3, 8)
    assert match([], [4].__getitem__) == Verdict(0, 4)


def test_a_verdict_commits_what_it_accepts_and_the_targets_token() -> None:
    assert Verdict(1, 9).committed([4, 5, 6]) == [4, 9]


def test_rule_b_needs_an_offer_for_the_branch_point() -> None:
    with pytest.raises(ValueError, match="at least one offer"):
        reject([], [], chance=None)  # type: ignore[arg-type]


def test_equal_distributions_recover_to_themselves_and_an_exhausted_distribution_stays_empty() -> None:
    """Only rounding can ask for these; they must not divide by zero."""
    p = np.array([0.5, 0.5])

    assert (recovery_distribution(p, p) == p).all()
    assert (renormalized_without(np.array([1.0, 0.0]), 0) == 0).all()
