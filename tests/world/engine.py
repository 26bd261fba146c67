"""The models of a simulated world: what target and draft say, and an engine with little room that fails at times."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from specbranch.core.distribution import Distribution
from specbranch.engines.base import Row
from specbranch.errors import EngineError, EngineFull
from specbranch.simulation.scripted import ScriptedEngine
from tests.world.faults import Faults

VOCAB = 24
_RECENT = 3  # tokens that decide what comes next
_AGREES = 0.85  # of the draft with the target
_PROBS = (0.7, 0.15, 0.1)


@lru_cache(maxsize=1 << 16)
def target_token(recent: tuple[int, ...]) -> int:
    """The token that the target says after a text; only its end counts."""
    return zlib.crc32(repr(recent[-_RECENT:]).encode()) % VOCAB


@lru_cache(maxsize=1 << 16)
def _draft(recent: tuple[int, ...]) -> Distribution:
    rng = random.Random(repr(recent))
    own = target_token(recent)
    others = [token for token in rng.sample(range(VOCAB), len(_PROBS)) if token != own]
    place = 0 if rng.random() < _AGREES else 1
    return Distribution(tuple((*others[:place], own, *others[place:])[: len(_PROBS)]), _PROBS, 1.0)


class DraftScript:
    """A draft that is right most of the time."""

    vocab_len = VOCAB

    def start(self) -> tuple[int, ...]:
        return ()

    def advance(self, state: Any, token: int) -> tuple[int, ...]:
        return (*state, token)[-_RECENT:]

    def distribution(self, state: Any) -> Distribution:
        return _draft(state)


class WorldEngine(ScriptedEngine):
    """A scripted engine with limits, whose steps take time. `wait` is called with the time of each."""

    def __init__(self, rng: random.Random, max_handles: int, max_tokens: int, wait: Callable[[float], None]) -> None:
        super().__init__(DraftScript(), row_limit=rng.choice([4, 16, 64]))
        rest = rng.choice([max_tokens // 4, max_tokens])
        self.info = replace(self.info, max_handles=max_handles, max_tokens=max_tokens, idle_cache_tokens=rest)
        self._rng = rng
        self._wait = wait
        self._num_tokens: int | None = 0  # None: to be counted again
        self.faults = Faults()
        self.num_runs = 0  # steps that were begun
        self.num_outputs = 0  # of steps that went well
        self.num_errors = 0  # that were injected

    @property
    def num_tokens(self) -> int:
        if self._num_tokens is None:
            self._num_tokens = super().num_tokens
        return self._num_tokens

    def truncate(self, handle: int, length: int) -> None:
        self._num_tokens = None
        super().truncate(handle, length)

    def close(self, handle: int) -> None:
        self._num_tokens = None
        super().close(handle)

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        self.num_runs += 1
        self._wait(self._rng.uniform(0.0005, 0.01))
        chance = self._rng.random()
        if chance < self.faults.engine_full:
            raise EngineFull("no room, says the world")
        if self.num_tokens + sum(len(row.tokens) for row in rows) > self.info.max_tokens:
            raise EngineFull("no room for more tokens")
        self._num_tokens = None
        if chance > 1 - self.faults.engine_error:
            self.num_errors += 1
            super().run(rows[: self._rng.randrange(len(rows) + 1)])  # some of the rows were fed
            raise EngineError("the world wants it so")
        found = super().run(rows)
        self.num_outputs += len(found)
        return found

    def _hold(self, cell: Any) -> int:
        if self.num_handles >= self.info.max_handles or self._rng.random() < self.faults.engine_full:
            raise EngineFull("no room for another handle")
        return super()._hold(cell)
