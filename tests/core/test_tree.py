"""The draft tree: growing, submitting, re-rooting, and what becomes of every token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbranch.core.distribution import Distribution
from specbranch.core.node import GreedyPicker, Node, TokenOutcome
from specbranch.core.tree import RollbackCounts, Tree
from tests.toys import find, nodes


def distribution(*ids: int) -> Distribution:
    return Distribution(ids, tuple(1 / (2 + rank) for rank in range(len(ids))), 1.0)


def grown(tree: Tree, start: Node, *ids: tuple[int, ...]) -> None:
    """Give distributions along the principal chain below `start`."""
    node = start
    for head in ids:
        node.distribution = distribution(*head)
        (node,) = tree.chain(node, 1)


def settle(tree: Tree, *tokens: int) -> RollbackCounts:
    tree.commit(tokens)
    return tree.count_rollback()


def branching_tree() -> Tree:
    """After token 9: the chain 1 2 3, with the alternative 7 8 to 2."""
    tree = Tree([5, 9], GreedyPicker())
    grown(tree, tree.root, (1,), (2, 7), (3,))
    one = tree.root.children[0]
    grown(tree, tree.children(one, 2)[1], (8,))
    return tree


@pytest.fixture
def tree() -> Tree:
    return branching_tree()


def test_a_tree_needs_a_committed_token() -> None:
    with pytest.raises(ValueError, match="at least one committed token"):
        Tree([], GreedyPicker())


def test_children_are_drawn_in_order_and_no_more_than_the_distribution_holds(tree: Tree) -> None:
    one = tree.root.children[0]

    assert [child.token for child in tree.children(one, 5)] == [2, 7]
    assert tree.children(tree.chain(tree.root, 9)[-1], 3) == []


def test_the_walk_follows_first_children_and_names_the_node_to_run(tree: Tree) -> None:
    chain = tree.chain(tree.root, 9)

    assert [node.token for node in chain] == [1, 2, 3]
    assert tree.next_unrun(tree.root, 9) is chain[-1]
    assert tree.next_unrun(tree.root, 3) is None


def test_a_chain_whose_distribution_is_exhausted_has_nothing_to_run() -> None:
    tree = Tree([0], GreedyPicker())
    tree.root.distribution = Distribution((), (), 0.0)

    assert tree.next_unrun(tree.root, 2) is None


def test_the_distributions_before_given_tokens_are_those_that_are_known(tree: Tree) -> None:
    one = tree.root.children[0]

    assert tree.distributions([1, 7, 8, 4, 4]) == [
        tree.root.distribution, one.distribution, one.children[1].distribution, None, None
    ]  # fmt: skip


def test_positions_count_from_the_start_of_the_sequence(tree: Tree) -> None:
    assert [node.position for node in tree.chain(tree.root, 3)] == [2, 3, 4]


def test_the_chance_of_a_node_is_the_product_along_its_path(tree: Tree) -> None:
    seven, three = find(tree, [1, 7]), find(tree, [1, 2, 3])
    assert seven and three

    assert tree.path_prob(tree.root) == 1
    assert tree.path_prob(seven) == pytest.approx(1 / 2 * 1 / 3)
    assert tree.path_prob(three) == pytest.approx(1 / 8)
    tree.commit([1])
    assert tree.path_prob(seven) == pytest.approx(1 / 3)


def test_what_was_not_sent_after_all_is_not_rejected(tree: Tree) -> None:
    tree.unsubmit(0)
    tree.submit(tree.chain(tree.root, 3))
    tree.unsubmit(1)

    settled = settle(tree, 4)

    assert (settled.rejected, settled.cut, settled.unused) == (1, 4, 0)


def test_only_a_chain_below_the_root_can_be_submitted(tree: Tree) -> None:
    with pytest.raises(ValueError, match="does not continue"):
        tree.submit(tree.chain(tree.root, 3)[1:])


def test_a_verdict_must_commit_something(tree: Tree) -> None:
    with pytest.raises(ValueError, match="at least the target's own token"):
        tree.commit([])


def test_a_hit_keeps_the_branch_below_the_new_root_with_its_distributions(tree: Tree) -> None:
    tree.submit(tree.chain(tree.root, 1))
    seven = find(tree, [1, 7])

    settled = settle(tree, 1, 7)

    assert tree.root is seven
    assert tree.root.distribution == distribution(8)
    assert [node.token for node in nodes(tree)] == [8]
    assert (settled.used, settled.rejected, settled.unused, settled.cut, settled.losing) == (2, 0, 0, 2, 0)


def test_a_branch_may_survive_several_rounds(tree: Tree) -> None:
    tree.submit(())
    tree.commit([1])
    tree.submit(())
    tree.commit([7])

    assert [node.token for node in nodes(tree)] == [8]


def test_settling_may_wait_for_several_verdicts(tree: Tree) -> None:
    tree.submit(())
    tree.commit([1])
    tree.submit(())
    tree.commit([4])

    settled = tree.count_rollback()

    assert (settled.used, settled.rolled_back) == (1, 4)
    assert (tree.num_drafted, tree.num_alive) == (5, 0)
    assert tree.count_rollback() == RollbackCounts()


def test_a_miss_starts_a_new_tree_at_the_targets_token(tree: Tree) -> None:
    tree.submit(tree.chain(tree.root, 2))

    settled = settle(tree, 1, 4)

    assert (tree.root.token, tree.root.position, tree.root.distribution) == (4, 3, None)
    assert list(nodes(tree)) == []
    assert (settled.used, settled.rejected, settled.unused, settled.cut) == (1, 1, 2, 1)
    assert settled.losing == 2


def test_tokens_drafted_during_the_verification_are_unused_not_cut(tree: Tree) -> None:
    chain = tree.chain(tree.root, 3)
    tree.submit(chain)
    chain[-1].distribution = distribution(6)
    tree.chain(chain[-1], 1)

    settled = settle(tree, 4)

    assert (settled.rejected, settled.unused, settled.cut) == (3, 3, 0)


def test_a_verdict_without_a_submission_cuts_nothing(tree: Tree) -> None:
    """The engine may go on without asking, for example when it preempted the sequence."""
    settled = settle(tree, 4)

    assert (settled.unused, settled.cut) == (5, 0)


def test_settled_nodes_know_their_fate_and_hold_no_children(tree: Tree) -> None:
    one = tree.root.children[0]
    two, seven = one.children
    tree.submit([one, two])

    settle(tree, 1, 7)

    assert (one.outcome, two.outcome, seven.outcome) == (TokenOutcome.USED, TokenOutcome.REJECTED, TokenOutcome.USED)
    assert one.children == [] and two.children == []
    assert one.has_committed_child and not two.has_committed_child
    assert repr(seven) == "Node(7 at 3, 1 children)"


@given(st.data())
def test_every_drafted_token_is_settled_once_or_still_alive(data: st.DataObject) -> None:
    """Random growth, random submissions, random verdicts: the books always balance."""
    tree = Tree([0], GreedyPicker())
    settled = 0
    for _ in range(data.draw(st.integers(1, 6), "rounds")):
        for _ in range(data.draw(st.integers(0, 5), "steps")):
            node = data.draw(st.sampled_from([tree.root, *nodes(tree)]), "node")
            node.distribution = node.distribution or distribution(1, 2, 3)
            tree.children(node, data.draw(st.integers(1, 4), "count"))
        chain = tree.chain(tree.root, data.draw(st.integers(0, 3), "submitted"))
        tree.submit(chain)
        accepted = data.draw(st.integers(0, len(chain)), "accepted")
        tree.commit([n.token for n in chain[:accepted]] + [data.draw(st.integers(1, 4), "next")])
        if data.draw(st.booleans(), "settle later"):
            continue
        count = tree.count_rollback()
        settled += count.used + count.rolled_back

        assert tree.num_drafted == settled + tree.num_alive
        assert tree.num_alive == sum(1 for _ in nodes(tree))
        assert all(node.outcome is None for node in nodes(tree))


def test_rollback_rates_are_shares_of_the_drafted_tokens_with_losing_branches_and_without() -> None:
    counts = RollbackCounts(used=4, rejected=3, unused=8, cut=1, losing=6)

    assert counts.rollback_rate == 6 / 10
    assert counts.rollback_rate_with_losing == 12 / 16
    assert RollbackCounts().rollback_rate == RollbackCounts().rollback_rate_with_losing == 0.0
