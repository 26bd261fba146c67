"""How draft tokens are drawn: most likely first (rule A), or sampled without replacement (rule B).

Every production path draws for rule A. Rule B is kept whole for reference: its draw here, its tests in `verify.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from specbranch.core.chance import Chance
from specbranch.core.distribution import Distribution


class Draw(Protocol):
    """Draws the tokens that follow one node, one at a time."""

    def draw(self, distribution: Distribution, taken: Collection[int]) -> int | None:
        """Return one more token not among `taken`, or None when its top-k holds no other."""
        ...


class TopDraw:
    """The most likely token not yet taken.

    Exact together with rule A, which never asks for the draft's distribution.
    """

    def draw(self, distribution: Distribution, taken: Collection[int]) -> int | None:
        return next((token for token in distribution.ids if token not in taken), None)


class SampledDraw:
    """A sample without replacement, as rule B requires. Exact only if top-k is the whole distribution."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    def draw(self, distribution: Distribution, taken: Collection[int]) -> int | None:
        free = [
            (token, prob)
            for token, prob in zip(distribution.ids, distribution.probs, strict=True)
            if token not in taken
        ]
        if not free:
            return None
        return free[self._chance.pick([prob for _, prob in free])][0]
