"""Which nodes are the likeliest ones to run."""

from __future__ import annotations

from specbranch.core.distribution import Distribution
from specbranch.core.node import GreedyPicker
from specbranch.core.planners.budget import frontier
from specbranch.core.tree import Tree
from tests.core.test_tree import branching_tree


def test_the_frontier_holds_the_likeliest_nodes_that_were_not_run() -> None:
    tree = branching_tree()
    found = frontier(tree, tree.root, 9, 5, 0.01)

    assert [(node.token, round(chance, 4)) for node, chance in found] == [(3, 0.125), (8, 0.0833)]
    assert [node.token for node, _ in frontier(tree, tree.root, 9, 1, 0.01)] == [3]
    assert [node.token for node, _ in frontier(tree, tree.root, 9, 5, 0.1)] == [3]
    (end,) = frontier(tree, found[1][0], 9, 5, 0.01)
    assert end == (found[1][0], 1.0)
    assert frontier(tree, tree.root, 2, 5, 0.01) == []


def test_the_frontier_draws_no_child_that_cannot_be_likely_enough() -> None:
    tree = Tree([9], GreedyPicker())
    tree.root.distribution = Distribution((1, 2, 3), (0.7, 0.2, 0.1), 1.0)

    assert [node.token for node, _ in frontier(tree, tree.root, 1, 5, 0.25)] == [1]
    assert tree.num_drafted == 2  # 0.3 is left after the first, so the second might have been likely enough
    assert [node.token for node, _ in frontier(tree, tree.root, 1, 5, 0.15)] == [1, 2]
    assert tree.num_drafted == 2
