"""Attention of all rows at once, each over the slots of its own path: a page table with pages of one slot.

Shapes are fixed: a step is filled up to the next of a few sizes, its bucket, so that one recording of a bucket's
operations serves all its steps. Every token is a row of its own with its own length, so there is no causal mask: a
layer's keys are written before they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specbranch.engines.extras import extra
from specbranch.engines.torch.batch import Batch

with extra("torch"):
    import torch
    from torch.nn.functional import scaled_dot_product_attention

_NUM_PARTS = 4  # of a frame, beside the page table


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a step: rows, and slots that each of them may read."""

    num_rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """The sizes that steps are filled up to, each rising."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (256, 1024, 4096, 16384)

    def __iter__(self) -> Iterator[Bucket]:
        return (Bucket(num_rows, context) for context in self.contexts for num_rows in self.rows)

    def up_to(self, num_slots: int) -> Buckets:
        """These buckets without contexts that are longer than a cache of so many slots needs."""
        needed = sum(context < num_slots for context in self.contexts) + 1
        return replace(self, contexts=self.contexts[:needed])

    def bucket(self, batch: Batch) -> Bucket | None:
        """The smallest bucket that holds a batch; None if it is too large for any."""
        num_rows = next((size for size in self.rows if size >= len(batch.tokens)), None)
        context = next((size for size in self.contexts if size >= batch.longest), None)
        return None if num_rows is None or context is None else Bucket(num_rows, context)


class Attention(Protocol):
    """How the rows of a step read a layer's store."""

    def __call__(self, store: torch.Tensor, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attend with queries [tokens, heads, head_dim] to a store; [tokens, kv_heads, heads of each, head_dim]."""
        ...


class Reader(Protocol):
    """One way to compute attention over page tables."""

    def plan(self, bucket: Bucket, lengths: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        """Prepare a step, outside of what is recorded, by its lengths [rows] and page table [rows, context]."""
        ...

    def attention(self, bucket: Bucket, lengths: torch.Tensor, pages: torch.Tensor) -> Attention:
        """The attention of a step, by the same two on the device."""
        ...


class Gathered:
    """Copies each row's keys and values, then attends to all rows in one call. Runs on every device."""

    def __init__(self, most: int, device: str, dtype: torch.dtype) -> None:
        """`most` is the largest context; `dtype` that of queries and keys."""
        self._places = torch.arange(most, device=device)
        self._dtype = dtype

    def plan(self, bucket: Bucket, lengths: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        pass

    def attention(self, bucket: Bucket, lengths: torch.Tensor, pages: torch.Tensor) -> Attention:
        # Added to the scores rather than boolean: every layer would have to convert a boolean mask to this one.
        is_seen = self._places[: bucket.context] < lengths[:, None]  # [rows, context]
        mask = torch.where(is_seen, 0.0, float("-inf")).to(self._dtype)[:, None, None]

        def attend(store: torch.Tensor, query: torch.Tensor, scaling: float) -> torch.Tensor:
            keys, values = store[pages].transpose(1, 2).chunk(2, dim=1)  # each [rows, kv_heads, context, head_dim]
            queries = query.view(len(query), keys.shape[1], -1, query.shape[2])
            return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)

        return attend


class Frame:
    """The buffers of all steps of fixed shape: one on the host, one on the device, copied at once.

    On a CPU both are the same memory. What a step leaves in the page table is harmless: places beyond a row's length
    are masked, and every number in it is that of some slot.
    """

    def __init__(self, buckets: Buckets, scratch: int, device: str) -> None:
        self.buckets = buckets
        self._scratch = scratch
        self._most_rows = buckets.rows[-1]
        size = self._most_rows * (_NUM_PARTS + buckets.contexts[-1])
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.startswith("cuda"))
        self._device = self._host if device == "cpu" else self._host.to(device)

    def fill(self, batch: Batch, bucket: Bucket, reader: Reader) -> None:
        """Bring a batch to the device."""
        count = len(batch.tokens)
        tokens, positions, slots, lengths, pages = _parts(self._host.numpy(), self._most_rows, bucket)
        for part, given, padding in (
            (tokens, batch.tokens, 0),
            (positions, batch.positions, 0),
            (slots, batch.slots, self._scratch),
            (lengths, batch.positions + 1, 1),
        ):
            part[:count] = given
            part[count:] = padding
        for piece in batch.pieces:
            pages[piece.start : piece.stop, : len(piece.path)] = piece.path
        if self._device is not self._host:
            used = _NUM_PARTS * self._most_rows + bucket.num_rows * bucket.context
            self._device[:used].copy_(self._host[:used], non_blocking=True)
        reader.plan(bucket, lengths, pages)

    def parts(self, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        """A step on the device: tokens, positions, slots to write, lengths [rows], page table [rows, context]."""
        return _parts(self._device, self._most_rows, bucket)


def _parts(buffer: Any, most_rows: int, bucket: Bucket) -> tuple[Any, ...]:
    """A buffer's parts, as views, of an array as of a tensor."""
    flat, start = [buffer[at * most_rows :][: bucket.num_rows] for at in range(_NUM_PARTS)], _NUM_PARTS * most_rows
    pages = buffer[start:][: bucket.num_rows * bucket.context].reshape(bucket.num_rows, bucket.context)
    return (*flat, pages)
