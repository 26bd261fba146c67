"""How often the draft is right: its own probabilities, corrected by what the target really emitted.

A draft's distribution is for temperature 1. A target that decodes greedily agrees with the first choice more often than
that distribution says, a draft with weights of few bits is right less often, and how much depends on the pair and on
the sequence. So the probability that the first choice is right is learned by online logistic regression (Platt
scaling): its log odds are a linear function of the log odds that the draft gives it. The probability of each other
token, given that the first was wrong, is learned by rank. How often rejection sampling accepts a sampled token is
learned by a second regression. Old observations count less.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from itertools import islice
from typing import NamedTuple

from specbranch.core.distribution import Distribution

_RATE = 0.2  # learning rate of a line
_RANKS = 8  # further ranks use the correction of the last one
_PRIOR = 4.0  # weight of the assumption before any verdict, in observations
_GUESS_PRIOR = 20.0  # weight of the assumption about guesses before any was observed, in observations
_TRUST_PRIOR = 100.0  # the same for what one sequence shows of its guesses; less is too sure of the likeliest ones
_MIN_DOUBT = 1e-4  # confidence is limited to values this far from 0 and from 1
_KEPT_PRIOR = 0.5, 1.2  # initial slope and shift: at a confidence of 0.56, 0.79 of the sampled tokens are accepted

TEXT = "text"  # a source of guesses: the sequence itself
MEMORY = "memory"  # another one: past answers of the same target
# Guesses are judged together by the length of their match and by their share of the votes, in these classes.
LENGTHS = (1, 2, 3, 4, 5, 6, 9, 16)  # where the classes of lengths begin
SHARES = (0.0, 0.35, 0.6, 0.95)  # the same of shares
# How often guesses are right before any was observed: a logistic function, fitted by studies/07-guesses/fit.py. By
# source the constant and the factor of the logarithm of the length; by class of the share what is added.
_GUESS_LINES = {TEXT: (-1.55, 0.99), MEMORY: (-2.31, 0.65)}
_GUESS_SHARES = (0.0, 0.12, 1.07, 1.7)


class Grounds(NamedTuple):
    """What a guess rests on: its source, and the classes of its match's length and of its share of the votes."""

    source: str
    length: int
    share: int

    @classmethod
    def of(cls, source: str, length: int, share: float) -> Grounds:
        """Return the grounds of a guess from `source`: `length` tokens matched, and it has this share of the votes."""
        return cls(source, bisect_right(LENGTHS, length) - 1, bisect_right(SHARES, share) - 1)


class _LogisticFit:
    """Online logistic regression of an event on the log odds that a distribution gives its first choice.

    `slope` and `shift` are the initial coefficients. Each observation multiplies the sums of squared gradients, which
    set the step sizes, by `keep`.
    """

    def __init__(self, keep: float, slope: float, shift: float) -> None:
        self._keep = keep
        self._slope, self._shift = slope, shift
        self._slope_sq, self._shift_sq = 0.1, 0.1  # sums of squared gradients, which set the step sizes

    def prob(self, log_odds: float) -> float:
        return 1 / (1 + math.exp(-(self._slope * log_odds + self._shift)))

    def observe(self, log_odds: float, is_right: bool) -> None:
        """Take a gradient step of logistic loss for one observation; steps are shorter after large recent gradients."""
        error = self.prob(log_odds) - is_right
        gradient = error * log_odds
        self._slope_sq = self._slope_sq * self._keep + gradient * gradient
        self._shift_sq = self._shift_sq * self._keep + error * error
        # The 0.1 is needed because both sums fade to 0 while every first choice is right.
        self._slope -= _RATE * gradient / math.sqrt(self._slope_sq + 0.1)
        self._shift -= _RATE * error / math.sqrt(self._shift_sq + 0.1)
        self._slope = max(self._slope, 0.0)  # a more confident draft is never right less often


class _RankFrequencies:
    """Learns the probability that the target emits a token of the draft's distribution after it rejected token `first`.

    `first` is the distribution's likeliest token or one sampled from it. The distribution without `first`, scaled to a
    sum of 1, gives a probability for each other token. It is multiplied by a factor for the token's rank, its place
    among these other tokens with the likeliest first: how often tokens of this rank were right, divided by the expected
    number according to the distributions. Each observation multiplies the weight of earlier ones by `keep`.
    """

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._found = [0.0] * _RANKS  # how often the token of a rank was right
        self._expected = [0.0] * _RANKS  # how often the distributions predicted it

    def prob(self, distribution: Distribution, token: int, first: int) -> float:
        rest = _rest(distribution, first)
        rank = 0
        for other, prob in zip(distribution.ids, distribution.probs, strict=True):
            if other == token:
                rank = min(rank, _RANKS - 1)
                factor = (self._found[rank] + _PRIOR) / (self._expected[rank] + _PRIOR)
                return min(1.0, factor * (float(prob) / rest if rest > 0 else 0.0))
            rank += other != first
        raise ValueError(f"token {token} is not in the top-k")

    def observe(self, distribution: Distribution, token: int, first: int) -> None:
        rest = _rest(distribution, first)
        others = (pair for pair in zip(distribution.ids, distribution.probs, strict=True) if pair[0] != first)
        for rank, (other, prob) in enumerate(islice(others, _RANKS)):
            share = float(prob) / rest if rest > 0 else 0.0
            self._expected[rank] = self._expected[rank] * self._keep + share
            self._found[rank] = self._found[rank] * self._keep + (other == token)


