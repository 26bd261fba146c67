"""One round: from the verdict that opened it to the verdict that ends it. This is all that a planner sees."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from specbranch.core.costs import Costs
from specbranch.core.guesser import Guesser
from specbranch.core.tree import Tree


class Signal(IntEnum):
    """What H-RAD foresees for the next window."""

    NONE = 0  # no token of the window will be accepted
    SOME = 1  # ask the draft's confidence
    ALL = 2  # every token will be accepted


MAX_WINDOW = 64  # draft tokens in one submission


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the target's own state tells about the next window of draft tokens."""

    signal: Signal


@dataclass(slots=True)
class Round:
    """The situation of one sequence. While nothing is submitted yet, the target waits."""

    index: int
    tree: Tree
    costs: Costs
    guesser: Guesser
    is_hit: bool = False
    signal: Signal | None = None
    outlook: Outlook | None = None  # told by the target with the verdict that opened the round

    @property
    def is_waiting(self) -> bool:
        """Whether the target waits for a submission."""
        return self.tree.submitted is None
