"""Store the keys, values and states of all sessions as tensors, and lay out the rows of a step as arrays.

A state is what recurrent layers carry from token to token: the last inputs of a convolution, the matrix of a linear
attention. Each step leaves one behind every row. It is kept under the cell of the row's last token: whoever holds that
cell holds the same tokens before it, so forks share states, and no fork, truncation or end of a handle has to move any.

States need much memory, so their number is fixed, and the least recently used one makes room. A row whose state is gone
runs the tokens again that came after the newest state left: that costs time, and gives the same distributions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbranch.engines.base import Row
from specbranch.engines.kv_cache import SlotAllocator, SlotIds, SlotRegion
from specbranch.errors import EngineError
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch

StateKey = tuple[int, str, int]  # of a tensor in a state: its layer, and its place in that layer's cache


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


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a step that have equally many tokens, and either all continue a state or all begin a sequence."""

    tokens: torch.Tensor  # [rows, tokens of each], indices into the tokens of the step
    sources: torch.Tensor | None  # [rows], the slots of the states that the rows continue; None: they begin
    targets: torch.Tensor  # [rows], the slots of the states behind the rows


class StateStore:
    """The states of all sequences: for each tensor of a state, one [states + 1, ...]; the last one is never read."""

    def __init__(self, device: str) -> None:
        """Call `resize` before a step."""
        self.groups: list[RowGroup] = []  # of the step that runs
        self.one_by_one = False  # some models' layers continue a state with no more than one token at once
        self._device = device
        self._slots: dict[StateKey, torch.Tensor] = {}
        self.resize(0, 0)

    @property
    def layers(self) -> set[int]:
        """The indices of the layers that have written states."""
        return {layer for layer, _, _ in self._slots}

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slots.nbytes for slots in self._slots.values())

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state; some step must have run."""
        return self.num_bytes // (self.num_states + 1)

    def resize(self, num_cells: int, num_states: int) -> None:
        """Forget all states, and make room for `num_states` of them beside a KV cache of `num_cells` cells."""
        self.num_states = num_states
        self._tokens = np.zeros(num_cells, dtype=np.int64)  # by cell
        self._kept: dict[int, int] = {}  # slots of states, by cell; the least recently used first
        self._free = list(range(num_states))
        try:
            self._slots = {key: self._reserve(slots) for key, slots in self._slots.items()}
        except (OSError, RuntimeError) as error:  # OSError from mmap, RuntimeError from CUDA
            raise EngineError(
                f"{self._device} has no memory for {num_states} states; give fewer tokens by --cache-tokens"
            ) from error

    def read(self, layer: int, slots: torch.Tensor) -> Iterator[tuple[StateKey, torch.Tensor]]:
        """Yield copies of a layer's part of the states in `slots`, each tensor [rows, ...] with its key."""
        for key, stored in self._slots.items():
            if key[0] == layer:
                yield key, stored[slots]

    def write(self, key: StateKey, slots: torch.Tensor, fresh: torch.Tensor) -> None:
        """Write one tensor of a layer's states [rows, ...] to `slots`."""
        if key not in self._slots:
            self._slots[key] = self._reserve(fresh)
        self._slots[key].index_copy_(0, slots, fresh)

    @contextmanager
    def step(self, cells: SlotAllocator, rows: Sequence[Row]) -> Iterator[Batch]:
        """Give the batch of a step whose cells are allocated, in which each row begins where its newest state ends.

        The states behind the rows are kept if the step succeeds.
        """
        batch = build_batch(cells, [self._from_newest(row, cells.path(row.handle)) for row in rows])
        fresh = self._plan(cells, batch.pieces)
        try:
            yield batch
        except BaseException:
            self._free += fresh.values()
            raise
        self._kept |= fresh

    def _from_newest(self, row: Row, path: SlotIds) -> Row:
        """Return a row with all its tokens behind the newest state of its sequence, which has the cells `path`."""
        held = len(path) - len(row.tokens)
        self._tokens[path[held:]] = row.tokens
        for cell in path[held:].tolist():  # other sequences had these cells before
            self._drop(cell)
        seen = next((place for place in range(held, 0, -1) if path[place - 1] in self._kept), 0)
        return replace(row, tokens=tuple(self._tokens[path[seen:]].tolist()))

    def _plan(self, cells: SlotAllocator, pieces: Sequence[RowSpan]) -> dict[int, int]:
        """Group the rows of a step; return the slots of the states behind them by cell, where there is room."""
        groups: dict[tuple[int, bool], list[RowSpan]] = {}
        sources: dict[int, int] = {}
        for piece in pieces:
            continues = piece.num_tokens < len(piece.path)
            groups.setdefault((piece.num_tokens, continues), []).append(piece)
            if continues:
                cell = _cell_before(piece)
                sources[cell] = self._kept[cell]
        for cell in sources:  # used now
            self._kept[cell] = self._kept.pop(cell)
        fresh = {int(piece.path[-1]): self._take(cells, len(sources)) for piece in pieces}
        self.groups = [
            RowGroup(
                self._tensor([list(range(piece.start, piece.stop)) for piece in group]),
                self._tensor([sources[_cell_before(piece)] for piece in group]) if continues else None,
                self._tensor([fresh[int(piece.path[-1])] for piece in group]),
            )
            for (_, continues), group in groups.items()
        ]
        return {cell: slot for cell, slot in fresh.items() if slot < self.num_states}

    def _take(self, cells: SlotAllocator, num_sources: int) -> int:
        """Return a free slot, if need be that of a state without holder, or of the least recently used one.

        The last `num_sources` states are being read. With no others left, return the slot that is never read.
        """
        if not self._free:
            kept = list(self._kept)
            for cell, is_held in zip(kept, cells.are_held(np.array(kept, dtype=np.int64)), strict=True):
                if not is_held:
                    self._drop(cell)
        if not self._free and len(self._kept) > num_sources:
            self._drop(next(iter(self._kept)))
        return self._free.pop() if self._free else self.num_states

    def _drop(self, cell: int) -> None:
        if cell in self._kept:
            self._free.append(self._kept.pop(cell))

    def _reserve(self, like: torch.Tensor) -> torch.Tensor:
        return reserve((self.num_states + 1, *like.shape[1:]), like.dtype, self._device)

    def _tensor(self, numbers: Any) -> torch.Tensor:
        return torch.tensor(numbers, device=self._device)


def step_batch(cells: SlotAllocator, rows: Sequence[Row], states: StateStore | None) -> AbstractContextManager[Batch]:
    """Return a context in which a step runs, and which gives its batch; its cells are allocated."""
    return nullcontext(build_batch(cells, rows)) if states is None else states.step(cells, rows)


def _cell_before(piece: RowSpan) -> int:
    """Return the cell of the last token before a row's new ones."""
    return int(piece.path[-piece.num_tokens - 1])
