"""How a request samples, and how draft tokens are drawn for it: the same way on both sides of the wire.

The draft service draws a token to draft on behind it; the target's side draws it again, from the distribution that it
was told, and only its own draw counts. Both use the same number, made of the request's seed and the text before the
token: so they agree, and no two places of a draft tree share a number. What the service says of a distribution can
then be wrong in any way, and the token still was drawn from just that.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbranch.core.distribution import Distribution, Prob

TEXT_LEN = 128  # tokens before a place that its number is made of; a draft tree is no deeper
MOST_IDS = 32  # that a token is drawn from; they go over the wire with it
_SCALE = 2.0**-53


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target samples one sequence: above temperature 0, with top-p and top-k (0: all tokens)."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def shape(self, distribution: Distribution) -> Distribution:
        """A draft's distribution as the target would sample from it: what tokens are drawn from.

        In float32, as it goes over the wire. The tokens that the draft does not name are left out.
        """
        ids = distribution.ids[: min(self.top_k or MOST_IDS, MOST_IDS)]
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


def number(seed: int, position: int, text: Sequence[int]) -> float:
    """A number from 0 to 1 for the token at a position behind a text, of which the last `TEXT_LEN` tokens count."""
    tail = text[-TEXT_LEN:]
    key = struct.pack(f"<Qq{len(tail)}i", seed, position, *tail)
    return float(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * _SCALE


def pick(probs: Sequence[Prob], number: float) -> int:
    """Which of these a number from 0 to 1 falls on, each as often as its probability says."""
    left = number * float(sum(probs))
    for index, prob in enumerate(probs):
        left -= float(prob)
        if left < 0:
            return index
    return len(probs) - 1  # rounding can leave a crumb
