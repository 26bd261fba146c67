"""How tokens are drawn from a draft law: the most likely ones (rule A), or a sample without replacement (rule B)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from specbranch.core.chance import Chance
from specbranch.core.law import Law


class Draw(Protocol):
    """Draws the tokens that stand after one node, one at a time."""

    def draw(self, law: Law, taken: Collection[int]) -> int | None:
        """Return one more token of the law that is not among `taken`, or None when the head holds no other."""
        ...


class TopDraw:
    """The most likely token not yet taken. Exact together with rule A, which never asks for the draft's law."""

    def draw(self, law: Law, taken: Collection[int]) -> int | None:
        return next((token for token in law.ids if token not in taken), None)


class SampledDraw:
    """A sample without replacement, as rule B requires. Exact only if the head is the whole law."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    def draw(self, law: Law, taken: Collection[int]) -> int | None:
        free = [(token, prob) for token, prob in zip(law.ids, law.probs, strict=True) if token not in taken]
        if not free:
            return None
        return free[self._chance.pick([prob for _, prob in free])][0]
