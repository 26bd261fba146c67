"""Attention of a draft step, in two forms: over spans of slots, and over page tables.

Span attention copies nothing if a session's slots lie close together, and reads the keys and values of all its rows at
once. It is the fastest form on a CPU; other devices use it for long prompts.

Paged attention has fixed shapes: a step is padded to the next of a few sizes, its bucket, so that one recording of a
bucket's operations serves all its steps. Every token is a row with a length of its own, so there is no causal mask: a
layer's keys are written before they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specbranch.engines.kv_cache import SlotIds
from specbranch.engines.torch.kv_store import Batch, KVStore, RowSpan
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch
    from torch.nn.functional import scaled_dot_product_attention

_FEW = 16  # new tokens of a session up to which the query heads of one key-value head are computed together
_SPARSE = 4  # if a span is over this many times the longest path, its used slots are copied instead
_NUM_PARTS = 4  # of the buffer, in addition to the page table
_ROWS_AT_ONCE = 4096  # queries of a head whose scores are computed one by one, in memory


@dataclass(frozen=True, slots=True)
class LayerForm:
    """How the attention of a layer differs from plain attention.

    `window`: a token sees itself and the tokens before it, this many together; None: all. `softcap`: scores are bounded
    smoothly to this size. `sinks` [heads]: a score of each head that takes part in the softmax and has no value.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_by_hand(self) -> bool:
        """Whether torch's fused attention cannot compute it."""
        return self.softcap is not None or self.sinks is not None


PLAIN = LayerForm()


