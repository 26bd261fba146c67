"""Answers that a client holds before it asks: what to submit after which verdict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from specbranch.service.wire import Ahead, Outcome

_MOST_OUTCOMES = 1024  # sequences


class Outcomes:
    """By name of a sequence: what was told last. Answers are taken once; the oldest make way."""

    def __init__(self) -> None:
        self._told: OrderedDict[bytes, dict[tuple[int, ...], Outcome]] = OrderedDict()

    def hear(self, ahead: Ahead) -> None:
        """Take in what the service tells."""
        for row in ahead.rows:
            self._told[row.before] = {tuple(outcome.committed): outcome for outcome in row.outcomes}
            self._told.move_to_end(row.before)
            if len(self._told) > _MOST_OUTCOMES:
                self._told.popitem(last=False)

    def take(self, before: bytes, committed: Sequence[int]) -> Outcome | None:
        """What to submit now that these tokens were committed; None if nobody has said."""
        return self._told.pop(before, {}).get(tuple(committed))

    def clear(self) -> None:
        """Forget all: another service may answer from now on."""
        self._told.clear()
