"""Which draft rows pay for their time."""

from __future__ import annotations

from collections.abc import Callable

from specbranch.core.node import Node
from specbranch.core.round import Round


def rows_that_pay(
    round: Round, start: Node, depth: int, most: int, least: float, guess: Callable[[Node, float], object] | None = None
) -> list[Node]:
    """The likeliest nodes to run at or below `start`, as many as give the most chance for the time of a draft step.

    At most `most`, none deeper than `depth` tokens or with a chance below `least`; one while costs are unknown. `guess`
    may plant guesses behind a node that is to run, none less likely than it is told.
    """
    tree, cost = round.tree, round.costs.draft.cost
    if cost is None:
        return [node for node, _ in tree.frontier(start, depth, 1, least)]
    # A further row pays only if its chance is to the best one's as its time is to the first row's. The best one itself
    # must stay, however chances are rounded.
    tips = tree.frontier(start, depth, most, least, min(cost.share_of_more, 0.999), guess)
    return [node for node, _ in tips[: cost.best_rows([chance for _, chance in tips])]]