class SpanAttention:
    """The attention of one step, computed session by session over spans of slots; every layer calls it."""

    def __init__(self, batch: Batch, device: str) -> None:
        self._batch = batch
        self._device = device
        self._by_window: dict[int | None, list[_Span]] = {}

    @cached_property
    def paths(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The slots of all sequences, and for each token where those of its own begin, and how many it sees."""
        pieces = self._batch.pieces
        lengths = [len(piece.path) for piece in pieces]
        starts = np.repeat(np.cumsum([0, *lengths[:-1]]), [piece.num_tokens for piece in pieces])
        return np.concatenate([piece.path for piece in pieces]), starts, self._batch.positions + 1

    def __call__(
        self, store: torch.Tensor, query: torch.Tensor, scaling: float, form: LayerForm = PLAIN
    ) -> torch.Tensor:
        """Return the attention of queries [tokens, heads, head_dim] over the keys and values in a layer's store.

        `scaling` multiplies the scores. The result is [tokens, kv_heads, group_len, head_dim].
        """
        spans = self._spans(form.window)
        parts = [span.attend(store, query[span.start : span.stop], scaling, form) for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _spans(self, window: int | None) -> list[_Span]:
        """Return the spans of the sessions. All layers of a step with the same window share them."""
        if window is not None and window >= self._batch.longest:
            window = None
        if window not in self._by_window:
            groups = (list(group) for _, group in groupby(self._batch.pieces, key=attrgetter("session")))
            self._by_window[window] = [_span(group, window, self._device) for group in groups]
        return self._by_window[window]


@dataclass(slots=True)
class _Span:
    """One session's part of a step: its tokens are `start` to `stop` in the step's tokens."""

    start: int
    stop: int
    slots: slice | torch.Tensor  # that the tokens attend to
    mask: torch.Tensor | None  # [tokens, slots], 0 or -inf; None for plain causal attention
    _repeated: dict[int, torch.Tensor] = field(default_factory=dict)

    def attend(self, store: torch.Tensor, query: torch.Tensor, scaling: float, form: LayerForm) -> torch.Tensor:
        num_tokens, num_heads, head_dim = query.shape
        num_keys = store.shape[1] // 2
        group_len = num_heads // num_keys  # query heads of one key-value head
        keys, values = store[self.slots].transpose(0, 1)[None].chunk(2, dim=1)  # each [1, kv_heads, slots, head_dim]
        if not form.is_by_hand and (num_tokens > _FEW or (self.mask is None and num_tokens > 1)):
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
        # Turn the query heads of a group into more queries of one head: keys are read once, not once per query head.
        queries = query.view(num_tokens, num_keys, group_len, head_dim).transpose(0, 1)
        queries = queries.reshape(1, num_keys, num_tokens * group_len, head_dim)
        mask = self._mask_of(query, group_len)
        if form.is_by_hand:
            if mask is None and num_tokens > 1:  # a whole prompt
                causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=query.device).tril()
                mask = torch.zeros_like(causal, dtype=query.dtype).masked_fill_(~causal, float("-inf"))
                mask = mask.repeat_interleave(group_len, dim=0)
            out = _attend_by_hand(queries, keys, values, mask, scaling, form)
        else:
            out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
        return out[0].view(num_keys, num_tokens, group_len, head_dim).transpose(0, 1)

    def _mask_of(self, query: torch.Tensor, group_len: int) -> torch.Tensor | None:
        """Return the mask in the dtype of `query`, each token's row repeated `group_len` times; None without a mask.

        It is computed once, because the layers of a step share it.
        """
        if self.mask is not None and group_len not in self._repeated:
            self._repeated[group_len] = self.mask.to(query.dtype).repeat_interleave(group_len, dim=0)
        return self._repeated.get(group_len)


def _attend_by_hand(
    queries: torch.Tensor,  # [rows, kv_heads, queries, head_dim]; heads of a group follow each other for every token
    keys: torch.Tensor,  # [rows, kv_heads, slots, head_dim]
    values: torch.Tensor,
    mask: torch.Tensor | None,  # to add to scores, for `queries` and slots
    scaling: float,
    form: LayerForm,
) -> torch.Tensor:
    """Return what torch's attention would, with bounded scores and with sinks."""
    sinks = None
    if form.sinks is not None:
        by_head = form.sinks.to(queries.dtype).view(1, keys.shape[1], 1, -1)
        num_tokens = queries.shape[2] // by_head.shape[3]
        sinks = by_head.expand(len(queries), -1, num_tokens, -1).reshape(*queries.shape[:3], 1)
    parts = []
    for start in range(0, queries.shape[2], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        scores = (queries[:, :, part] @ keys.transpose(-1, -2)).mul_(scaling)
        if form.softcap is not None:
            scores = scores.div_(form.softcap).tanh_().mul_(form.softcap)
        if mask is not None:
            scores += mask if mask.shape[-2] == 1 else mask[..., part, :]
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, :, part]), dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        parts.append(weights[..., : keys.shape[2]] @ values)
    return torch.cat(parts, dim=2)


def _span(pieces: Sequence[RowSpan], window: int | None, device: str) -> _Span:
    """Return the span of one session's rows; with a `window`, of the slots that some token sees."""
    start, stop = pieces[0].start, pieces[-1].stop
    if window is not None:
        pieces = [replace(piece, path=piece.path[-(window + piece.num_tokens - 1) :]) for piece in pieces]
    low = min(int(piece.path.min()) for piece in pieces)
    high = max(int(piece.path.max()) for piece in pieces) + 1
    path = pieces[0].path
    is_plain = stop - start == 1 or (_is_prompt(pieces[0]) and (window is None or window >= len(path)))
    if len(pieces) == 1 and high - low == len(path) and is_plain:
        return _Span(start, stop, slice(low, high), None)
    if high - low <= _SPARSE * max(len(piece.path) for piece in pieces):
        mask = _mask([piece.path - low for piece in pieces], pieces, high - low, window)
        return _Span(start, stop, slice(low, high), torch.from_numpy(mask).to(device))
    used = np.unique(np.concatenate([piece.path for piece in pieces]))
    mask = _mask([np.searchsorted(used, piece.path) for piece in pieces], pieces, len(used), window)
    return _Span(start, stop, torch.from_numpy(used).to(device), torch.from_numpy(mask).to(device))


