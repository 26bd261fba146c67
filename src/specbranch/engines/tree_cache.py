"""Which engine handle holds which node of one draft tree.

A handle is known by its tip, the last node that was fed to it. A node whose parent is a free tip extends that handle;
any other place in the tree is reached by a fork. After a verdict the handles that lost their branch are closed; if
none is left below the new root, the longest one is cut back to what it shares with the committed tokens and kept as
the trunk, which is then fed up to the root, a piece at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.node import Node
from specbranch.core.tree import Tree
from specbranch.engines.base import DraftEngine, Row
from specbranch.errors import EngineFull


@dataclass(frozen=True, slots=True)
class EngineRow:
    """A row for the engine, the nodes that its outputs belong to, and how many tokens its handle holds before.

    A node of None only reads a part of the sequence, and its distribution is not needed.
    """

    row: Row
    nodes: tuple[Node | None, ...]
    held: int

    def with_child(self, node: Node) -> EngineRow:
        """The same with a child of the last node, which is guessed and runs in the same step."""
        row = self.row
        longer = Row(row.handle, (*row.tokens, node.token), row.num_outputs + 1)
        return EngineRow(longer, (*self.nodes, node), self.held)


class TreeCache:
    """The handles of one session. If a step fails, `close` this: the next rows start from the sequence again."""

    def __init__(self, engine: DraftEngine) -> None:
        self._engine = engine
        self._tips: dict[int, Node] = {}
        self._trunk: tuple[int, int] | None = None  # a handle, and how many committed tokens it holds

    @property
    def num_handles(self) -> int:
        """Handles held now."""
        return len(self._tips) + (self._trunk is not None)

    def num_unprefilled(self, tree: Tree) -> int:
        """How many committed tokens no handle holds yet: a long sequence that is still being prefilled."""
        if self._tips:
            return 0  # after a miss there is little to catch up with
        return tree.root.position + 1 - (self._trunk[1] if self._trunk else 0)

    def rows_for(
        self, tokens: Sequence[int], tree: Tree, nodes: Sequence[Node], prefill_chunk: int = 1 << 30
    ) -> list[EngineRow]:
        """The rows that run these nodes, forked where needed; fewer if handles run out. `tokens` are the committed.

        A node may follow its parent: both then run in this step, in one row. Of a sequence that is still to be read at
        most `prefill_chunk` tokens are fed.
        """
        self._reattach(tokens, tree)
        if nodes and not self._tips:
            # Without the root nothing below can be reached; what is guessed behind it may go with it.
            nodes = (tree.root, *_chain_below(tree.root, nodes))
        covered = self._covered()
        free = set(self._tips)
        feeds: list[EngineRow] = []
        fed: dict[Node, int] = {}  # the feed whose last node this is
        for node in nodes:
            number = fed.pop(node.parent, None) if node.parent is not None else None
            if number is not None:
                feeds[number] = feeds[number].with_child(node)
                self._tips[feeds[number].row.handle] = node
                fed[node] = number
                continue
            try:
                feed = (
                    self._feed_root(tokens, node, prefill_chunk)
                    if node is tree.root
                    else self._feed_below(node, covered, free)
                )
            except EngineFull:
                break
            feeds.append(feed)
            if self._trunk is not None:  # only a part of the sequence was read; the root itself was not reached
                break
            fed[node] = len(feeds) - 1
        return feeds

    def fork_prefix(self, tokens: Sequence[int], tree: Tree, length: int) -> int | None:
        """A new handle that holds the first `length` committed tokens, for another session; None if none is held."""
        self._reattach(tokens, tree)
        if self._tips:
            return self._engine.fork(next(iter(self._tips)), length)
        if self._trunk and self._trunk[1] >= length:
            return self._engine.fork(self._trunk[0], length)
        return None

    def start_from(self, handle: int, length: int) -> None:
        """Begin with a handle that already holds the first `length` tokens of the sequence."""
        assert not self.num_handles, "this session has begun to read"
        self._trunk = (handle, length)

    def close(self) -> None:
        """Give all handles back."""
        for handle in self._tips:
            self._engine.close(handle)
        if self._trunk:
            self._engine.close(self._trunk[0])
        self._tips.clear()
        self._trunk = None

    def _feed_root(self, tokens: Sequence[int], root: Node, prefill_chunk: int) -> EngineRow:
        handle, start = self._trunk or (self._engine.open(), 0)
        end = min(root.position + 1, start + prefill_chunk)
        row = Row(handle, tuple(tokens[start:end]))
        if end <= root.position:
            self._trunk = (handle, end)
            return EngineRow(row, (None,), start)
        self._trunk = None
        self._tips[handle] = root
        return EngineRow(row, (root if root.distribution is None else None,), start)

    def _feed_below(self, node: Node, covered: dict[Node, int], free: set[int]) -> EngineRow:
        path, parent = [node.token], node.parent
        while parent not in covered:  # handles were given back meanwhile: what they held is fed again
            assert parent is not None, "only the root has no parent"
            path.append(parent.token)
            parent = parent.parent
        handle = covered[parent]
        if handle in free and self._tips[handle] is parent:
            free.remove(handle)
        else:
            handle = self._engine.fork(handle, parent.position + 1)
        self._tips[handle] = node
        return EngineRow(Row(handle, tuple(reversed(path))), (node,), parent.position + 1)

    def _reattach(self, tokens: Sequence[int], tree: Tree) -> None:
        """Bring the handles to the tree's present root. A tip is alive if the way up from it ends there."""
        stale: list[tuple[int, int]] = []  # how many committed tokens, and which handle holds them
        for handle, tip in list(self._tips.items()):
            path = _path(tip)
            if path[0] is not tree.root:
                stale.append((_shared_len(path, tokens), handle))
                del self._tips[handle]
        if stale and not self._tips:
            length, handle = max(stale)
            stale.remove((length, handle))
            self._engine.truncate(handle, length)
            self._trunk = (handle, length)
        for _, handle in stale:
            self._engine.close(handle)

    def _covered(self) -> dict[Node, int]:
        """For every node that some handle holds, one such handle."""
        covered: dict[Node, int] = {}
        for handle, tip in self._tips.items():
            node: Node | None = tip
            while node is not None and node not in covered:
                covered[node] = handle
                node = node.parent
        return covered


def _chain_below(root: Node, nodes: Sequence[Node]) -> list[Node]:
    """Of these nodes those that follow each other from the root on."""
    chain: list[Node] = []
    for node in nodes:
        if node.parent is (chain[-1] if chain else root):
            chain.append(node)
    return chain


def _path(tip: Node) -> list[Node]:
    """The nodes from the root, present or former, down to a tip."""
    path = [tip]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def _shared_len(path: Sequence[Node], tokens: Sequence[int]) -> int:
    """How many committed tokens a handle holds whose nodes, from a former root down, are `path`.

    A former root is committed, with all before it; of what was drafted below it the tokens themselves tell.
    """
    length = path[0].position + 1
    for node, token in zip(path[1:], tokens[length:], strict=False):
        if node.token != token:
            break
        length += 1
    return length
