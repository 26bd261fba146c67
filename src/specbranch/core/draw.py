"""How draft tokens are drawn: most likely first (rule A), or by chance (rule B).

Of rule B there are two forms. `ServedDraw` is what a stock engine can verify: one drawn token at a place. `SampledDraw`
is the paper's, for reference: several at a place, drawn without replacement and tested in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from specbranch.core.calibration import Calibration
from specbranch.core.chance import Chance
from specbranch.core.distribution import Distribution, Prob
from specbranch.core.node import Node
from specbranch.core.sampling import TEXT_LEN, Sampling, number, pick

First = tuple[int, Distribution | None]  # a token, and the distribution that it was drawn from by chance


class Draw(Protocol):
    """Draws the tokens that follow one node that was run, one at a time."""

    def first(self, node: Node, is_tested: bool) -> First | None:
        """The token to submit behind a node; None if its distribution has none.

        Not `is_tested`: the target will say its own token here, which this one may equal.
        """
        ...

    def further(self, distribution: Distribution, taken: Collection[int]) -> int | None:
        """One more token that is not among `taken`, or None when its top-k holds no other."""
        ...


class TopDraw:
    """The most likely token not yet taken.

    Exact together with rule A, which never asks for the draft's distribution.
    """

    def first(self, node: Node, is_tested: bool) -> First | None:
        ids = node.distribution.ids if node.distribution else ()
        return (ids[0], None) if ids else None

    def further(self, distribution: Distribution, taken: Collection[int]) -> int | None:
        return next((token for token in distribution.ids if token not in taken), None)


class SampledDraw:
    """A sample without replacement, as rule B requires. Exact only if top-k is the whole distribution."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance

    def first(self, node: Node, is_tested: bool) -> First | None:
        token = self.further(node.distribution, ()) if node.distribution else None
        return None if token is None else (token, None)

    def further(self, distribution: Distribution, taken: Collection[int]) -> int | None:
        free = [
            (token, prob)
            for token, prob in zip(distribution.ids, distribution.probs, strict=True)
            if token not in taken
        ]
        if not free:
            return None
        return free[self._chance.pick([prob for _, prob in free])][0]


class ServedDraw(TopDraw):
    """The token to submit is drawn by chance where that is kept more often; the others are the most likely ones.

    Which of the two it is depends on the distribution and on what was learned, never on the token.
    """

    def __init__(
        self,
        shape: Callable[[Distribution], Distribution],
        pick: Callable[[Node, Sequence[Prob]], int],
        calibration: Calibration,
    ) -> None:
        self._shape = shape
        self._pick = pick
        self._calibration = calibration

    def first(self, node: Node, is_tested: bool) -> First | None:
        distribution = node.distribution
        if distribution is None or not distribution.ids or not is_tested:
            return super().first(node, is_tested)
        q = self._shape(distribution)
        if self._calibration.kept_chance(q) < self._calibration.first_chance(distribution):
            return distribution.ids[0], None
        return q.ids[self._pick(node, q.probs)], q


def served_draw(sampling: Sampling, tokens: Sequence[int], calibration: Calibration) -> ServedDraw:
    """The draw for a request; `tokens` are the committed ones of its sequence, which grow."""

    def pick_at(node: Node, probs: Sequence[Prob]) -> int:
        text = [*tokens[-TEXT_LEN:], *node.path()]
        return pick(probs, number(sampling.seed, node.position + 1, text))

    return ServedDraw(sampling.shape, pick_at, calibration)