def _is_prompt(piece: RowSpan) -> bool:
    """Return whether a row's new tokens are its whole sequence, in slots whose numbers rise from token to token."""
    return piece.num_tokens == len(piece.path) and bool((piece.path[1:] > piece.path[:-1]).all())


def _mask(paths: Sequence[SlotIds], pieces: Sequence[RowSpan], width: int, window: int | None) -> NDArray[np.float32]:
    """Return the mask [tokens, width] to add to attention scores: 0 where a token sees a column's slot, else -inf.

    A token sees its own sequence up to itself, or the last `window` tokens of that. `paths` has for each row of
    `pieces` the columns of its sequence, in order.
    """
    first = pieces[0].start
    mask = np.full((pieces[-1].stop - first, width), -np.inf, dtype=np.float32)
    for path, piece in zip(paths, pieces, strict=True):
        block = mask[piece.start - first : piece.stop - first]
        count, before = piece.num_tokens, len(path) - piece.num_tokens
        is_seen = np.tri(count, len(path), before, dtype=np.bool_)
        if window is not None:
            is_seen &= ~np.tri(count, len(path), before - window, dtype=np.bool_)
        block[:, path] = np.where(is_seen, 0, -np.inf)
    return mask


@dataclass(frozen=True, slots=True)
class Bucket:
    """The padded shape of a step: its number of rows, and the number of slots that each row may read (`context`)."""

    num_rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """The numbers of rows, and of slots per row, that steps are padded to; each in ascending order."""

    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    contexts: tuple[int, ...] = (256, 1024, 4096, 16384)

    def __iter__(self) -> Iterator[Bucket]:
        return (Bucket(num_rows, context) for context in self.contexts for num_rows in self.rows)

    def up_to(self, num_slots: int) -> Buckets:
        """Return these buckets without contexts that are longer than a cache of `num_slots` slots needs."""
        needed = sum(context < num_slots for context in self.contexts) + 1
        return replace(self, contexts=self.contexts[:needed])

    def bucket(self, batch: Batch) -> Bucket | None:
        """Return the smallest bucket that holds a batch; None if the batch is too large for all."""
        num_rows = next((size for size in self.rows if size >= len(batch.tokens)), None)
        context = next((size for size in self.contexts if size >= batch.longest), None)
        return None if num_rows is None or context is None else Bucket(num_rows, context)


class Attention(Protocol):
    """Interface of a step's attention: a function that each layer calls with its store and its queries."""

    def __call__(
        self, store: torch.Tensor, query: torch.Tensor, scaling: float, form: LayerForm = PLAIN
    ) -> torch.Tensor:
        """Return the attention of queries [tokens, heads, head_dim] over the keys and values in a layer's store.

        `scaling` multiplies the scores. The result is [tokens, kv_heads, group_len, head_dim].
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """The KV store and the slots that a step writes its keys and values to, and its attention function.

    `done` is for models of Transformers: the layers whose attention was computed.
    """

    arena: KVStore
    slots: torch.Tensor  # [tokens]
    attention: Attention
    done: set[int] = field(default_factory=set)

    def attend(
        self, layer: int, query: torch.Tensor, fresh: torch.Tensor, scaling: float, form: LayerForm = PLAIN
    ) -> torch.Tensor:
        """Write a layer's new keys and values; return the attention of each token over its whole sequence so far.

        `fresh` has the keys and values [tokens, 2 * kv_heads, head_dim] and `query` the queries [tokens, heads,
        head_dim]; the result is [tokens, kv_heads, group_len, head_dim].
        """
        return self.attention(self.arena.write(layer, self.slots, fresh), query, scaling, form)


class PagedBackend(Protocol):
    """Interface of attention over page tables: `plan` prepares a step, `attention` computes it."""

    def plan(self, bucket: Bucket, lengths: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        """Prepare the attention of a step, before its recorded operations run.

        `lengths` [rows] has the number of tokens that each row sees, and `pages` [rows, context] their slots.
        """
        ...

    def attention(self, bucket: Bucket, lengths: torch.Tensor, pages: torch.Tensor) -> Attention:
        """Return a step's attention function; `lengths` and `pages` are those given to `plan`, on the device."""
        ...


