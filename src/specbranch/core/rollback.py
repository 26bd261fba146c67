"""What a verdict makes useless: which drafted tokens are rolled back, and why."""

from __future__ import annotations

from dataclasses import dataclass

from specbranch.core.node import Fate, Node

CAUSES = (Fate.REJECTED.value, Fate.UNUSED.value, Fate.CUT.value)  # why drafted tokens are rolled back


@dataclass(slots=True, kw_only=True)
class Settled:
    """What a verdict did to drafted tokens; `losing`: lost on a root that was not the draft's first choice."""

    used: int = 0
    rejected: int = 0
    unused: int = 0
    cut: int = 0
    losing: int = 0

    @property
    def rolled_back(self) -> int:
        """Tokens lost, whatever the cause."""
        return self.rejected + self.unused + self.cut

    def add(self, other: Settled) -> None:
        """Add another count to this one."""
        self.used += other.used
        self.rejected += other.rejected
        self.unused += other.unused
        self.cut += other.cut
        self.losing += other.losing


@dataclass(frozen=True, slots=True)
class Abandoned:
    """What one verdict left behind: all below `old` that is not below `root`."""

    old: Node
    root: Node
    end: Node | None  # of the submission
    num_used: int
    submissions: int

    def settle(self) -> Settled:
        """Give every abandoned node its fate, and count them."""
        settled = Settled(used=self.num_used)
        stack = [(self.old, False, False)]
        while stack:
            node, is_behind, is_losing = stack.pop()
            if node is self.root:
                continue
            if node.fate is None and node is not self.old:
                settled.losing += is_losing
                self._give_fate(node, is_behind, settled)
            if node.children:
                is_behind = is_behind or node is self.end
                first, *others = node.children
                stack.append((first, is_behind, is_losing))
                stack += [(child, is_behind, True) for child in others]
                # Only upward links stay, so settled nodes are freed without a search for cycles.
                node.children = []
        return settled

    def _give_fate(self, node: Node, is_behind: bool, settled: Settled) -> None:
        if node.is_submitted:
            node.fate = Fate.REJECTED
            settled.rejected += 1
        elif is_behind and node.born < self.submissions:
            node.fate = Fate.CUT
            settled.cut += 1
        else:
            node.fate = Fate.UNUSED
            settled.unused += 1
