"""Plain decoding: nothing is drafted, nothing is submitted."""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.core.round import Round
from specbranch.core.tree import Node
from specbranch.core.verify import Verdict


class NonePlanner:
    """The target alone: the reference that every speed is measured against."""

    def submit(self, round: Round) -> Sequence[Node]:
        return ()

    def prepare(self, round: Round) -> Sequence[Node]:
        return ()

    def learn(self, round: Round, verdict: Verdict) -> None:
        pass
