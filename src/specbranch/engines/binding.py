"""Which engine handle holds which node of one draft tree.

A handle is known by its tip, the last node that was fed to it. A node whose parent is a free tip extends that handle;
any other place in the tree is reached by a fork. After a verdict the handles that lost their branch are closed; if
none is left below the new root, the longest one is cut back to what it shares with the committed tokens and kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.core.tree import Fate, Node, Tree
from specbranch.engines.protocol import DraftEngine, Row

_LOST = (Fate.REJECTED, Fate.UNUSED, Fate.CUT)


class Binding:
    """The handles of one session."""

    def __init__(self, engine: DraftEngine) -> None:
        self._engine = engine
        self._tips: dict[int, Node] = {}

    @property
    def handles(self) -> tuple[int, ...]:
        """The handles held now."""
        return tuple(self._tips)

    def rows(self, tokens: Sequence[int], tree: Tree, nodes: Sequence[Node]) -> list[Row]:
        """The rows that run these nodes, forked where needed. `tokens` are the committed ones."""
        self._follow(tree)
        covered = self._covered()
        free = set(self._tips)
        return [
            self._row_at_root(tokens, node) if node is tree.root else self._row_below(node, covered, free)
            for node in nodes
        ]

    def close(self) -> None:
        """Give all handles back."""
        for handle in self._tips:
            self._engine.close(handle)
        self._tips.clear()

    def _row_at_root(self, tokens: Sequence[int], root: Node) -> Row:
        # A root that has not been run has nothing below it, so at most one handle is left: a committed prefix.
        held = next(iter(self._tips.items()), None)
        handle, start = (held[0], held[1].position + 1) if held else (self._engine.open(), 0)
        self._tips[handle] = root
        return Row(handle, tuple(tokens[start : root.position + 1]))

    def _row_below(self, node: Node, covered: dict[Node, int], free: set[int]) -> Row:
        parent = node.parent
        assert parent is not None, "only the root has no parent"
        handle = covered[parent]
        if handle in free and self._tips[handle] is parent:
            free.remove(handle)
        else:
            handle = self._engine.fork(handle, parent.position + 1)
        self._tips[handle] = node
        return Row(handle, (node.token,))

    def _follow(self, tree: Tree) -> None:
        """Bring the handles to the tree's present root."""
        stale = []
        for handle, tip in self._tips.items():
            node = tip
            while node.fate in _LOST and node.parent:
                node = node.parent
            self._tips[handle] = node
            if node.position <= tree.root.position and node is not tree.root:
                stale.append(handle)
        stale.sort(key=lambda handle: self._tips[handle].position)
        if stale and len(stale) == len(self._tips):
            kept = stale.pop()
            self._engine.truncate(kept, self._tips[kept].position + 1)
        for handle in stale:
            self._engine.close(handle)
            del self._tips[handle]

    def _covered(self) -> dict[Node, int]:
        """For every node that some handle holds, one such handle."""
        covered: dict[Node, int] = {}
        for handle, tip in self._tips.items():
            node: Node | None = tip
            while node is not None and node not in covered:
                covered[node] = handle
                node = node.parent
        return covered
