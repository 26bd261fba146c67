"""Run one forward step: tokens in, the top-k of each output out.

The top-k is packed into one tensor of 32-bit words, so that a step ends with one small copy. Nothing as large as the
vocabulary leaves the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbranch.core.distribution import Distribution
from specbranch.engines.torch.attention import Attention, AttentionContext
from specbranch.engines.torch.kv_store import KVStore
from specbranch.errors import EngineError
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch
try:
    from specbranch.engines.torch.cpu_layers import can_compile, sum_softmax
except EngineError:  # without Numba
    sum_softmax = None

PackedTopK = NDArray[np.int32]
_LEAST = -80.0  # lowest log probability; below, its exponential is subnormal, which a CPU computes ten times slower
_BLOCK = 64  # tokens; comparing block maxima is cheaper than sorting the vocabulary


class ForwardPass:
    """Runs a model on its KV store and packs the top-k of its outputs. All tensors are on the model's device."""

    def __init__(self, model: Any, arena: KVStore, top_k: int, *, by_blocks: bool) -> None:
        self.model = model
        self.arena = arena
        self.top_k = top_k
        self.by_blocks = by_blocks  # see `pack_top_k`

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: Attention,
        outputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model on `tokens`; return the packed top-k of its outputs (see `pack_top_k`).

        `outputs` has the indices of the tokens that need an output; None means all. The other tensors are [tokens].
        """
        logits = self.logits(tokens, positions, slots, attention, outputs)
        return pack_top_k(logits, self.top_k, by_blocks=self.by_blocks)

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: Attention,
        outputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model as `__call__` does, but return the logits [outputs, vocabulary]."""
        found: torch.Tensor = self.model(tokens, positions, outputs, AttentionContext(self.arena, slots, attention))
        return found


def pack_top_k(logits: torch.Tensor, top_k: int, *, by_blocks: bool = False) -> torch.Tensor:
    """Return for each row of logits [outputs, vocabulary] its top-k and entropy, packed into one row of 32-bit words.

    A row has the ids (two words each), their log probabilities, and minus the entropy of the whole distribution.
    `by_blocks` uses more operations that read less, and bounds log probabilities before their exponentials. That is
    faster on a CPU, where starting an operation is cheap. With Numba it reads all logits only twice.
    """
    if by_blocks and sum_softmax is not None and can_compile():
        logits = logits.float().contiguous()
        ids, values = _top_by_blocks(logits, top_k)
        sums = np.empty((len(logits), 2), np.float32)
        sum_softmax(logits.numpy(), values[:, 0].contiguous().numpy(), sums)
        shift, mean = torch.from_numpy(sums).split(1, dim=-1)
        return _packed(ids, values + shift, mean)
    log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
    probs = log_probs.clamp(min=_LEAST).exp_() if by_blocks else log_probs.exp()
    mean = probs.mul_(log_probs).sum(dim=-1, keepdim=True)  # minus the entropy
    ids, values = _top_by_blocks(log_probs, top_k) if by_blocks else _top(log_probs, top_k)
    return _packed(ids, values, mean)


def _packed(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.contiguous().view(torch.int32) for part in parts], dim=-1)


def _top(values: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    best = values.topk(top_k, dim=-1)
    return best.indices, best.values


def _top_by_blocks(values: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and values of the `top_k` largest values, like `_top`, but search fewer values.

    All of them are in the `top_k` blocks with the largest maxima, or after the last whole block.
    """
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


def unpack_top_k(words: PackedTopK, top_k: int) -> list[Distribution]:
    """Return the distributions that `pack_top_k` has packed into `words`, one for each row of `words`."""
    ids = _longs(words[:, : 2 * top_k])
    probs = np.exp(_floats(words[:, 2 * top_k : 3 * top_k]))
    entropies = -_floats(words[:, 3 * top_k : 3 * top_k + 1])[:, 0]
    return [
        Distribution(tuple(one_ids), tuple(one_probs), max(entropy, 0.0))
        for one_ids, one_probs, entropy in zip(ids.tolist(), probs.tolist(), entropies.tolist(), strict=True)
    ]


def to_host(words: torch.Tensor) -> PackedTopK:
    """Copy a step's packed top-k from the device to the host, and return it as an array."""
    found: PackedTopK = words.cpu().numpy()
    return found


def _longs(words: PackedTopK) -> NDArray[np.int64]:
    return np.ascontiguousarray(words).view(np.int64)


def _floats(words: PackedTopK) -> NDArray[np.float32]:
    return np.ascontiguousarray(words).view(np.float32)
