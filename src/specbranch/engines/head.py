"""From logits to the head of a law. Runs once per draft row, so it sorts only the tokens that can matter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbranch.core.law import Law

# Tokens this far below the best logit have less than 1e-6 of its probability.
_REACH = 14.0


def head_of(logits: NDArray[np.float32], head_len: int) -> Law:
    """The `head_len` most likely tokens at temperature 1, and the entropy of the whole law."""
    shifted = logits - logits.max()  # [vocab]
    weights = np.exp(shifted)
    total = float(weights.sum())
    entropy = np.log(total) - float(weights @ shifted) / total
    near = np.flatnonzero(shifted > -_REACH)
    if len(near) < head_len:
        near = np.arange(len(shifted))
    if len(near) > 4 * head_len:
        near = near[np.argpartition(shifted[near], -head_len)[-head_len:]]
    best = near[np.argsort(-shifted[near], kind="stable")][:head_len]
    return Law(tuple(best.tolist()), tuple((weights[best] / total).tolist()), max(float(entropy), 0.0))
