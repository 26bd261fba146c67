"""Attention session by session, each over the span of slots that its sequences lie in. Any number of tokens.

Nothing is copied where a session's slots lie close together, and all its rows read its keys and values together. That
makes it the fastest form on a CPU. On other devices long pieces of prompts go this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from specbranch.engines.cells import CellIds
from specbranch.engines.extras import extra
from specbranch.engines.torch.batch import Batch, Piece

with extra("torch"):
    import torch
    from torch.nn.functional import scaled_dot_product_attention

_FEW = 16  # new tokens of a session, up to which query heads of one key-value head are computed together
_SPARSE = 4  # a span of so many times the longest path is not read as it is: the slots in use are copied


class Spans:
    """The attention of one step."""

    def __init__(self, batch: Batch, device: str) -> None:
        groups = (list(group) for _, group in groupby(batch.pieces, key=attrgetter("session")))
        self._spans = [_span(group, device) for group in groups]

    def __call__(self, store: torch.Tensor, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend with queries [tokens, heads, head_dim] to a store; [tokens, kv_heads, heads of each, head_dim]."""
        parts = [span.attend(store, query[span.start : span.stop], scaling) for span in self._spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(slots=True)
class _Span:
    """One session's part of a step: tokens `start` to `stop`."""

    start: int
    stop: int
    slots: slice | torch.Tensor  # that attention runs over
    mask: torch.Tensor | None  # [tokens, slots], 0 or -inf; None if every token sees all before it and no others
    _repeated: torch.Tensor | None = None

    def attend(self, store: torch.Tensor, query: torch.Tensor, scaling: float) -> torch.Tensor:
        num_tokens, num_heads, head_dim = query.shape
        num_keys = store.shape[1] // 2
        group_len = num_heads // num_keys  # query heads of one key-value head
        keys, values = store[self.slots].transpose(0, 1)[None].chunk(2, dim=1)  # each [1, kv_heads, slots, head_dim]
        if num_tokens > _FEW or (self.mask is None and num_tokens > 1):
            out = scaled_dot_product_attention(
                query.transpose(0, 1)[None],
                keys,
                values,
                attn_mask=self._mask_of(query, 1),
                is_causal=self.mask is None,
                scale=scaling,
                enable_gqa=group_len > 1,
            )
            return out[0].transpose(0, 1).view(num_tokens, num_keys, group_len, head_dim)
        # The query heads of a group become further queries of one head: keys are read once, not once per query head.
        queries = query.view(num_tokens, num_keys, group_len, head_dim).transpose(0, 1)
        queries = queries.reshape(1, num_keys, num_tokens * group_len, head_dim)
        out = scaled_dot_product_attention(
            queries, keys, values, attn_mask=self._mask_of(query, group_len), scale=scaling
        )
        return out[0].view(num_keys, num_tokens, group_len, head_dim).transpose(0, 1)

    def _mask_of(self, query: torch.Tensor, group_len: int) -> torch.Tensor | None:
        """The mask for several queries of each token; every layer of a step asks for the same one."""
        if self._repeated is None and self.mask is not None:
            self._repeated = self.mask.to(query.dtype).repeat_interleave(group_len, dim=0)
        return self._repeated


def _span(pieces: Sequence[Piece], device: str) -> _Span:
    start, stop = pieces[0].start, pieces[-1].stop
    low = min(int(piece.path.min()) for piece in pieces)
    high = max(int(piece.path.max()) for piece in pieces) + 1
    path = pieces[0].path
    if len(pieces) == 1 and high - low == len(path) and (stop - start == 1 or _is_prompt(pieces[0])):
        return _Span(start, stop, slice(low, high), None)
    if high - low <= _SPARSE * max(len(piece.path) for piece in pieces):
        mask = _mask([piece.path - low for piece in pieces], pieces, high - low)
        return _Span(start, stop, slice(low, high), torch.from_numpy(mask).to(device))
    used = np.unique(np.concatenate([piece.path for piece in pieces]))
    mask = _mask([np.searchsorted(used, piece.path) for piece in pieces], pieces, len(used))
    return _Span(start, stop, torch.from_numpy(used).to(device), torch.from_numpy(mask).to(device))


def _is_prompt(piece: Piece) -> bool:
    """Whether a row is its whole sequence, in slots that rise from token to token."""
    return piece.num_tokens == len(piece.path) and bool((piece.path[1:] > piece.path[:-1]).all())


def _mask(paths: Sequence[CellIds], pieces: Sequence[Piece], width: int) -> NDArray[np.float32]:
    """What is added to the scores of the new tokens [tokens, width]: 0 for their paths up to themselves, else -inf."""
    first = pieces[0].start
    mask = np.full((pieces[-1].stop - first, width), -np.inf, dtype=np.float32)
    for path, piece in zip(paths, pieces, strict=True):
        block = mask[piece.start - first : piece.stop - first]
        block[:, path[: -piece.num_tokens]] = 0
        block[:, path[-piece.num_tokens :]] = np.where(np.tri(piece.num_tokens, dtype=np.bool_), 0, -np.inf)
    return mask
