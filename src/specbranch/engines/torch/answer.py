"""What a step gives back: the top-k of each output, computed where the logits are, and copied to the host at once.

All numbers go into one tensor of 32-bit words, so that a step ends with one small copy. Nothing as large as the
vocabulary leaves the device.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbranch.core.distribution import Distribution
from specbranch.engines.extras import extra

with extra("torch"):
    import torch

Words = NDArray[np.int32]
_LEAST = -80.0  # of a log probability; below, its exponential is no normal number, and takes a CPU ten times as long
_BLOCK = 64  # tokens; comparing block maxima is cheaper than sorting the vocabulary


def pack(logits: torch.Tensor, top_k: int, *, by_blocks: bool = False) -> torch.Tensor:
    """Logits [outputs, vocabulary] as words [outputs, ...]: ids, log probabilities, and entropy.

    `by_blocks` finds the top-k with more operations that look at less, and bounds log probabilities before their
    exponentials: faster on a CPU, where operations are cheap.
    """
    log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
    probs = log_probs.clamp(min=_LEAST).exp_() if by_blocks else log_probs.exp()
    mean = probs.mul_(log_probs).sum(dim=-1, keepdim=True)  # minus the entropy
    ids, values = _top_by_blocks(log_probs, top_k) if by_blocks else _top(log_probs, top_k)
    return torch.cat([part.view(torch.int32) for part in (ids, values, mean)], dim=-1)


def _top(values: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    best = values.topk(top_k, dim=-1)
    return best.indices, best.values


def _top_by_blocks(values: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same: the `top_k` largest are in the `top_k` blocks with the largest maxima, or behind all blocks."""
    num_rows, width = values.shape
    num_blocks = width // _BLOCK
    if num_blocks <= top_k:
        return _top(values, top_k)
    blocked = num_blocks * _BLOCK
    peaks = values[:, :blocked].view(num_rows, num_blocks, _BLOCK).amax(dim=-1)
    starts = peaks.topk(top_k, dim=-1, sorted=False).indices * _BLOCK
    inside = (starts[:, :, None] + torch.arange(_BLOCK)).flatten(1)
    ids = torch.cat((inside, torch.arange(blocked, width).expand(num_rows, -1)), dim=-1)
    places, best = _top(values.gather(1, ids), top_k)
    return ids.gather(1, places), best


def unpack(words: Words, top_k: int) -> list[Distribution]:
    """The distributions of words that are on the host."""
    ids = _longs(words[:, : 2 * top_k])
    probs = np.exp(_floats(words[:, 2 * top_k : 3 * top_k]))
    entropies = -_floats(words[:, 3 * top_k : 3 * top_k + 1])[:, 0]
    return [
        Distribution(tuple(one_ids), tuple(one_probs), max(entropy, 0.0))
        for one_ids, one_probs, entropy in zip(ids.tolist(), probs.tolist(), entropies.tolist(), strict=True)
    ]


def to_host(words: torch.Tensor) -> Words:
    """The one copy of a step from the device."""
    found: Words = words.cpu().numpy()
    return found


def _longs(words: Words) -> NDArray[np.int64]:
    return np.ascontiguousarray(words).view(np.int64)


def _floats(words: Words) -> NDArray[np.float32]:
    return np.ascontiguousarray(words).view(np.float32)
