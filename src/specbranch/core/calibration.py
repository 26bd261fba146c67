"""How often the draft is right: its own probabilities, corrected by what the target really said.

A draft speaks of its distribution at temperature 1. A target that decodes greedily agrees with the first choice more
often than that distribution says, a draft of few bits less often, and how much depends on the pair and on the sequence.
So the odds of a first choice are a learned line over the odds that the draft gives it; the chance of the others, given
that the first was wrong, is learned by rank. A token that was drawn by chance and is tested by p/q is kept more often
than that; how often has a line of its own. What was seen long ago counts less.
"""

from __future__ import annotations

import math
from itertools import islice

from specbranch.core.distribution import Distribution, Prob

_RATE = 0.2  # of learning the line
_RANKS = 8  # further ones are learned as one
_PRIOR = 4.0  # so many observations is the draft's own word on ranks worth
_LEAST = 1e-4  # no distribution is believed to be surer than this
_KEPT_PRIOR = 0.5, 1.2  # slope and shift: 0.79 of the tokens drawn from a distribution whose first has 0.56 are kept


Grounds = tuple[str, int]  # of a guess: who made it, and how many tokens before it agreed


class _LogisticFit:
    """The odds of something as a straight line over the odds that a distribution gives its first choice."""

    def __init__(self, keep: float, slope: float, shift: float) -> None:
        self._keep = keep
        self._slope, self._shift = slope, shift
        self._slope_sq, self._shift_sq = 0.1, 0.1  # sums of squared gradients, which set the pace of learning

    def prob(self, distribution: Distribution) -> float:
        return 1 / (1 + math.exp(-(self._slope * _log_odds(distribution) + self._shift)))

    def observe(self, distribution: Distribution, is_right: bool) -> None:
        """Move the line against its error: a gradient step of logistic loss, shorter the more was learned already."""
        error = self.prob(distribution) - is_right
        gradient = error * _log_odds(distribution)
        self._slope_sq = self._slope_sq * self._keep + gradient * gradient
        self._shift_sq = self._shift_sq * self._keep + error * error
        # With every first choice right both sums would fade to nothing.
        self._slope -= _RATE * gradient / math.sqrt(self._slope_sq + 0.1)
        self._shift -= _RATE * error / math.sqrt(self._shift_sq + 0.1)
        self._slope = max(self._slope, 0.0)  # a draft that is surer is never right less often


class _RankFrequencies:
    """Where the token is that came instead of the first one: by its rank among the others."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._found = [0.0] * _RANKS  # tokens of this rank
        self._expected = [0.0] * _RANKS  # and how many the distributions spoke of

    def prob(self, distribution: Distribution, token: int, first: int) -> float:
        rank = 0
        for other, prob in zip(distribution.ids, distribution.probs, strict=True):
            if other == token:
                rank = min(rank, _RANKS - 1)
                factor = (self._found[rank] + _PRIOR) / (self._expected[rank] + _PRIOR)
                return min(1.0, factor * _share(prob, _rest(distribution, first)))
            rank += other != first
        raise ValueError(f"token {token} is not in the top-k")

    def observe(self, distribution: Distribution, token: int, first: int) -> None:
        rest = _rest(distribution, first)
        others = (pair for pair in zip(distribution.ids, distribution.probs, strict=True) if pair[0] != first)
        for rank, (other, prob) in enumerate(islice(others, _RANKS)):
            self._expected[rank] = self._expected[rank] * self._keep + _share(prob, rest)
            self._found[rank] = self._found[rank] * self._keep + (other == token)


class Calibration:
    """Learned from one target's verdicts; a number counts half after `half_life` later ones of its kind."""

    def __init__(self, half_life: float = 400.0) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self._first = _LogisticFit(self._keep, 1.0, 0.0)
        self._kept = _LogisticFit(self._keep, *_KEPT_PRIOR)
        self._others, self._others_of_drawn = _RankFrequencies(self._keep), _RankFrequencies(self._keep)
        self._guesses: dict[Grounds, tuple[float, float]] = {}  # how often seen, how often right

    def top1_accept_prob(self, distribution: Distribution) -> float:
        """How likely the distribution's first choice is right."""
        return self._first.prob(distribution)

    def sampled_accept_prob(self, q: Distribution) -> float:
        """How likely a token drawn from q is kept by a test against it (rule B), whichever token that is."""
        return self._kept.prob(q)

    def accept_prob(self, distribution: Distribution, token: int) -> float:
        """How likely a token of the top-k is right."""
        first = self.top1_accept_prob(distribution)
        if token == distribution.ids[0]:
            return first
        return (1 - first) * self._others.prob(distribution, token, distribution.ids[0])

    def alternative_accept_prob(self, distribution: Distribution, token: int, drawn: int, q: Distribution) -> float:
        """How likely a token of the top-k is right where another one, drawn from q, is tested first."""
        return (1 - self.sampled_accept_prob(q)) * self._others_of_drawn.prob(distribution, token, drawn)

    def observe(self, distribution: Distribution, token: int) -> None:
        """Take in what the target said where the draft had this distribution."""
        if not distribution.ids:
            return
        first = distribution.ids[0]
        self._first.observe(distribution, first == token)
        if first != token:
            self._others.observe(distribution, token, first)

    def observe_drawn(self, distribution: Distribution, token: int, drawn: int, q: Distribution) -> None:
        """Take in what the target said where it tested a token drawn from q."""
        self._kept.observe(q, drawn == token)
        if drawn != token:
            self._others_of_drawn.observe(distribution, token, drawn)

    def guess_accept_prob(self, grounds: Grounds) -> float:
        """How likely a token is right that was guessed on these grounds."""
        seen, right = self._guesses.get(grounds, (0.0, 0.0))
        return (right + _PRIOR / 2) / (seen + _PRIOR)

    def observe_guess(self, grounds: Grounds, is_right: bool) -> None:
        """Take in whether it was."""
        seen, right = self._guesses.get(grounds, (0.0, 0.0))
        self._guesses[grounds] = (seen * self._keep + 1, right * self._keep + is_right)


def _log_odds(distribution: Distribution) -> float:
    confidence = min(max(float(distribution.confidence), _LEAST), 1 - _LEAST)
    return math.log(confidence / (1 - confidence))


def _rest(distribution: Distribution, first: int) -> float:
    """What the first token leaves to the others."""
    return 1 - float(distribution.probs[distribution.ids.index(first)])


def _share(prob: Prob, rest: float) -> float:
    """A further token's part of that."""
    return float(prob) / rest if rest > 0 else 0.0
