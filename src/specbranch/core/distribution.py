"""A next-token distribution as the draft reports it: its top-k tokens, most likely first.

Probabilities are floats in production and `Fraction`s in exact tests; nothing here rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Prob = float | Fraction
Dense = NDArray[Any]  # [vocab]; float64, or object holding Fractions


@dataclass(frozen=True, slots=True)
class Distribution:
    """The most likely next tokens, their probabilities at temperature 1, and the entropy of all tokens in nats."""

    ids: tuple[int, ...]
    probs: tuple[Prob, ...]
    entropy: float

    @property
    def confidence(self) -> Prob:
        """Probability of the most likely token: a fact about the distribution, never about a token drawn from it."""
        return self.probs[0] if self.probs else 0.0

    def dense(self, vocab_len: int) -> Dense:
        """The top-k tokens as a vector over the vocabulary; all others are zero."""
        vector = np.zeros(vocab_len, dtype=object)
        vector[list(self.ids)] = self.probs
        return vector


def distribution_of(weights: Sequence[Prob]) -> Distribution:
    """The whole distribution over a small vocabulary: weight i belongs to token i; ties go to the lower token."""
    order = sorted((i for i, w in enumerate(weights) if w), key=lambda i: (-weights[i], i))
    probs = tuple(weights[i] for i in order)
    return Distribution(tuple(order), probs, -sum(float(p) * math.log(p) for p in probs))
