"""Guesses are planted behind nodes that were not run, by whoever was right most often."""

from __future__ import annotations

from specbranch.core.costs import Costs
from specbranch.core.distribution import Distribution
from specbranch.core.draw import TopDraw
from specbranch.core.guesser import HEADS, MEMORY, TEXT, Guesser
from specbranch.core.tree import Tree

Behind = tuple[list[tuple[int, str, int]], list[tuple[int, str, int]]]


def planted(costs: Costs, tokens: list[int], count: int = 4, least: float = 0.01) -> list[tuple[int, str, int]]:
    tree = Tree(tokens, TopDraw(), costs.calibration)
    guesser = Guesser(tokens, costs)
    guesser.catch_up()
    chain = guesser.plant(tree, tree.root, count, least)
    assert [node.parent for node in chain] == [tree.root, *chain[:-1]][: len(chain)]
    return [(node.token, *node.grounds) for node in chain if node.grounds]


def test_a_chain_stands_on_ever_better_grounds() -> None:
    assert planted(Costs(), [1, 2, 3, 9, 8, 7, 1, 2, 3]) == [(9, TEXT, 3), (8, TEXT, 4), (7, TEXT, 5), (1, TEXT, 5)]


def test_other_answers_are_asked_where_the_text_has_nothing() -> None:
    costs = Costs()
    costs.memory.add(costs.memory.begin(), [1, 2, 3, 4, 5])

    assert planted(costs, [7, 1, 2, 3]) == [(4, MEMORY, 3), (5, MEMORY, 4)]


def test_whoever_was_right_more_often_guesses() -> None:
    costs = Costs()
    costs.memory.add(costs.memory.begin(), [1, 2, 3, 4])
    for source, is_right in ((TEXT, False), (MEMORY, True)):
        for _ in range(5):
            costs.calibration.observe_guess((source, 3), is_right)

    assert planted(costs, [1, 2, 3, 9, 8, 1, 2, 3], count=1) == [(4, MEMORY, 3)]
    for _ in range(50):
        costs.calibration.observe_guess((TEXT, 3), True)
    assert planted(costs, [1, 2, 3, 9, 8, 1, 2, 3], count=1) == [(9, TEXT, 3)]


def test_what_is_too_unlikely_is_not_planted() -> None:
    assert planted(Costs(), [1, 2, 3, 9, 8, 7, 1, 2, 3], least=0.3) == [(9, TEXT, 3)]


def behind_first_choice(tokens: list[int], guess: tuple[int, float] | None, costs: Costs | None = None) -> Behind:
    """What is planted behind token 3, the first choice of a draft that guesses; and behind 4, its second."""
    costs = costs or Costs()
    tree = Tree(tokens, TopDraw(), costs.calibration)
    tree.set_distribution(tree.root, Distribution((3, 4), (0.9, 0.1), 0.3, guess))
    guesser = Guesser(tokens, costs)
    guesser.catch_up()
    chains = [guesser.plant(tree, child, 4, 0.001) for child in tree.children(tree.root, 2)]
    first, second = ([(node.token, *node.grounds) for node in chain if node.grounds] for chain in chains)
    return first, second


def test_a_head_guesses_behind_the_first_choice_alone() -> None:
    assert behind_first_choice([1, 2], (9, 0.87)) == ([(9, HEADS, 8)], [])
    assert behind_first_choice([1, 2], (9, 1.0)) == ([(9, HEADS, 9)], [])
    assert behind_first_choice([1, 2], None) == ([], [])


def test_what_the_text_says_goes_on_behind_the_token_of_a_head() -> None:
    costs = Costs()
    costs.calibration.observe_guess((HEADS, 9), True)

    first, _ = behind_first_choice([3, 9, 7, 6, 1, 2], (9, 0.95), costs)

    assert first == [(9, HEADS, 9), (7, TEXT, 2), (6, TEXT, 3), (1, TEXT, 4)]


def test_a_head_that_is_wrong_more_often_than_the_text_is_not_heard() -> None:
    costs = Costs()
    for _ in range(9):
        costs.calibration.observe_guess((HEADS, 2), False)

    first, _ = behind_first_choice([2, 3, 8, 1, 2], (9, 0.25), costs)

    assert first[0] == (8, TEXT, 2)


def test_a_first_choice_that_was_planted_before_hears_of_the_head_too_and_keeps_it_as_root() -> None:
    tree = Tree([1, 2], TopDraw())
    planted = tree.plant(tree.root, 3, (TEXT, 2))
    tree.set_distribution(tree.root, Distribution((3, 4), (0.9, 0.1), 0.3, (9, 0.5)))
    tree.commit([3])

    assert tree.root is planted
    assert tree.root.guess == (9, 0.5)


def test_nothing_is_planted_behind_a_node_that_ran() -> None:
    costs = Costs()
    tokens = [1, 2, 3, 9, 8, 7, 1, 2, 3]
    tree = Tree(tokens, TopDraw(), costs.calibration)
    guesser = Guesser(tokens, costs)
    guesser.catch_up()
    chain = guesser.plant(tree, tree.root, 1, 0.01)
    tree.set_distribution(chain[0], Distribution((5,), (1.0,), 0.0))

    assert guesser.plant(tree, tree.root, 4, 0.01) == chain
