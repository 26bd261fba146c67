"""How often the draft is right: its own probabilities, corrected by what the target really said.

A draft speaks of its distribution at temperature 1. A target that decodes greedily agrees with the first choice more
often than that distribution says, a draft of few bits less often, and how much depends on the pair and on the sequence.
So the odds of a first choice are a learned line over the odds that the draft gives it; the chance of the others, given
that the first was wrong, is learned by rank. What was seen long ago counts less.
"""

from __future__ import annotations

import math

from specbranch.core.distribution import Distribution

_RATE = 0.2  # of learning the line
_RANKS = 8  # further ones are learned as one
_PRIOR = 4.0  # so many observations is the draft's own word on ranks worth
_LEAST = 1e-4  # no distribution is believed to be surer than this


Grounds = tuple[str, int]  # of a guess: who made it, and how many tokens before it agreed


class Calibration:
    """Learned from one target's verdicts; a number counts half after `half_life` later ones of its kind."""

    def __init__(self, half_life: float = 400.0) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self._slope, self._shift = 1.0, 0.0
        self._slope_sq, self._shift_sq = 0.1, 0.1  # sums of squared gradients, which set the pace of learning
        self._found = [0.0] * _RANKS  # tokens of this rank, where the first choice was wrong
        self._expected = [0.0] * _RANKS  # and how many the distributions spoke of
        self._guesses: dict[Grounds, tuple[float, float]] = {}  # how often seen, how often right

    def first_chance(self, distribution: Distribution) -> float:
        """How likely the distribution's first choice is right."""
        return 1 / (1 + math.exp(-(self._slope * _log_odds(distribution) + self._shift)))

    def chance(self, distribution: Distribution, token: int) -> float:
        """How likely a token of the top-k is right."""
        index = distribution.ids.index(token)
        first = self.first_chance(distribution)
        if index == 0:
            return first
        rank = min(index, _RANKS) - 1
        factor = (self._found[rank] + _PRIOR) / (self._expected[rank] + _PRIOR)
        return (1 - first) * min(1.0, factor * _share(distribution, index))

    def observe(self, distribution: Distribution, token: int) -> None:
        """Take in what the target said where the draft had this distribution."""
        if not distribution.ids:
            return
        is_right = distribution.ids[0] == token
        self._turn(_log_odds(distribution), self.first_chance(distribution) - is_right)
        if is_right:
            return
        for index in range(1, min(len(distribution.ids), _RANKS + 1)):
            rank = index - 1
            self._expected[rank] = self._expected[rank] * self._keep + _share(distribution, index)
            self._found[rank] = self._found[rank] * self._keep + (distribution.ids[index] == token)

    def guess_chance(self, grounds: Grounds) -> float:
        """How likely a token is right that was guessed on these grounds."""
        seen, right = self._guesses.get(grounds, (0.0, 0.0))
        return (right + _PRIOR / 2) / (seen + _PRIOR)

    def observe_guess(self, grounds: Grounds, is_right: bool) -> None:
        """Take in whether it was."""
        seen, right = self._guesses.get(grounds, (0.0, 0.0))
        self._guesses[grounds] = (seen * self._keep + 1, right * self._keep + is_right)

    def _turn(self, log_odds: float, error: float) -> None:
        """Move the line against an error: a gradient step of logistic loss, shorter the more was learned already."""
        gradient = error * log_odds
        self._slope_sq = self._slope_sq * self._keep + gradient * gradient
        self._shift_sq = self._shift_sq * self._keep + error * error
        # With every first choice right both sums would fade to nothing.
        self._slope -= _RATE * gradient / math.sqrt(self._slope_sq + 0.1)
        self._shift -= _RATE * error / math.sqrt(self._shift_sq + 0.1)
        self._slope = max(self._slope, 0.0)  # a draft that is surer is never right less often


def _log_odds(distribution: Distribution) -> float:
    confidence = min(max(float(distribution.confidence), _LEAST), 1 - _LEAST)
    return math.log(confidence / (1 - confidence))


def _share(distribution: Distribution, index: int) -> float:
    """A further token's part of what the first choice leaves."""
    rest = 1 - float(distribution.probs[0])
    return float(distribution.probs[index]) / rest if rest > 0 else 0.0
