"""A draft engine on the model's own cache, for models that the fast engine refuses: correct before fast.

Every row is a forward pass of its own, and continues a copy of the cache that Transformers keeps for the model. So it
does not matter what such a cache holds: keys and values, a window of them, the state of a recurrent layer. No cache is
cut back: the engine keeps those of a handle's last steps, and goes on from the newest that is a prefix.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbranch.core.distribution import Distribution
from specbranch.engines.base import EngineOptions, Row, check_tokens
from specbranch.engines.kv_cache import SlotAllocator
from specbranch.engines.torch.linear import PACKED, pack_linears
from specbranch.engines.torch.loading import engine_info, load_plain, size_cache
from specbranch.engines.torch.plain import text_config, unsupported
from specbranch.engines.torch.selftest import SelfTest
from specbranch.engines.torch.step import pack_top_k, to_host, unpack_top_k
from specbranch.errors import first_line
from specbranch.extensions import optional_import
from specbranch.machine import free_host_memory

with optional_import("torch"):
    import torch

log = logging.getLogger(__name__)

NUM_STATES = 8  # caches that a handle keeps, forks included: a branch is rarely cut back further
_NAMES = ("past_key_values", "cache_params", "state", "mems")  # what models call their cache
_TEST_TOKENS = 64
# Kinds of layers whose caches give what a whole pass gives. A short test cannot tell this of others: an indexed
# attention differs only where it leaves tokens out.
_CACHED = {
    *("full_attention", "sliding_attention", "chunked_attention", "attention"),
    *("linear_attention", "conv", "mamba", "hybrid", "recurrent"),
}


@dataclass(frozen=True, slots=True)
class _State:
    """The cache after the first `length` tokens of a sequence. It is never changed: a row continues a copy."""

    length: int
    cache: Any


@dataclass(slots=True)
class _Sequence:
    """The tokens of a handle, and its caches in the order of their lengths."""

    tokens: list[int] = field(default_factory=list)
    states: list[_State] = field(default_factory=list)

    def cut(self, length: int) -> _Sequence:
        """Return a copy of the first `length` tokens, with the caches of none but these."""
        return _Sequence(self.tokens[:length], [state for state in self.states if state.length <= length])


class GenericEngine:
    """A draft engine that runs any causal model of Transformers, row by row, on copies of the model's own cache."""

    def __init__(self, options: EngineOptions) -> None:
        if options.threads is not None and options.device == "cpu":
            torch.set_num_threads(options.threads)
        self._options = options
        self._model, name = load_plain(options)
        self_test = SelfTest(self._model)
        dtype = str(self._model.dtype).removeprefix("torch.")
        if options.dtype in PACKED:
            dtype, self._model = options.dtype, pack_linears(self._model.float(), PACKED[options.dtype])
        self._sequences: dict[int, _Sequence] = {}
        self._cells = SlotAllocator(_TEST_TOKENS, options.max_handles)
        self._argument = ""
        self._continue: Callable[[_Sequence, tuple[int, ...]], torch.Tensor] = self._at_once
        vocab_len = self._choose(self_test, name, dtype)
        size = size_cache(options, NUM_STATES * self._bytes_per_token(), free_host_memory())
        self._cells = SlotAllocator(size.tokens, options.max_handles)
        self._top_k = min(options.top_k, vocab_len)
        self.info = engine_info(options, self._model, dtype, vocab_len, size.tokens)

    @property
    def num_tokens(self) -> int:
        return self._cells.num_used

    @property
    def num_bytes(self) -> int:
        """Bytes of all caches that are kept."""
        states = {id(state): state for sequence in self._sequences.values() for state in sequence.states}
        return sum(_bytes_of(state.cache) for state in states.values())

    def open(self) -> int:
        handle = self._cells.open()
        self._sequences[handle] = _Sequence()
        return handle

    def fork(self, handle: int, length: int) -> int:
        fork = self._cells.fork(handle, length)
        self._sequences[fork] = self._sequences[handle].cut(length)
        return fork

    def truncate(self, handle: int, length: int) -> None:
        self._cells.truncate(handle, length)
        self._sequences[handle] = self._sequences[handle].cut(length)

    def close(self, handle: int) -> None:
        self._cells.close(handle)
        del self._sequences[handle]

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        check_tokens(rows, self.info.vocab_len)
        if not rows:
            return []
        self._cells.allocate(rows)
        found: list[Distribution] = []
        try:
            for row in rows:
                logits = self._logits(row)
                found += unpack_top_k(to_host(pack_top_k(logits, self._top_k)), self._top_k)
        except BaseException:
            for row in rows:
                length = len(self._cells.path(row.handle)) - len(row.tokens)
                self.truncate(row.handle, length)
            raise
        return found

    def shutdown(self) -> None:
        self._cells.clear()
        self._sequences.clear()
        del self._model

    def _choose(self, self_test: SelfTest, name: str, dtype: str) -> int:
        """Choose the fastest way to continue a sequence that passes the self-test; return the vocabulary's size."""
        cause = ""
        ways = [self._from_the_start]
        if set(getattr(text_config(self._model), "layer_types", None) or ()) <= _CACHED:
            ways = [self._at_once, self._one_by_one, *ways]
        for way in ways:
            self._continue = way
            try:
                vocab_len = self_test.check(self.open, self.fork, self._test_step, dtype)
            except Exception as error:  # of models that cannot continue in this way
                cause = first_line(error)
                continue
            finally:
                for handle in list(self._sequences):
                    self.close(handle)
            log.info("%s runs on the generic path: %s", name, way.__name__.strip("_").replace("_", " "))
            return vocab_len
        raise unsupported(name, cause)

    def _test_step(self, rows: Sequence[Row]) -> torch.Tensor:
        self._cells.allocate(rows)
        return torch.cat([self._logits(row) for row in rows])

    def _logits(self, row: Row) -> torch.Tensor:
        """Run one row whose cells are allocated; return the logits of its outputs, [outputs, vocabulary]."""
        with torch.inference_mode():
            return self._continue(self._sequences[row.handle], row.tokens)[-row.num_outputs :]

    def _at_once(self, sequence: _Sequence, tokens: tuple[int, ...]) -> torch.Tensor:
        """Continue the newest cache with all tokens that come after it in one forward pass."""
        return self._extend(sequence, tokens, len(tokens) + len(sequence.tokens))

    def _one_by_one(self, sequence: _Sequence, tokens: tuple[int, ...]) -> torch.Tensor:
        """Continue the newest cache token by token: some models' caches take no more."""
        return self._extend(sequence, tokens, 1)

    def _from_the_start(self, sequence: _Sequence, tokens: tuple[int, ...]) -> torch.Tensor:
        """Run the whole sequence without a cache."""
        sequence.tokens += tokens
        return self._forward(sequence.tokens, 0, None)[0]

    def _extend(self, sequence: _Sequence, tokens: tuple[int, ...], most: int) -> torch.Tensor:
        """Run the tokens after the newest cache, at most `most` at a time behind one; return all their logits."""
        state = sequence.states[-1] if sequence.states else None
        start, cache = (0, None) if state is None else (state.length, copy.deepcopy(state.cache))
        missing, parts = [*sequence.tokens[start:], *tokens], []
        while missing:
            count = len(missing) if cache is None else min(most, len(missing))
            logits, cache = self._forward(missing[:count], start, cache)
            parts.append(logits)
            start, missing = start + count, missing[count:]
        sequence.tokens += tokens
        if cache is not None:
            sequence.states = [*sequence.states[1 - NUM_STATES :], _State(start, cache)]
        return torch.cat(parts)

    def _forward(self, tokens: Sequence[int], start: int, cache: Any) -> tuple[torch.Tensor, Any]:
        """Run tokens at the positions from `start` on; return their logits, and the cache of the sequence so far."""
        ids = torch.tensor([list(tokens)], device=self._options.device)
        given = {} if cache is None else {self._argument: cache}
        out = self._model(
            input_ids=ids,
            position_ids=torch.arange(start, start + len(tokens), device=self._options.device)[None],
            use_cache=self._continue != self._from_the_start,
            **given,
        )
        self._argument = next((name for name in _NAMES if out.get(name) is not None), "")
        return out.logits[0], out[self._argument] if self._argument else None

    def _bytes_per_token(self) -> int:
        """Return the bytes of a cache, for a token of a sequence of the test's length."""
        handle = self.open()
        row = Row(handle, (1,) * _TEST_TOKENS)
        self._cells.allocate([row])
        self._logits(row)
        found = self.num_bytes
        self.close(handle)
        return max(1, found // _TEST_TOKENS)


def _bytes_of(cache: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(cache, set()))


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in an object, its attributes and its lists."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part, seen)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part, seen)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), seen)
