"""Plain decoding: nothing is drafted, nothing is submitted."""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.core.node import Node
from specbranch.core.planners.protocol import Planner
from specbranch.core.planners.settings import Settings
from specbranch.core.round import Round


class NonePlanner(Planner[Settings]):
    """The target alone: the reference that every speed is measured against."""

    @property
    def lets_wait(self) -> bool:
        return False

    def submit(self, round: Round) -> Sequence[Node]:
        return ()

    def prepare(self, round: Round) -> Sequence[Node]:
        return ()