class Calibration:
    """Learns from one target's verdicts how likely it accepts a draft token.

    An observation's weight halves every `half_life` observations of its kind.
    """

    def __init__(self, half_life: float = 400.0) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self._first = _LogisticFit(self._keep, 1.0, 0.0)
        self._kept = _LogisticFit(self._keep, *_KEPT_PRIOR)
        self._others, self._others_of_drawn = _RankFrequencies(self._keep), _RankFrequencies(self._keep)
        self._guesses: dict[Grounds, tuple[float, float]] = {}  # how many were observed, and how many were right
        self._guess_probs: dict[Grounds, float] = {}  # those asked for since the last observation

    def top1_accept_prob(self, distribution: Distribution) -> float:
        """Return the probability that the target emits the most likely token of this draft distribution."""
        return self._first.prob(_log_odds(distribution))

    def sampled_accept_prob(self, q: Distribution) -> float:
        """Return the probability that rejection sampling accepts a token sampled from `q`, estimated from `q` alone."""
        return self._kept.prob(_log_odds(q))

    def accept_prob(self, distribution: Distribution, token: int) -> float:
        """Return the probability that the target emits this token, which must be in the top-k of the distribution."""
        first = self._first.prob(_log_odds(distribution))
        if token == distribution.ids[0]:
            return first
        return (1 - first) * self._others.prob(distribution, token, distribution.ids[0])

    def alternative_accept_prob(self, distribution: Distribution, token: int, drawn: int, q: Distribution) -> float:
        """Return the probability that the target rejects `drawn`, a token sampled from `q`, and emits `token` instead.

        `distribution` is the draft's top-k at temperature 1, from which `q` was made.
        """
        return (1 - self.sampled_accept_prob(q)) * self._others_of_drawn.prob(distribution, token, drawn)

    def observe(self, distribution: Distribution, token: int) -> None:
        """Update the estimates with the token that the target emitted where the draft predicted `distribution`.

        An empty distribution changes nothing.
        """
        if not distribution.ids:
            return
        first = distribution.ids[0]
        self._first.observe(_log_odds(distribution), first == token)
        if first != token:
            self._others.observe(distribution, token, first)

    def observe_drawn(self, distribution: Distribution, token: int, drawn: int, q: Distribution) -> None:
        """Update the estimates for sampled tokens: the target tested `drawn`, sampled from `q`, and emitted `token`.

        The target accepted `drawn` if both tokens are equal. `distribution` is the draft's top-k at temperature 1, from
        which `q` was made.
        """
        self._kept.observe(_log_odds(q), drawn == token)
        if drawn != token:
            self._others_of_drawn.observe(distribution, token, drawn)

    def guess_accept_prob(self, grounds: Grounds) -> float:
        """Return the probability that an n-gram guess with these grounds is right."""
        found = self._guess_probs.get(grounds)
        if found is None:
            seen, right = self._guesses.get(grounds, (0.0, 0.0))
            found = (right + _GUESS_PRIOR * prior_guess_prob(grounds)) / (seen + _GUESS_PRIOR)
            self._guess_probs[grounds] = found
        return found

    def __deepcopy__(self, memo: dict[int, object]) -> Calibration:
        """Return a copy. Another thread may read or observe guesses meanwhile, so their tables are copied at once."""
        twin = copy.copy(self)
        twin._first, twin._kept = copy.copy(self._first), copy.copy(self._kept)
        twin._others, twin._others_of_drawn = copy.deepcopy((self._others, self._others_of_drawn), memo)
        twin._guesses, twin._guess_probs = self._guesses.copy(), {}
        return twin

    def observe_guess(self, grounds: Grounds, is_right: bool) -> None:
        """Count an n-gram guess as right or wrong for its `grounds`."""
        seen, right = self._guesses.get(grounds, (0.0, 0.0))
        self._guesses[grounds] = (seen * self._keep + 1, right * self._keep + is_right)
        self._guess_probs.pop(grounds, None)


class GuessTrust:
    """Learns whether n-gram guesses are right more or less often in one sequence than in all, by source of the guess.

    What is shared by all sequences says little of the next one: one answer copies its prompt, another repeats only
    phrases. The probability of a guess is multiplied by how many guesses of its source were right in this sequence,
    divided by how many were expected to be.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # by source: right ones, and expected ones

    def accept_prob(self, grounds: Grounds, calibration: Calibration) -> float:
        """Return the probability that a guess is right in this sequence; `calibration` knows it for all sequences."""
        right, expected = self._counts.get(grounds[0], (0.0, 0.0))
        return min(calibration.guess_accept_prob(grounds) * (right + _TRUST_PRIOR) / (expected + _TRUST_PRIOR), 1.0)

    def observe(self, grounds: Grounds, is_right: bool, prob: float) -> None:
        """Count a guess as right or wrong; `prob` is the probability of such guesses in all sequences."""
        right, expected = self._counts.get(grounds[0], (0.0, 0.0))
        self._counts[grounds[0]] = right + is_right, expected + prob


def prior_guess_prob(grounds: Grounds) -> float:
    """Return the probability that an n-gram guess is right, for a target of which nothing is known."""
    constant, factor = _GUESS_LINES[grounds.source]
    log_odds = constant + factor * math.log(LENGTHS[grounds.length]) + _GUESS_SHARES[grounds.share]
    return 1 / (1 + math.exp(-log_odds))


def _log_odds(distribution: Distribution) -> float:
    confidence = min(max(float(distribution.confidence), _MIN_DOUBT), 1 - _MIN_DOUBT)
    return math.log(confidence / (1 - confidence))


def _rest(distribution: Distribution, first: int) -> float:
    """Return 1 minus the probability of `first`: that of all other tokens together."""
    return 1 - float(distribution.probs[distribution.ids.index(first)])
