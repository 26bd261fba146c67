"""When two laws are the same up to the rounding of a real model."""

from __future__ import annotations

import math

from specbranch.core.law import Law

ENTROPY_FACTOR = 10  # the entropy sums over the whole vocabulary, so its error is larger than one probability's


def close_laws(a: Law, b: Law, tolerance: float = 1e-4) -> bool:
    """Is each token's probability the same within a tolerance, and the entropy within ten times that?

    Tokens may swap places at a near-tie, so a token that only one head holds counts as the end of the other head: its
    probability there is no more than the last one, and may be anything down to zero.
    """
    is_close = all(_gap(a, b, token) <= tolerance for token in {*a.ids, *b.ids})
    return is_close and math.isclose(a.entropy, b.entropy, rel_tol=0, abs_tol=ENTROPY_FACTOR * tolerance)


def _gap(a: Law, b: Law, token: int) -> float:
    """How far apart two laws are at a token, at least."""
    (low_a, high_a), (low_b, high_b) = _bounds(a, token), _bounds(b, token)
    return max(low_a - high_b, low_b - high_a, 0.0)


def _bounds(law: Law, token: int) -> tuple[float, float]:
    if token not in law.ids:
        return 0.0, float(law.probs[-1])
    prob = float(law.probs[law.ids.index(token)])
    return prob, prob
