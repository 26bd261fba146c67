"""Guesses are planted behind nodes that were not run, by whoever was right most often."""

from __future__ import annotations

from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution
from specbranch.core.ngram import MEMORY, TEXT, NgramDrafter
from specbranch.core.node import GreedyPicker
from specbranch.core.tree import Tree


def planted(costs: PairModel, tokens: list[int], count: int = 4, least: float = 0.01) -> list[tuple[int, str, int]]:
    tree = Tree(tokens, GreedyPicker(), costs.calibration)
    guesser = NgramDrafter(tokens, costs.history)
    guesser.index_new_tokens()
    chain = guesser.extend(tree, tree.root, count, least)
    assert [node.parent for node in chain] == [tree.root, *chain[:-1]][: len(chain)]
    return [(node.token, *node.guess_source) for node in chain if node.guess_source]


def test_a_chain_stands_on_ever_better_grounds() -> None:
    assert planted(PairModel(), [1, 2, 3, 9, 8, 7, 1, 2, 3]) == [(9, TEXT, 3), (8, TEXT, 4), (7, TEXT, 5), (1, TEXT, 5)]


def test_other_answers_are_asked_where_the_text_has_nothing() -> None:
    costs = PairModel()
    costs.history.add(costs.history.begin(), [1, 2, 3, 4, 5])

    assert planted(costs, [7, 1, 2, 3]) == [(4, MEMORY, 3), (5, MEMORY, 4)]


def test_whoever_was_right_more_often_guesses() -> None:
    costs = PairModel()
    costs.history.add(costs.history.begin(), [1, 2, 3, 4])
    for source, is_right in ((TEXT, False), (MEMORY, True)):
        for _ in range(5):
            costs.calibration.observe_guess((source, 3), is_right)

    assert planted(costs, [1, 2, 3, 9, 8, 1, 2, 3], count=1) == [(4, MEMORY, 3)]
    for _ in range(50):
        costs.calibration.observe_guess((TEXT, 3), True)
    assert planted(costs, [1, 2, 3, 9, 8, 1, 2, 3], count=1) == [(9, TEXT, 3)]


def test_what_is_too_unlikely_is_not_planted() -> None:
    assert planted(PairModel(), [1, 2, 3, 9, 8, 7, 1, 2, 3], least=0.3) == [(9, TEXT, 3)]


def test_nothing_is_planted_behind_a_node_that_ran() -> None:
    costs = PairModel()
    tokens = [1, 2, 3, 9, 8, 7, 1, 2, 3]
    tree = Tree(tokens, GreedyPicker(), costs.calibration)
    guesser = NgramDrafter(tokens, costs.history)
    guesser.index_new_tokens()
    chain = guesser.extend(tree, tree.root, 1, 0.01)
    tree.set_distribution(chain[0], Distribution((5,), (1.0,), 0.0))

    assert guesser.extend(tree, tree.root, 4, 0.01) == chain
