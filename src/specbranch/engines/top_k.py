"""From logits to a distribution's top-k. Runs once per draft row, so it sorts only tokens that can be among them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbranch.core.distribution import Distribution

_BLOCK = 64  # tokens; comparing block maxima is cheaper than sorting the vocabulary


def top_k_of(logits: NDArray[np.float32], top_k: int) -> Distribution:
    """The `top_k` most likely tokens at temperature 1, and the entropy of the whole distribution."""
    shifted = logits - logits.max()  # [vocab]
    weights = np.exp(shifted)
    total = float(weights.sum())
    entropy = np.log(total) - float(weights @ shifted) / total
    candidates = _largest(shifted, top_k)
    best = candidates[np.argsort(-shifted[candidates], kind="stable")][:top_k]
    return Distribution(tuple(best.tolist()), tuple((weights[best] / total).tolist()), max(float(entropy), 0.0))


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest values, and perhaps a few more, in order.

    The `count` largest block maxima are `count` values, so no value below the smallest of them is needed.
    """
    num_blocks = len(values) // _BLOCK
    if num_blocks <= count:
        return np.arange(len(values))
    peaks = values[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK).max(axis=1)
    threshold = np.partition(peaks, -count)[-count]
    return np.flatnonzero(values >= threshold)
