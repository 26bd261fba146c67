"""From logits to the top-k of a distribution. Runs once per draft row, so it sorts only the tokens that can matter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbranch.core.distribution import Distribution

_BLOCK = 64


def top_k_of(logits: NDArray[np.float32], top_k: int) -> Distribution:
    """The `head_len` most likely tokens at temperature 1, and the entropy of the whole distribution."""
    shifted = logits - logits.max()  # [vocab]
    weights = np.exp(shifted)
    total = float(weights.sum())
    entropy = np.log(total) - float(weights @ shifted) / total
    near = _largest(shifted, top_k)
    best = near[np.argsort(-shifted[near], kind="stable")][:top_k]
    return Distribution(tuple(best.tolist()), tuple((weights[best] / total).tolist()), max(float(entropy), 0.0))


def _largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Places that hold the `count` largest values, and perhaps a few more, in order.

    The best `count` of the blocks' largest are that many values, so none that is wanted is below the least of them.
    """
    num_blocks = len(values) // _BLOCK
    if num_blocks <= count:
        return np.arange(len(values))
    peaks = values[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK).max(axis=1)
    bar = np.partition(peaks, -count)[-count]
    return np.flatnonzero(values >= bar)
