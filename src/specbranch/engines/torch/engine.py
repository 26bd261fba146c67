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
from specbranch.engines.base import EngineOptions, Row, check_tokens
from specbranch.engines.kv_cache import SlotAllocator
from specbranch.engines.torch.attention import Buckets, SpanAttention
from specbranch.engines.torch.cuda_graphs import FixedShapeRunner, choose_step_runner
from specbranch.engines.torch.kv_store import Batch, KVStore, StateStore, step_batch
from specbranch.engines.torch.loading import LoadedModel, engine_info, load, size_cache
from specbranch.engines.torch.plain import MIXERLESS, layer_kinds, unsupported
from specbranch.engines.torch.selftest import NUM_SLOTS
from specbranch.engines.torch.step import ForwardPass, PackedTopK, to_host, unpack_top_k
from specbranch.errors import EngineFull
from specbranch.extensions import optional_import
from specbranch.machine import free_host_memory

with optional_import("torch"):
    import torch

log = logging.getLogger(__name__)
_FEWEST_STATES = 16  # those that eight rows continue, and those behind them
_TOKENS_PER_STATE = 64  # of the cache, for a model without any attention


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
        self.states: StateStore | None = loaded.model.states
        self._static: FixedShapeRunner | None = None
        self._arena = KVStore(NUM_SLOTS, options.device, by_head=buckets is None)
        vocab_len = self._test(loaded)
        size = size_cache(options, self._bytes_per_token(), free_host_memory())
        log.info("the draft's KV cache: %s", size)
        self._cells = SlotAllocator(size.tokens, options.max_handles)
        self._arena = KVStore.sized_like(self._arena, size.tokens)
        if self.states is not None:
            self.states.resize(size.tokens, self._num_states(self.states, size.tokens))
            log.info("of recurrent layers it keeps %d states", self.states.num_states)
        top_k, by_blocks = min(options.top_k, vocab_len), buckets is None
        self._forward = ForwardPass(loaded.model, self._arena, top_k, by_blocks=by_blocks)
        self.info = engine_info(options, loaded.model, loaded.dtype, vocab_len, size.tokens)
        if buckets is not None and self.states is None:  # a step's rows vary with the states that were kept
            with self._device():
                self._static = choose_step_runner(self._forward, buckets.up_to(size.tokens), self._probe_steps)

    @property
    def num_tokens(self) -> int:
        return self._cells.num_used

    @property
    def num_bytes(self) -> int:
        """Bytes of the KV store and of all states, which are reserved at the start."""
        return self._arena.num_bytes + (0 if self.states is None else self.states.num_bytes)

    def open(self) -> int:
        return self._cells.open()

    def fork(self, handle: int, length: int) -> int:
        return self._cells.fork(handle, length)

    def truncate(self, handle: int, length: int) -> None:
        self._cells.truncate(handle, length)

    def close(self, handle: int) -> None:
        self._cells.close(handle)

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        check_tokens(rows, self.info.vocab_len)
        if not rows:
            return []
        lengths = [len(self._cells.path(row.handle)) for row in rows]
        try:
            self._cells.allocate(rows)
            with (
                torch.inference_mode(),
                self._device(),
                step_batch(self._cells, rows, self.states) as batch,
            ):
                words = self._words(batch)
        except BaseException as error:
            for row, length in zip(rows, lengths, strict=True):
                self.truncate(row.handle, length)
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise EngineFull(f"{self._options.device} has no memory for this step; close handles") from error
            raise
        return unpack_top_k(words, self._forward.top_k)

    def shutdown(self) -> None:
        self._cells.clear()
        del self._forward, self._static, self._arena, self.states
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

    def _test(self, loaded: LoadedModel) -> int:
        """Run the self-test; return the vocabulary's size. Raise `EngineError` if our attention does not work.

        The test also creates the KV store's tensors, which show how many bytes a slot needs.
        """
        with self._device():
            vocab_len = loaded.self_test.check_model(loaded.model, self._arena, loaded.dtype)
        num_mixing = loaded.config.num_hidden_layers - sum(
            kind in MIXERLESS for kind in layer_kinds(loaded.config).values()
        )
        found = self._arena.layers | (set() if self.states is None else self.states.layers)
        if len(found) != num_mixing:
            raise unsupported(loaded.name, f"only {len(found)} of its layers use attention that can be replaced")
        return vocab_len

    def _bytes_per_token(self) -> int:
        """Return the bytes for each token of the cache; states take as many as keys and values."""
        if self.states is None:
            return self._arena.bytes_per_slot
        return 2 * self._arena.bytes_per_slot or self.states.bytes_per_state // _TOKENS_PER_STATE + 1

    def _num_states(self, states: StateStore, num_tokens: int) -> int:
        """Return how many states fit beside a cache of `num_tokens`; some always do, and no more than tokens."""
        room = num_tokens * self._bytes_per_token() - self._arena.num_bytes
        return min(max(room // states.bytes_per_state, _FEWEST_STATES), num_tokens)

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
