"""A draft engine on a model of Transformers.

A step is one forward pass: the rows of all sessions are concatenated to one sequence, and only attention treats each
session by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specbranch.core.distribution import Distribution
from specbranch.engines.cache_size import MOST, CacheSize, cache_size
from specbranch.engines.cells import Cells
from specbranch.engines.extras import extra
from specbranch.engines.options import EngineOptions
from specbranch.engines.protocol import EngineError, EngineFull, EngineInfo, Row
from specbranch.engines.top_k import top_k_of
from specbranch.engines.torch.cache import KeyValueArena, Share, shares_of, tensor_of
from specbranch.engines.torch.guess import Guess
from specbranch.engines.torch.load import load, weight_bytes
from specbranch.engines.torch.support import first_line, sliding_window, text_config, unsupported
from specbranch.engines.vocabulary import read_sample
from specbranch.memory import free_host_memory

with extra("torch"):
    import torch

log = logging.getLogger(__name__)

_Output = tuple[NDArray[np.float32], Guess | None]  # logits [vocab], and what a head guesses behind the first choice
_PROBE = ((0, 0), (0,))  # tokens of the first steps: one without a mask, one with


class TorchEngine:
    """A draft engine on a model of Transformers."""

    def __init__(self, options: EngineOptions) -> None:
        if options.threads is not None and options.device == "cpu":
            torch.set_num_threads(options.threads)
        self._options = options
        self._model, dtype, self._guess_head = load(options)
        self._cells = Cells(sum(map(len, _PROBE)), 1, KeyValueArena)
        vocab_len, bytes_per_token = self._probe()
        size = self._cache_size(bytes_per_token)
        log.info("the draft's KV cache: %s", size)
        self._cells = Cells(size.tokens, options.max_handles, KeyValueArena)
        self.info = EngineInfo(
            model=options.model,
            device=options.device,
            vocab_len=vocab_len,
            row_limit=options.row_limit,
            max_handles=options.max_handles,
            max_tokens=size.tokens,
            dtype=dtype,
            weight_bytes=weight_bytes(self._model),
            vocab_sample=read_sample(options.model),
        )

    @property
    def num_tokens(self) -> int:
        return self._cells.num_used

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(arena.num_bytes for arena in self._cells.arenas())

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
            self._cells.extend(rows)
            outputs = self._outputs(rows)
        except BaseException as error:
            for row, length in zip(rows, lengths, strict=True):
                self.truncate(row.handle, length)
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise EngineFull(f"{self._options.device} has no memory for this step; close handles") from error
            raise
        top_k = min(self._options.top_k, self.info.vocab_len)
        return [replace(top_k_of(logits, top_k), guess=guess) for logits, guess in outputs]

    def shutdown(self) -> None:
        self._cells.clear()
        del self._model, self._guess_head
        if self._options.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _outputs(self, rows: Sequence[Row]) -> list[_Output]:
        """Run the model on rows that have their cells; what each output gave."""
        shares = shares_of(self._cells, rows, self._options.device, self._model.dtype)
        packed = [row for share in shares for row in share.rows]
        outputs = iter(self._forward(packed, shares))
        by_handle = {row.handle: [next(outputs) for _ in range(row.num_outputs)] for row in packed}
        return [output for row in rows for output in by_handle[row.handle]]

    def _forward(self, rows: Sequence[Row], shares: Sequence[Share]) -> list[_Output]:
        device = self._options.device
        tokens = np.array([token for row in rows for token in row.tokens])
        positions = [np.arange(len(self._cells.path(row.handle)))[-len(row.tokens) :] for row in rows]
        ends = np.cumsum([len(row.tokens) for row in rows])
        outputs = np.concatenate([np.arange(end - row.num_outputs, end) for row, end in zip(rows, ends, strict=True)])
        with torch.inference_mode():
            output = self._model(
                input_ids=tensor_of(tokens, device)[None],
                position_ids=tensor_of(np.concatenate(positions), device)[None],
                logits_to_keep=tensor_of(outputs, device),
                use_cache=False,
                specbranch_shares=shares,
            )
        logits: NDArray[np.float32] = output.logits[0].float().cpu().numpy()  # [outputs, vocab]
        guesses = self._guesses(logits)
        return list(zip(logits, guesses, strict=True))

    def _guesses(self, logits: NDArray[np.float32]) -> Sequence[Guess | None]:
        """What follows the first choice of each output."""
        if self._guess_head is None:
            return [None] * len(logits)
        return self._guess_head.guesses(tensor_of(logits.argmax(axis=-1), self._options.device))

    def _cache_size(self, bytes_per_token: int) -> CacheSize:
        device = self._options.device
        if device.startswith("cuda"):
            free_bytes: int | None = torch.cuda.mem_get_info(device)[0]
        else:
            free_bytes = free_host_memory()
        # Arenas grow by doubling, so that half of their cells may be empty.
        return cache_size(
            self._options.max_tokens,
            2 * bytes_per_token,
            free_bytes,
            is_cpu=not device.startswith("cuda"),
            most=min(MOST, sliding_window(self._model) or MOST),
        )

    def _probe(self) -> tuple[int, int]:
        """Size of the vocabulary and bytes of a token in the cache, by steps that show whether our attention works."""
        handle = self.open()
        try:
            for tokens in _PROBE:
                row = Row(handle, tokens)
                self._cells.extend([row])
                ((logits, _),) = self._outputs([row])
        except EngineError:
            raise
        except Exception as error:
            raise unsupported(self._model, f"its first step failed ({first_line(error)})") from error
        arena = self._cells.arena(handle)
        num_layers = len(arena.layers)
        if num_layers != text_config(self._model).num_hidden_layers:
            raise unsupported(self._model, f"only {num_layers} of its layers use attention that can be replaced")
        return len(logits), arena.bytes_per_cell

    def _require_known_tokens(self, rows: Sequence[Row]) -> None:
        vocab_len = self.info.vocab_len
        for row in rows:
            # On a GPU such a token would not only fail: it would end the process.
            if row.tokens and (min(row.tokens) < 0 or max(row.tokens) >= vocab_len):
                raise ValueError(f"handle {row.handle}: tokens must be below {vocab_len}, the vocabulary's size")
