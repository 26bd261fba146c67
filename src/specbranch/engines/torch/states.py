"""Run a model's recurrent layers on all rows of a step, and keep the states that they continue.

A state is what recurrent layers carry from token to token: the last inputs of a convolution, the matrix of a linear
attention. Each step leaves one behind every row. It is kept under the cell of the row's last token: whoever holds that
cell holds the same tokens before it, so forks share states, and no fork, truncation or end of a handle has to move any.

States need much memory, so their number is fixed, and the least recently used one makes room. A row whose state is gone
runs the tokens again that came after the newest state left: that costs time, and gives the same distributions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specbranch.engines.base import Row
from specbranch.engines.kv_cache import SlotAllocator, SlotIds
from specbranch.engines.torch.kv_store import Batch, RowSpan, build_batch, reserve
from specbranch.errors import EngineError
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch
    from torch import nn
    from transformers import DynamicCache

_CACHES = ("cache_params", "past_key_values")  # what token mixers call the cache that holds their state
_PARTS = ("conv_states", "recurrent_states")  # of a layer of such a cache; each has several tensors, or none


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of a step that have equally many tokens, and either all continue a state or all begin a sequence."""

    tokens: torch.Tensor  # [rows, tokens of each], indices into the tokens of the step
    sources: torch.Tensor | None  # [rows], the slots of the states that the rows continue; None: they begin
    targets: torch.Tensor  # [rows], the slots of the states behind the rows


class StateStore:
    """The states of all sequences: for each tensor of a state, one [states + 1, ...]; the last one is never read."""

    def __init__(self, model: Any, device: str) -> None:
        """Replace the forward functions of the recurrent layers in `model`. Call `resize` before a step."""
        self.groups: list[_Group] = []  # of the step that runs
        self.one_by_one = False  # some models' layers continue a state with no more than one token at once
        self._device = device
        cache = _new_cache(model)
        self._layers = [_RecurrentLayer(self, cache, *found) for found in recurrent_layers(model).items()]
        self.resize(0, 0)

    @property
    def layers(self) -> set[int]:
        """The indices of the recurrent layers."""
        return {layer.index for layer in self._layers}

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(layer.num_bytes for layer in self._layers)

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
            for layer in self._layers:
                layer.resize(num_states)
        except (OSError, RuntimeError) as error:  # OSError from mmap, RuntimeError from CUDA
            raise EngineError(
                f"{self._device} has no memory for {num_states} states; give fewer tokens by --cache-tokens"
            ) from error

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
            _Group(
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

    def _tensor(self, numbers: Any) -> torch.Tensor:
        return torch.tensor(numbers, device=self._device)


class _RecurrentLayer:
    """A recurrent layer's forward function for the rows of a step, and the slots of its states.

    The layer's own code computes: it gets rows as a batch, and a cache of Transformers with the states of these.
    """

    def __init__(self, states: StateStore, cache: Any, index: int, module: Any) -> None:
        self.index = index
        self._states = states
        self._cache = cache  # shared by all layers: each puts its own states in before it runs
        self._blank = cache.layers[index]
        self._continued: Any = None  # a layer with states, but without their tensors
        self._slots: dict[tuple[str, int], torch.Tensor] = {}
        self._argument = _cache_argument(module)
        self._forward = module.forward
        module.forward = self

    @property
    def num_bytes(self) -> int:
        return sum(slots.nbytes for slots in self._slots.values())

    def resize(self, num_states: int) -> None:
        """Make room for so many states, once their shapes are known; their old contents are lost."""
        for key, slots in self._slots.items():
            self._slots[key] = reserve((num_states + 1, *slots.shape[1:]), slots.dtype, str(slots.device))

    def __call__(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        """Return the layer's output for the tokens of a step [1, tokens, hidden size]."""
        out = torch.empty_like(hidden_states)
        for group in self._states.groups:
            layer = self._cache.layers[self.index] = self._layer(group.sources)
            given[self._argument] = self._cache
            is_split = self._states.one_by_one and group.sources is not None
            for tokens in group.tokens.split(1 if is_split else group.tokens.shape[1], dim=1):
                out[0, tokens] = self._forward(hidden_states[0, tokens], **given)
            self._keep(layer, group.targets)
        self._cache.layers[self.index] = self._blank
        return out

    def _layer(self, sources: torch.Tensor | None) -> Any:
        """Return the layer of a cache with copies of the states in `sources`; with None, for new sequences."""
        if sources is None:
            return copy.deepcopy(self._blank)
        layer = _without_tensors(self._continued)
        for (part, number), slots in self._slots.items():
            getattr(layer, part)[number] = slots[sources]
        return layer

    def _keep(self, layer: Any, targets: torch.Tensor) -> None:
        for part in _PARTS:
            for number, found in getattr(layer, part).items():
                if found is not None:
                    self._store((part, number), found).index_copy_(0, targets, found)
        self._continued = self._continued or _without_tensors(layer)

    def _store(self, key: tuple[str, int], like: torch.Tensor) -> torch.Tensor:
        if key not in self._slots:
            shape = (self._states.num_states + 1, *like.shape[1:])
            self._slots[key] = reserve(shape, like.dtype, str(like.device))
        return self._slots[key]


def recurrent_layers(model: Any) -> Mapping[int, Any]:
    """Return the modules in a model that keep the state of a recurrent layer in a cache, by the index of the layer.

    All that Transformers has begin with a convolution. Its older versions have other caches, and none is found.
    """
    found = {
        module.layer_idx: module
        for module in model.modules()
        if hasattr(module, "layer_idx") and any(isinstance(child, nn.Conv1d) for child in module.children())
        if _cache_argument(module)
    }
    layers = _new_cache(model).layers if found else []
    is_known = all(isinstance(getattr(layers[index], part, None), dict) for index in found for part in _PARTS)
    return found if is_known else {}


def _new_cache(model: Any) -> Any:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def step_batch(cells: SlotAllocator, rows: Sequence[Row], states: StateStore | None) -> AbstractContextManager[Batch]:
    """Return a context in which a step runs, and which gives its batch; its cells are allocated."""
    return nullcontext(build_batch(cells, rows)) if states is None else states.step(cells, rows)


def _without_tensors(layer: Any) -> Any:
    """Return a copy of a cache's layer that has its flags, but no state."""
    layer = copy.copy(layer)
    for part in _PARTS:
        setattr(layer, part, dict.fromkeys(getattr(layer, part)))
    return layer


def _cache_argument(module: Any) -> str:
    """Return what a module calls its cache; empty if it takes none."""
    known = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in known), "")


def _cell_before(piece: RowSpan) -> int:
    """Return the cell of the last token before a row's new ones."""
    return int(piece.path[-piece.num_tokens - 1])
