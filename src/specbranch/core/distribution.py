"""Next-token distributions: top-k of logits, a request's sampling parameters, and sampling that can be repeated.

Probabilities are floats in production and `Fraction`s in exact tests.

The draft service samples a token and drafts the tokens after it. The target's side samples it again, from the
distribution that the service sent, and only this second sample counts. Both use the same random number, made of the
request's seed and the tokens before: so both sample the same token, and no two positions of a draft tree share a
number. However wrong the service's distribution may be, the second token is really sampled from it, as rejection
sampling requires.

A `RandomSource` only chooses one of several weighted options. So tests can replace it by an enumeration of all choices,
and prove a distribution instead of sampling it.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Prob = float | Fraction
Dense = NDArray[Any]  # [vocab]; float64, or object holding Fractions
_BLOCK = 64  # tokens; comparing block maxima is cheaper than sorting the vocabulary
TEXT_LEN = 128  # the random number of a position is made of this many tokens before it; a draft tree is no deeper
MAX_IDS = 32  # most tokens of a distribution to sample from; all of them are sent with the sampled token
_SCALE = 2.0**-53


@dataclass(frozen=True, slots=True)
class Distribution:
    """The most likely next tokens, their probabilities at temperature 1, and the entropy of all tokens in nats."""

    ids: tuple[int, ...]
    probs: tuple[Prob, ...]
    entropy: float

    @property
    def confidence(self) -> Prob:
        """Probability of the most likely token; 0 if the distribution has no token."""
        return self.probs[0] if self.probs else 0.0

    def dense(self, vocab_len: int) -> Dense:
        """Return the probabilities as a vector over `vocab_len` tokens; tokens outside the top-k have probability 0."""
        vector = np.zeros(vocab_len, dtype=object)
        vector[list(self.ids)] = self.probs
        return vector


def distribution_of(weights: Sequence[Prob]) -> Distribution:
    """Return the distribution over a small vocabulary in which token i has the probability `weights[i]`.

    Of equally likely tokens, the lower id comes first.
    """
    order = sorted((i for i, w in enumerate(weights) if w), key=lambda i: (-weights[i], i))
    probs = tuple(weights[i] for i in order)
    return Distribution(tuple(order), probs, -sum(float(p) * math.log(p) for p in probs))


def top_k_of(logits: NDArray[np.float32], top_k: int) -> Distribution:
    """Return the `top_k` most likely tokens at temperature 1, with the entropy of the whole distribution."""
    shifted = logits - logits.max()  # [vocab]
    weights = np.exp(shifted)
    total = float(weights.sum())
    entropy = np.log(total) - float(weights @ shifted) / total
    candidates = _largest(shifted, top_k)
    best = candidates[np.argsort(-shifted[candidates], kind="stable")][:top_k]
    return Distribution(tuple(best.tolist()), tuple((weights[best] / total).tolist()), max(float(entropy), 0.0))


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return, in ascending order, the indices of the `count` largest values and perhaps of some more values.

    The values are divided into blocks. At least `count` values (the largest block maxima) are as large as the
    `count`-th largest block maximum, so smaller values are left out.
    """
    num_blocks = len(values) // _BLOCK
    if num_blocks <= count:
        return np.arange(len(values))
    peaks = values[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK).max(axis=1)
    threshold = np.partition(peaks, -count)[-count]
    return np.flatnonzero(values >= threshold)


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """How the target samples one sequence: its temperature, which is above 0, top-p, top-k (0: all tokens) and seed."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def apply(self, distribution: Distribution) -> Distribution:
        """Return the distribution to sample draft tokens from: the draft's own with this temperature, top-k and top-p.

        Its probabilities are float32, as they are sent. It has at most the first `MAX_IDS` tokens of the draft's top-k.
        """
        ids = distribution.ids[: min(self.top_k or MAX_IDS, MAX_IDS)]
        raw = np.asarray(distribution.probs[: len(ids)], dtype=np.float64)
        weights = (raw / raw[0]) ** (1 / self.temperature)
        probs = weights / weights.sum()
        if self.top_p < 1.0:
            # A token stays if those before it have less than top-p together; the first one always does.
            probs = probs[: max(int(np.searchsorted(np.cumsum(probs), self.top_p)) + 1, 1)]
            probs = probs / probs.sum()
        kept = probs.astype(np.float32)
        kept = kept[kept > 0]
        return Distribution(ids[: len(kept)], tuple(kept.tolist()), distribution.entropy)


def seeded_uniform(seed: int, position: int, text: Sequence[int]) -> float:
    """Return the random number in [0, 1) for the token at `position`; equal arguments give the same number.

    It is made of the seed, the position and the last `TEXT_LEN` tokens of `text`, the tokens before the position.
    """
    tail = text[-TEXT_LEN:]
    key = struct.pack(f"<Qq{len(tail)}i", seed, position, *tail)
    return float(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * _SCALE


def inverse_cdf(probs: Sequence[Prob], number: float) -> int:
    """Return the index that a number in [0, 1) selects by inverse-CDF sampling."""
    left = number * float(sum(probs))
    for index, prob in enumerate(probs):
        left -= float(prob)
        if left < 0:
            return index
    return len(probs) - 1  # rounding can leave a small rest


class RandomSource(Protocol):
    """Interface of a source of randomness: an implementation picks one of several weighted options."""

    def pick(self, weights: Sequence[Prob]) -> int:
        """Return a random index into `weights`; the probability of each is proportional to its weight."""
        ...


class SeededRandom:
    """Random choices from the pseudo-random generator `rng`; each choice takes exactly one number from it."""

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
        # Rounding can leave a small rest after the last positive weight.
        return last
