"""Exact verification, for reference and tests: which submitted tokens are accepted, and which token follows them.

Rule A (match) draws the target's own token at every position and keeps the submitted ones that equal it. It is exact
for any submission and needs no draft distribution. Rule B (rejection sampling) tests sampled tokens by p/q and keeps
more of them; it is exact only for tokens that were drawn from q and chosen without looking at their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specbranch.core.chance import Chance
from specbranch.core.distribution import Dense, Prob
from specbranch.core.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Offer:
    """What the draft offers at one position: tokens drawn from `distribution` without replacement, in order."""

    distribution: Dense
    tokens: tuple[int, ...]


def match(submitted: Sequence[int], sample: Callable[[int], int]) -> Verdict:
    """Rule A. `sample(i)` draws the target's token after i submitted ones; it is called once per token settled."""
    for index, token in enumerate(submitted):
        drawn = sample(index)
        if drawn != token:
            return Verdict(index, drawn)
    return Verdict(len(submitted), sample(len(submitted)))


def reject(offers: Sequence[Offer], distributions: Sequence[Dense], chance: Chance) -> Verdict:
    """Rule B. Every offer but the last begins with a submitted token; the last one holds the roots at the branch point.

    `distributions[i]` is the target's distribution after i submitted tokens.
    """
    last = len(offers) - 1
    for index, (offer, distribution) in enumerate(zip(offers, distributions, strict=True)):
        token = choose(distribution, offer, chance)
        if index == last or token != offer.tokens[0]:
            return Verdict(index, token)
    raise ValueError("rule B needs at least one offer, if only an empty one")


def choose(p: Dense, offer: Offer, chance: Chance) -> int:
    """Test the offered tokens in order, each against what the earlier ones left over; the result follows p exactly."""
    q = offer.distribution
    for token in offer.tokens:
        keep = keep_chance(p, q, token)
        if chance.pick((keep, 1 - keep)) == 0:
            return token
        p, q = recovery_distribution(p, q), without(q, token)
    return chance.pick(list(p))


def keep_chance(p: Dense, q: Dense, token: int) -> Prob:
    """Chance to keep a token that was drawn from q: min(1, p/q)."""
    ratio: Prob = p[token] / q[token]
    return min(ratio, 1)


def recovery_distribution(p: Dense, q: Dense) -> Dense:
    """The distribution after a rejection: what p has over q, normalised."""
    excess = np.maximum(p - q, 0)
    total = excess.sum()
    # With p = q nothing is ever rejected; only rounding can ask for this distribution.
    return excess / total if total else p


def without(q: Dense, token: int) -> Dense:
    """The distribution q once `token` has been drawn and is not put back."""
    rest = q.copy()
    rest[token] = 0
    total = rest.sum()
    return rest / total if total else rest
