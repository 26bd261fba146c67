"""When two distributions are the same up to the rounding of a real model."""

from __future__ import annotations

import math

from specbranch.core.distribution import Distribution

ENTROPY_FACTOR = 10  # the entropy sums over the whole vocabulary, so its error is larger than one probability's


def close_distributions(a: Distribution, b: Distribution, tolerance: float = 1e-4) -> bool:
    """Is each token's probability the same within a tolerance, and the entropy within ten times that?

    Tokens may swap positions at a near-tie. So a token that only one top-k has counts as the end of the other: its
    probability there is no more than the last one, and may be anything down to zero.
    """
    is_close = all(_gap(a, b, token) <= tolerance for token in {*a.ids, *b.ids})
    return is_close and math.isclose(a.entropy, b.entropy, rel_tol=0, abs_tol=ENTROPY_FACTOR * tolerance)


def _gap(a: Distribution, b: Distribution, token: int) -> float:
    """How far apart two distributions are at a token, at least."""
    (low_a, high_a), (low_b, high_b) = _bounds(a, token), _bounds(b, token)
    return max(low_a - high_b, low_b - high_a, 0.0)


def _bounds(distribution: Distribution, token: int) -> tuple[float, float]:
    if token not in distribution.ids:
        return 0.0, float(distribution.probs[-1])
    prob = float(distribution.probs[distribution.ids.index(token)])
    return prob, prob
