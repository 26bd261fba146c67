"""Map the nodes of one draft tree to the engine handles whose caches hold them.

A handle is identified by its tip, the last node whose token it holds. A node whose parent is the tip of a free handle
extends that handle; any other node needs a fork. After a verdict, handles whose tips are neither the new root nor below
it are closed. If that would close all handles, the one that shares most tokens with the committed sequence is truncated
to these tokens and kept as the trunk, which then prefills the tokens up to the root, one chunk at a time.

Of a long sequence a handle may hold a window only: the first few tokens and the last ones, so that drafting can begin
before all of it was prefilled. A draft model sees the window as if the tokens between were not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.node import Node
from specbranch.core.tree import Tree
from specbranch.engines.base import DraftEngine, Row
from specbranch.errors import EngineFull

NUM_FIRST = 16  # tokens of a window that are the sequence's first ones, to which models attend from everywhere


@dataclass(frozen=True, slots=True)
class EngineRow:
    """A row for the engine, the nodes of its outputs, and the number of tokens its handle held before the step.

    A None in `nodes` marks a row that only prefills: its distribution is not needed.
    """

    row: Row
    nodes: tuple[Node | None, ...]
    held: int

    def with_child(self, node: Node) -> EngineRow:
        """Return a copy of this row with the token of `node`, an n-gram guess after its last node, appended."""
        row = self.row
        longer = Row(row.handle, (*row.tokens, node.token), row.num_outputs + 1)
        return EngineRow(longer, (*self.nodes, node), self.held)


class TreeCache:
    """Keeps one session's draft tree in the engine's KV cache, and builds the rows that the engine is to compute next.

    It opens an engine handle, one cached sequence, for each path of the tree that needs one. Call `close` after a
    failed step: the object stays usable, and its next rows prefill the sequence again. With a `window`, a new prefill
    takes only the first 16 and the last `window` committed tokens.
    """

    def __init__(self, engine: DraftEngine) -> None:
        self._engine = engine
        self._tips: dict[int, Node] = {}
        self._trunk: tuple[int, int] | None = None  # a handle, and how many committed tokens were fed or left out
        self.window: int | None = None
        self.num_skipped = 0  # committed tokens after the first ones that are left out of all handles

    @property
    def num_handles(self) -> int:
        """The number of open handles."""
        return len(self._tips) + (self._trunk is not None)

    def num_unprefilled(self, tree: Tree) -> int:
        """Return how many committed tokens are left to prefill; 0 once a first prefill has reached the root."""
        if self._tips:
            return 0  # after a miss only a few tokens are missing
        length = tree.root.position + 1
        return length - self._trunk[1] if self._trunk else length - _num_skipped(length, self.window)

    def rows_for(
        self,
        tokens: Sequence[int],
        tree: Tree,
        nodes: Sequence[Node],
        prefill_chunk: int = 1 << 30,
    ) -> list[EngineRow]:
        """Return engine rows for the distributions after `nodes`, in their order; open, fork and close handles for it.

        The rows end before the first node for which the engine has no free handle. As long as no handle holds the root,
        only the root and a chain of `nodes` right below it are run, and in a chunk that ends before the root no node.
        `tokens` is the committed sequence, of which a row prefills at most `prefill_chunk` tokens. If a node is
        followed by a child of it in `nodes`, the first such child runs in the same row.
        """
        self._reattach(tokens, tree)
        if nodes and not self._tips:
            # Nodes below the root need the root's cache first; guesses right after it can run in the same row.
            nodes = (tree.root, *_chain_below(tree.root, nodes))
        covered = self._covered()
        free = set(self._tips)
        feeds: list[EngineRow] = []
        fed: dict[Node, int] = {}  # index of the feed that ends with this node
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
            if self._trunk is not None:  # the chunk ended before the root
                break
            fed[node] = len(feeds) - 1
        return feeds

    def fork_prefix(self, tokens: Sequence[int], tree: Tree, length: int) -> int | None:
        """Fork a handle with the first `length` committed tokens for another session, and return the fork.

        Returns None if no handle holds all of these tokens. `tokens` is the committed sequence.
        """
        self._reattach(tokens, tree)
        if self.num_skipped:
            return None
        if self._tips:
            return self._engine.fork(next(iter(self._tips)), length)
        if self._trunk and self._trunk[1] >= length:
            return self._engine.fork(self._trunk[0], length)
        return None

    def start_from(self, handle: int, length: int) -> None:
        """Take over `handle`, which holds the first `length` tokens of the sequence, to prefill only the rest.

        Call it before any row is built.
        """
        assert not self.num_handles, "this session has begun to read"
        self.num_skipped = 0
        self._trunk = (handle, length)

    def close(self) -> None:
        """Close all handles of this session."""
        for handle in self._tips:
            self._engine.close(handle)
        if self._trunk:
            self._engine.close(self._trunk[0])
        self._tips.clear()
        self._trunk = None

    def _feed_root(self, tokens: Sequence[int], root: Node, prefill_chunk: int) -> EngineRow:
        """Return a row that prefills committed tokens up to the root, or as many of them as `prefill_chunk` allows."""
        first: Sequence[int] = ()
        if self._trunk is None:
            handle, start, held = self._engine.open(), 0, 0
            self.num_skipped = _num_skipped(root.position + 1, self.window)
            if self.num_skipped:
                first, start = tokens[:NUM_FIRST], NUM_FIRST + self.num_skipped
        else:
            handle, start = self._trunk
            held = start - self.num_skipped
        end = min(root.position + 1, start + max(prefill_chunk - len(first), 1))
        row = Row(handle, (*first, *tokens[start:end]))
        if end <= root.position:
            self._trunk = (handle, end)
            return EngineRow(row, (None,), held)
        self._trunk = None
        self._tips[handle] = root
        return EngineRow(row, (root if root.distribution is None else None,), held)

    def _feed_below(self, node: Node, covered: dict[Node, int], free: set[int]) -> EngineRow:
        path, parent = [node.token], node.parent
        while parent not in covered:  # handles closed meanwhile: feed their tokens again
            assert parent is not None, "only the root has no parent"
            path.append(parent.token)
            parent = parent.parent
        handle, held = covered[parent], parent.position + 1 - self.num_skipped
        if handle in free and self._tips[handle] is parent:
            free.remove(handle)
        else:
            handle = self._engine.fork(handle, held)
        self._tips[handle] = node
        return EngineRow(Row(handle, tuple(reversed(path))), (node,), held)

    def _reattach(self, tokens: Sequence[int], tree: Tree) -> None:
        """Keep the handles whose tips are the tree's root or below it, and close all others.

        If that would close all, truncate the handle with most committed tokens to these, and keep it as the trunk.
        """
        stale: list[tuple[int, int]] = []  # number of committed tokens held, and the handle
        for handle, tip in list(self._tips.items()):
            path = _path(tip)
            if path[0] is not tree.root:
                stale.append((_shared_len(path, tokens), handle))
                del self._tips[handle]
        if stale and not self._tips:
            length, handle = max(stale)
            stale.remove((length, handle))
            self._engine.truncate(handle, length - self.num_skipped)
            self._trunk = (handle, length)
        for _, handle in stale:
            self._engine.close(handle)

    def _covered(self) -> dict[Node, int]:
        """Map every node that a handle holds to one such handle."""
        covered: dict[Node, int] = {}
        for handle, tip in self._tips.items():
            node: Node | None = tip
            while node is not None and node not in covered:
                covered[node] = handle
                node = node.parent
        return covered


def _num_skipped(length: int, window: int | None) -> int:
    """Return how many of `length` tokens lie between the first ones and the last `window` ones; 0 without a window."""
    return 0 if window is None else max(length - window - NUM_FIRST, 0)


def _chain_below(root: Node, nodes: Sequence[Node]) -> list[Node]:
    """Return those of `nodes` that form a chain: a child of the root, a child of that child, and so on."""
    chain: list[Node] = []
    for node in nodes:
        if node.parent is (chain[-1] if chain else root):
            chain.append(node)
    return chain


def _path(tip: Node) -> list[Node]:
    """Return the nodes from the topmost ancestor of `tip`, which is the present or an earlier root, down to `tip`."""
    path = [tip]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def _shared_len(path: Sequence[Node], tokens: Sequence[int]) -> int:
    """Return how many tokens at the start of `tokens`, the committed sequence, a handle holds.

    `path` has the handle's nodes, from an earlier root to its tip. That root and all tokens before it are committed;
    nodes below it count up to the first that differs from `tokens`.
    """
    length = path[0].position + 1
    for node, token in zip(path[1:], tokens[length:], strict=False):
        if node.token != token:
            break
        length += 1
    return length
