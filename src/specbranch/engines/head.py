"""From logits to the head of a law. Runs once per draft row, so it sorts only the tokens that can matter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbranch.core.law import Law

_BLOCK = 64


def head_of(logits: NDArray[np.float32], head_len: int) -> Law:
    """The `head_len` most likely tokens at temperature 1, and the entropy of the whole law."""
    shifted = logits - logits.max()  # [vocab]
    weights = np.exp(shifted)
    total = float(weights.sum())
    entropy = np.log(total) - float(weights @ shifted) / total
    near = _largest(shifted, head_len)
    best = near[np.argsort(-shifted[near], kind="stable")][:head_len]
    return Law(tuple(best.tolist()), tuple((weights[best] / total).tolist()), max(float(entropy), 0.0))


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
