"""How often the draft is right: its own probabilities, corrected by what the target really said.

A draft speaks of its law at temperature 1. A target that decodes greedily agrees with the first choice far more often
than that law says, and how much more depends on the pair and on the text. So the chance of a first choice is learned by
confidence, and that of the others, given that the first was wrong, by rank. What was seen long ago counts less.
"""

from __future__ import annotations

from bisect import bisect_right

from specbranch.core.law import Law

_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
_RANKS = 8  # further ones are learned as one
_PRIOR = 4.0  # so many observations is the draft's own word worth


class Calibration:
    """Learned from one target's verdicts; a number counts half after `half_life` later ones of its kind."""

    def __init__(self, half_life: float = 400.0) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self._seen = [0.0] * (len(_EDGES) + 1)  # laws of this confidence
        self._right = [0.0] * (len(_EDGES) + 1)  # those whose first choice was right
        self._found = [0.0] * _RANKS  # tokens of this rank, where the first choice was wrong
        self._expected = [0.0] * _RANKS  # and how many the laws spoke of

    def first_chance(self, law: Law) -> float:
        """How likely the law's first choice is right."""
        confidence = float(law.confidence)
        place = bisect_right(_EDGES, confidence)
        return (self._right[place] + _PRIOR * confidence) / (self._seen[place] + _PRIOR)

    def chance(self, law: Law, token: int) -> float:
        """How likely a token of the law's head is right."""
        index = law.ids.index(token)
        first = self.first_chance(law)
        if index == 0:
            return first
        rank = min(index, _RANKS) - 1
        factor = (self._found[rank] + _PRIOR) / (self._expected[rank] + _PRIOR)
        return (1 - first) * min(1.0, factor * _share(law, index))

    def observe(self, law: Law, token: int) -> None:
        """Take in what the target said where the draft had this law."""
        if not law.ids:
            return
        place = bisect_right(_EDGES, float(law.confidence))
        is_right = law.ids[0] == token
        self._seen[place] = self._seen[place] * self._keep + 1
        self._right[place] = self._right[place] * self._keep + is_right
        if is_right:
            return
        for index in range(1, min(len(law.ids), _RANKS + 1)):
            rank = index - 1
            self._expected[rank] = self._expected[rank] * self._keep + _share(law, index)
            self._found[rank] = self._found[rank] * self._keep + (law.ids[index] == token)


def _share(law: Law, index: int) -> float:
    """A further token's part of what the first choice leaves."""
    rest = 1 - float(law.probs[0])
    return float(law.probs[index]) / rest if rest > 0 else 0.0
