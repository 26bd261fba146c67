"""A node of the draft tree: one drafted token, what is known after it, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from specbranch.core.calibration import Grounds
from specbranch.core.distribution import Distribution


class Fate(Enum):
    """What became of a drafted token."""

    USED = "used"  # a verdict committed it
    REJECTED = "rejected"  # submitted and refused
    UNUSED = "unused"  # prepared for another outcome
    CUT = "cut"  # followed a submission that left it out, and was lost with it


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One drafted token. `position` counts from 0 in the whole sequence."""

    token: int
    parent: Node | None
    position: int
    born: int  # after so many submissions
    children: list[Node] = field(default_factory=list)
    distribution: Distribution | None = None  # of the next token, once the node was run
    is_submitted: bool = False
    fate: Fate | None = None
    grounds: Grounds | None = None  # of a token that was guessed, not drawn from a distribution
    drawn_from: Distribution | None = None  # by chance, to be tested against it; None for the likeliest and for guesses
    has_served: bool = False  # a token drawn after this one was committed
    log_chance: float = 0.0  # of the path from the tree's first root, by the draft's distributions as calibrated

    def child_with(self, token: int) -> Node | None:
        """The child that holds `token`, if it has been drawn."""
        return next((child for child in self.children if child.token == token), None)

    def path(self, most: int | None = None) -> list[int]:
        """The last tokens up to this one, without the committed one that is the root; at most so many."""
        tokens: list[int] = []
        node = self
        while node.parent is not None and (most is None or len(tokens) < most):
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]

    def __repr__(self) -> str:
        return f"Node({self.token} at {self.position}, {len(self.children)} children)"
