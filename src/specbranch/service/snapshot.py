"""A draft tree as it stood when a verdict came, packed so small that thousands can be kept."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specbranch.core.node import Node
from specbranch.core.tree import Tree

MAX_NODES = 256  # the likeliest ones of a tree

RUN, SUBMITTED = 1, 2  # marks of a node


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The nodes below the root, which is 0 and not in here; a parent comes before its children."""

    parents: array[int]
    tokens: array[int]
    percents: array[int]  # how likely the sequence was to come here, seen from the root
    marks: array[int]

    def __len__(self) -> int:
        return len(self.tokens)

    def as_json(self) -> dict[str, Any]:
        """Four lists of equal length."""
        return {name: getattr(self, name).tolist() for name in self.__slots__}


def take_snapshot(tree: Tree, num_submitted: int) -> Snapshot:
    """The tree now; of what was submitted, only the first tokens were really sent."""
    submitted = {id(node) for node in (tree.submitted or [])[:num_submitted]}
    taken = Snapshot(array("H"), array("i"), array("B"), array("B"))
    for parent, node in _likeliest(tree.root):
        taken.parents.append(parent)
        taken.tokens.append(node.token)
        taken.percents.append(min(100, round(100 * math.exp(node.log_chance - tree.root.log_chance))))
        taken.marks.append(RUN * (node.distribution is not None) + SUBMITTED * (id(node) in submitted))
    return taken


def _likeliest(root: Node) -> Iterator[tuple[int, Node]]:
    """Nodes with the numbers of their parents, the likeliest first, but none before its parent."""
    heap: list[tuple[float, int, int, Node]] = []
    number = num_seen = 0
    parent: Node = root
    while True:
        for child in parent.children:
            num_seen += 1
            heapq.heappush(heap, (-child.log_chance, num_seen, number, child))
        if not heap or number == MAX_NODES:
            return
        number += 1
        _, _, above, parent = heapq.heappop(heap)
        yield above, parent
