"""The draft engine on a model of Transformers.

A step is one forward pass over the tokens of all rows of all sessions. Small steps on a GPU have fixed shapes
(`_static`), all others have the shapes of their rows (`SpanAttention`); both use the same KV store.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from specbranch.core.distribution import Distribution
from specbranch.engines.base import EngineInfo, EngineOptions, Row
from specbranch.engines.kv_cache import MOST, CacheSize, SlotAllocator, cache_size
from specbranch.engines.torch.attention import Buckets, SpanAttention
from specbranch.engines.torch.cuda_graphs import FixedShapeRunner, choose_step_runner
from specbranch.engines.torch.kv_store import Batch, KVStore, build_batch
from specbranch.engines.torch.loading import load, weight_bytes
from specbranch.engines.torch.model import sliding_window, unsupported
from specbranch.engines.torch.step import ForwardPass, PackedTopK, to_host, unpack_top_k
from specbranch.engines.vocabulary import read_fingerprint
from specbranch.errors import EngineError, EngineFull, first_line
from specbranch.extensions import optional_import
from specbranch.machine import free_host_memory

with optional_import("torch"):
    import torch

log = logging.getLogger(__name__)

_PROBE = ((0, 0), (0, 0))  # tokens of the probe steps: the first needs no mask, the second does


class TorchEngine:
    """A draft engine that runs a model of Transformers."""

    def __init__(self, options: EngineOptions, buckets: Buckets | None = None) -> None:
        """Load the model and allocate its KV cache.

        `buckets` are the sizes that small steps are padded to; None: the default on a GPU, no padding on a CPU.
        """
        if options.threads is not None and options.device == "cpu":
            torch.set_num_threads(options.threads)
        if buckets is None and options.device != "cpu":
            buckets = Buckets()
        self._options = options
        loaded = load(options)
        self._name, self._config = loaded.name, loaded.config
        self._static: FixedShapeRunner | None = None
        self._cells = SlotAllocator(sum(map(len, _PROBE)), 1)
        self._arena = KVStore(self._cells.max_cells, options.device, by_head=buckets is None)
        self._forward = ForwardPass(loaded.model, self._arena, 1, by_blocks=False)
        vocab_len = self._probe()
        size = self._cache_size()
        log.info("the draft's KV cache: %s", size)
        self._cells = SlotAllocator(size.tokens, options.max_handles)
        self._arena = KVStore.sized_like(self._arena, size.tokens)
        top_k, by_blocks = min(options.top_k, vocab_len), buckets is None
        self._forward = ForwardPass(loaded.model, self._arena, top_k, by_blocks=by_blocks)
        self.info = EngineInfo(
            model=options.model,
            device=options.device,
            vocab_len=vocab_len,
            row_limit=options.row_limit,
            max_handles=options.max_handles,
            max_tokens=size.tokens,
            dtype=loaded.dtype,
            weight_bytes=weight_bytes(loaded.model),
            vocab_fingerprint=read_fingerprint(options.model),
        )
        if buckets is not None:
            with self._device():
                self._static = choose_step_runner(self._forward, buckets.up_to(size.tokens), self._probe_steps)

    @property
    def num_tokens(self) -> int:
        return self._cells.num_used

    @property
    def num_bytes(self) -> int:
        """Bytes of the KV store, which is created at the start for the maximum number of tokens."""
        return self._arena.num_bytes

    def open(self) -> int:
        return self._cells.open()

    def fork(self, handle: int, length: int) -> int:
        return self._cells.fork(handle, length)

    def truncate(self, handle: int, length: int) -> None:
        self._cells.truncate(handle, length)

    def close(self, handle: int) -> None:
        self._cells.close(handle)

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        self._require_known_tokens(rows)
        if not rows:
            return []
        lengths = [len(self._cells.path(row.handle)) for row in rows]
        try:
            self._cells.allocate(rows)
            with torch.inference_mode(), self._device():
                words = self._words(build_batch(self._cells, rows))
        except BaseException as error:
            for row, length in zip(rows, lengths, strict=True):
                self.truncate(row.handle, length)
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise EngineFull(f"{self._options.device} has no memory for this step; close handles") from error
            raise
        return unpack_top_k(words, self._forward.top_k)

    def shutdown(self) -> None:
        self._cells.clear()
        del self._forward, self._static, self._arena
        if self._options.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _words(self, batch: Batch) -> PackedTopK:
        """Run the model on rows whose cells are allocated; return their packed top-k, an array of 32-bit words."""
        words = None if self._static is None else self._static.run(batch)
        if words is not None:
            return words
        is_all = len(batch.outputs) == len(batch.tokens)
        found = to_host(self._forward(*self._given(batch), None if is_all else self._tensor(batch.outputs)))
        return found[batch.outputs] if is_all else found  # tokens of a step may be in another order than its rows

    def _given(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, SpanAttention]:
        tokens, positions, slots = (self._tensor(part) for part in (batch.tokens, batch.positions, batch.slots))
        return tokens, positions, slots, SpanAttention(batch, self._options.device)

    def _tensor(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._options.device)

    def _device(self) -> AbstractContextManager[object]:
        """Return a context in which the engine's GPU is torch's current device; without a GPU it does nothing."""
        device = self._options.device
        return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()

    def _cache_size(self) -> CacheSize:
        device = self._options.device
        if device.startswith("cuda"):
            free_bytes: int | None = torch.cuda.mem_get_info(device)[0]
        else:
            free_bytes = free_host_memory()
        return cache_size(
            self._options.max_tokens,
            self._arena.bytes_per_slot,
            free_bytes,
            is_cpu=not device.startswith("cuda"),
            most=min(MOST, sliding_window(self._config) or MOST),
        )

    def _probe(self) -> int:
        """Run two short steps and return the vocabulary's size; raise `EngineError` if our attention does not work.

        The steps also create the KV store's tensors, which show how many bytes a slot needs.
        """
        handle = self.open()
        try:
            for tokens in _PROBE:
                rows = [Row(handle, tokens)]
                self._cells.allocate(rows)
                with torch.inference_mode(), self._device():
                    logits = self._forward.logits(*self._given(build_batch(self._cells, rows)))
        except EngineError:
            raise
        except Exception as error:
            raise unsupported(self._name, f"its first step failed ({first_line(error)})") from error
        if self._arena.num_layers != self._config.num_hidden_layers:
            cause = f"only {self._arena.num_layers} of its layers use attention that can be replaced"
            raise unsupported(self._name, cause)
        return int(logits.shape[-1])

    def _probe_steps(self, steps: FixedShapeRunner | None) -> list[Distribution]:
        """Run a short test sequence with `steps`, from now on the runner of small steps; return the distributions.

        With None, the engine runs small steps with variable shapes, like larger steps.
        """
        self._static = steps
        handle = self.open()
        try:
            tokens = tuple(range(min(4, self.info.vocab_len, self.info.max_tokens)))
            return self.run([Row(handle, tokens, num_outputs=len(tokens))])
        finally:
            self.close(handle)

    def _require_known_tokens(self, rows: Sequence[Row]) -> None:
        vocab_len = self.info.vocab_len
        for row in rows:
            # On a GPU such a token would end the process, not only fail.
            if row.tokens and (min(row.tokens) < 0 or max(row.tokens) >= vocab_len):
                raise ValueError(f"handle {row.handle}: tokens must be below {vocab_len}, the vocabulary's size")