class GatherAttention:
    """A paged backend that copies each row's keys and values, then attends for all rows in one call.

    It runs on every device.
    """

    def __init__(self, most: int, device: str, dtype: torch.dtype) -> None:
        """`most` is the largest context of a bucket; `dtype` is that of queries and keys."""
        self._places = torch.arange(most, device=device)
        self._dtype = dtype

    def plan(self, bucket: Bucket, lengths: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        pass

    def attention(self, bucket: Bucket, lengths: torch.Tensor, pages: torch.Tensor) -> Attention:
        # An additive mask, because every layer would convert a boolean one to it.
        places, masks = self._places[: bucket.context], dict[int | None, torch.Tensor]()

        def mask_of(window: int | None) -> torch.Tensor:
            if window not in masks:
                is_seen = places < lengths[:, None]  # [rows, context]
                if window is not None:
                    is_seen &= places >= lengths[:, None] - window
                masks[window] = torch.where(is_seen, 0.0, float("-inf")).to(self._dtype)[:, None, None]
            return masks[window]

        def attend(store: torch.Tensor, query: torch.Tensor, scaling: float, form: LayerForm = PLAIN) -> torch.Tensor:
            keys, values = store[pages].transpose(1, 2).chunk(2, dim=1)  # each [rows, kv_heads, context, head_dim]
            queries, mask = query.view(len(query), keys.shape[1], -1, query.shape[2]), mask_of(form.window)
            if form.is_by_hand:
                return _attend_by_hand(queries, keys, values, mask, scaling, form)
            return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)

        return attend


class StaticBuffers:
    """The buffers of all fixed-shape steps: one on the host and one on the device, filled by a single copy.

    On a CPU both are the same memory. Values that a step leaves in the page table are harmless: entries beyond a row's
    length are masked, and every old entry is still the number of a slot.
    """

    def __init__(self, buckets: Buckets, scratch: int, device: str) -> None:
        self.buckets = buckets
        self._scratch = scratch
        self._max_rows = buckets.rows[-1]
        size = self._max_rows * (_NUM_PARTS + buckets.contexts[-1])
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.startswith("cuda"))
        self._device = self._host if device == "cpu" else self._host.to(device)

    def fill(self, batch: Batch, bucket: Bucket, reader: PagedBackend) -> None:
        """Write a batch, padded to `bucket`, to the buffers, copy it to the device, and call `reader.plan` for it."""
        count = len(batch.tokens)
        tokens, positions, slots, lengths, pages = _parts(self._host.numpy(), self._max_rows, bucket)
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
            used = _NUM_PARTS * self._max_rows + bucket.num_rows * bucket.context
            self._device[:used].copy_(self._host[:used], non_blocking=True)
        reader.plan(bucket, lengths, pages)

    def parts(self, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        """Return a step's tensors: tokens, positions, slots to write, lengths [rows], page table [rows, context]."""
        return _parts(self._device, self._max_rows, bucket)


def _parts(buffer: Any, max_rows: int, bucket: Bucket) -> tuple[Any, ...]:
    """Return views of `buffer`, an array or a tensor, in the order of `StaticBuffers.parts`."""
    flat, start = [buffer[at * max_rows :][: bucket.num_rows] for at in range(_NUM_PARTS)], _NUM_PARTS * max_rows
    pages = buffer[start:][: bucket.num_rows * bucket.context].reshape(bucket.num_rows, bucket.context)
    return (*flat, pages)
