"""Where randomness comes in. Everything random in the core is one question: which of these weighted things?

The narrow question is what lets tests replace chance by enumeration and prove a distribution instead of sampling it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from specbranch.core.distribution import Prob


class Chance(Protocol):
    """A source of random choices."""

    def pick(self, weights: Sequence[Prob]) -> int:
        """Return an index, each with probability proportional to its weight."""
        ...


class RandomChance:
    """Choices from a pseudo-random stream. One pick takes exactly one number from the stream."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, weights: Sequence[Prob]) -> int:
        left = self._rng.random() * float(sum(weights))
        last = 0
        for index, weight in enumerate(weights):
            if weight:
                last = index
                left -= float(weight)
                if left < 0:
                    return index
        # Rounding can leave a crumb behind the last positive weight.
        return last
