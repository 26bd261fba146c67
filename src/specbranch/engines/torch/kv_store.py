"""Store the keys and values of all sessions as tensors, and lay out the rows of a step as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
from numpy.typing import NDArray

from specbranch.engines.base import Row
from specbranch.engines.kv_cache import SlotAllocator, SlotIds, SlotRegion
from specbranch.errors import EngineError
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch


class KVStore:
    """The KV cache: for each layer a tensor [slots, 2 * kv_heads, head_dim], keys before values.

    One extra slot takes the writes of padding rows and is never read. A layer's tensor is created when the layer first
    writes; `sized_like` creates all of them at once.
    """

    def __init__(self, num_slots: int, device: str, *, by_head: bool) -> None:
        """`by_head` stores all slots of one head next to each other, as span attention reads them.

        Otherwise all heads of one slot are next to each other.
        """
        self.num_slots = num_slots
        self.device = device
        self._by_head = by_head
        self._layers: dict[int, torch.Tensor] = {}

    @classmethod
    def sized_like(cls, other: KVStore, num_slots: int) -> KVStore:
        """Create a store for the same model as `other`, with `num_slots` slots and the tensors of all layers."""
        arena = cls(num_slots, other.device, by_head=other._by_head)
        try:
            arena._layers = {layer: arena._store(store) for layer, store in other._layers.items()}
        except (OSError, RuntimeError) as error:  # OSError from mmap, RuntimeError from CUDA
            raise EngineError(
                f"{other.device} has no memory for a cache of {num_slots} tokens; give fewer by --cache-tokens"
            ) from error
        return arena

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self._any_store().dtype

    @property
    def num_key_heads(self) -> int:
        """The number of key heads per layer; there are as many value heads."""
        return int(self._any_store().shape[1]) // 2

    @property
    def head_dim(self) -> int:
        """Length of one key."""
        return int(self._any_store().shape[2])

    @property
    def layers(self) -> set[int]:
        """The indices of the layers that have a tensor."""
        return set(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(store.nbytes for store in self._layers.values())

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's keys and values."""
        return self.num_bytes // (self.num_slots + 1)

    @property
    def scratch(self) -> int:
        """The slot that padding rows write and nothing reads."""
        return self.num_slots

    def write(self, layer: int, slots: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        """Write keys and values [tokens, 2 * kv_heads, head_dim] to a layer's `slots`; return the layer's tensor."""
        if layer not in self._layers:
            self._layers[layer] = self._store(fresh)
        store = self._layers[layer]
        store.index_copy_(0, slots, fresh)
        return store

    def heads(self, layer: int) -> NDArray[np.float32] | None:
        """Return the memory of a layer [2 * kv_heads, slots, head_dim]; None if it is no array of float32 by heads.

        It is none either before the layer first writes.
        """
        store = self._layers.get(layer)
        is_array = self._by_head and self.device == "cpu" and store is not None and store.dtype == torch.float32
        return store.transpose(0, 1).numpy() if is_array and store is not None else None

    def _any_store(self) -> torch.Tensor:
        return next(iter(self._layers.values()))

    def _store(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not empty: a masked slot has weight 0, and 0 times a NaN left in memory would still be NaN.
        num_heads, head_dim = like.shape[1:]
        if self._by_head:
            return reserve((num_heads, self.num_slots + 1, head_dim), like.dtype, self.device).transpose(0, 1)
        return reserve((self.num_slots + 1, num_heads, head_dim), like.dtype, self.device)


def reserve(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return zeros that on a CPU take memory where they are first written."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The system allocates a mapping page by page, when it is first written; torch's zeros take all memory at once.
    # NumPy's ask for huge pages: one per head and layer, even for a session of a few tokens.
    memory = mmap(-1, math.prod(shape) * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One row of a step: its new tokens are `start` to `stop` in the step's tokens.

    `path` has the slots of its whole sequence, new tokens included; `session` is the region that they belong to.
    """

    session: SlotRegion
    start: int
    stop: int
    path: SlotIds

    @property
    def num_tokens(self) -> int:
        """The number of new tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Batch:
    """All tokens of a step. The rows of a session follow each other."""

    pieces: Sequence[RowSpan]
    tokens: NDArray[np.int64]  # [tokens]
    positions: NDArray[np.int64]  # [tokens], in the sequence of each
    slots: NDArray[np.int64]  # [tokens], for their keys and values
    outputs: NDArray[np.int64]  # [outputs], indices of tokens that need a distribution, in the order of the rows

    @property
    def longest(self) -> int:
        """Length of the longest sequence in tokens."""
        return max(len(piece.path) for piece in self.pieces)


def build_batch(cells: SlotAllocator, rows: Sequence[Row]) -> Batch:
    """Build the batch of a step from its rows, whose cells are already allocated in `cells`."""
    by_session: dict[SlotRegion, list[int]] = {}
    for index, row in enumerate(rows):
        by_session.setdefault(cells.session(row.handle), []).append(index)
    pieces: list[RowSpan] = []
    tokens: list[int] = []
    outputs: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(rows)
    for session, indices in by_session.items():
        for index in indices:
            row, start = rows[index], len(tokens)
            tokens += row.tokens
            pieces.append(RowSpan(session, start, len(tokens), cells.path(row.handle)))
            outputs[index] = np.arange(len(tokens) - row.num_outputs, len(tokens))
    return Batch(
        pieces,
        np.array(tokens, dtype=np.int64),
        np.concatenate([np.arange(len(piece.path) - piece.num_tokens, len(piece.path)) for piece in pieces]),
        np.concatenate([piece.path[-piece.num_tokens :] for piece in pieces]),
        np.concatenate(outputs),
    )
