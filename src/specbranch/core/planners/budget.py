"""Budget: spend draft rows where the probability is, whatever the verdict that they prepare for.

Every drafted or drawable token has a chance to come true: the product, along its path from the last
committed token, of how often the draft is right there (`core/calibration.py`). A row on it is worth that chance,
whether it lies behind the whole submission, behind a refusal half-way, or deep on a branch. So one ranking answers
which outcomes to prepare and how deep; the measured cost of rows answers how many. Concentrated on one position this is
SpecBranch, with a fixed prior SSD, with expensive rows PEARL.

What followed the same few tokens before, in this sequence or in another answer, is guessed to follow again. Where the
draft has nothing yet, a guess is submitted. Behind a node that is about to run it runs in the same step, so that one
draft step gives several tokens of depth. Where verifying a token costs the target time, what will hardly be accepted
is not submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from specbranch.core.ngram import MEMORY, TEXT
from specbranch.core.node import Node
from specbranch.core.planner import Planner, Predictor, Rows, Settings, Share, Window
from specbranch.core.round import Round
from specbranch.core.tree import Tree

_LEAST_CHANCE = 0.01
_NEWEST = 64  # tokens of the sequence that are looked at before an answer
_LEAST_REPEAT = 0.1  # a token that is verified in vain costs the target a little


@dataclass(frozen=True, slots=True)
class BudgetSettings(Settings):
    """Longest submission, the most rows of one draft step, and where guesses come from that cost no model.

    `uses_text`: the sequence's own repetitions; `uses_memory`: past answers of the same target. `deepens`: what is
    guessed also runs behind a node in its draft step. Guesses are certain: accepted as often as the target says them.
    `prices`: what is less likely to be accepted than its verification is worth is not submitted. `least_chance`: nor is
    what is less likely than this, also where verifying is free: less of the target's work is in vain, for some of the
    speed. `waits`: the target waits for a submission of full length, which only makes sense in tests.
    """

    gamma: Window = 15  # with the target's own token a power of two, as kernels like it
    max_rows: Rows = 12
    uses_text: bool = True
    uses_memory: bool = True
    deepens: bool = True
    prices: bool = True
    least_chance: Share = 0.0
    waits: bool = False


class BudgetPlanner(Planner[BudgetSettings]):
    """The likeliest outcomes first, as many as pay for their time."""

    settings_type = BudgetSettings

    def __init__(self, settings: BudgetSettings, predictor: Predictor) -> None:
        super().__init__(settings, predictor)
        used = {TEXT: settings.uses_text, MEMORY: settings.uses_memory}
        self._sources = [source for source, is_used in used.items() if is_used]

    @property
    def lets_wait(self) -> bool:
        return self.settings.waits

    def submit(self, round: Round) -> Sequence[Node] | None:
        tree = round.tree
        if self.lets_wait:
            tip = tree.unrun(tree.root, self.settings.gamma)
            if tip is not None and tree.chance(tip) >= _LEAST_CHANCE:
                return None
        return self._worth_submitting(round, tree.root)

    def foresee(self, round: Round, start: Node) -> Sequence[Node] | None:
        return None if self.lets_wait else self._worth_submitting(round, start)

    def prepare(self, round: Round) -> Sequence[Node]:
        tree, settings = round.tree, self.settings
        depth = len(tree.submitted or ()) + settings.gamma
        deepest = tree.root.position + depth

        def guess(node: Node, least: float) -> None:
            """What is guessed behind a node runs in its step, so that one step gives several tokens of depth."""
            round.guesser.plant(tree, node, deepest - node.position, least, self._sources)

        if self._sources:  # here, because an answer to the target must not wait for it
            round.guesser.catch_up()
        deepens = settings.deepens and self._sources
        return rows_that_pay(round, tree.root, depth, settings.max_rows, _LEAST_CHANCE, guess if deepens else None)

    def _worth_submitting(self, round: Round, start: Node) -> list[Node]:
        """What the target should verify behind a node, once the sequence has come there."""
        tree, gamma = round.tree, self.settings.gamma
        price = round.costs.price if self.settings.prices else 0.0
        bar = max(price, self.settings.least_chance)
        chain = list(takewhile(lambda node: tree.chance(node, start) >= bar, tree.walk_run(start, gamma)))
        tip = chain[-1] if chain else start
        if self._sources and len(chain) < gamma and tip.distribution is None:
            round.guesser.catch_up(most=_NEWEST)
            least = max(_LEAST_REPEAT, bar) * tree.chance(start)
            chain += round.guesser.plant(tree, tip, gamma - len(chain), least, self._sources)
        gain = self._gain(tree, start, chain, price, bar)
        return chain if not self.settings.prices or gain >= round.costs.entry else []

    def _gain(self, tree: Tree, start: Node, chain: Sequence[Node], price: float, bar: float) -> float:
        """Tokens that a submission is expected to bring beyond its price; none less likely than the bar is in it.

        Behind a token that was drawn by chance all others count as if they were like it. What is known of them depends
        on the token that it is, and whether it is tested must not (rule B).
        """
        gain = 0.0
        for index, node in enumerate(chain):
            chance = tree.chance(node, start)
            gain += chance - price
            if node.drawn_from is not None:
                assert node.parent is not None, "below the start"
                alike = tree.chance(node, node.parent)
                further = (chance * alike**more for more in range(1, self.settings.gamma - index))
                return gain + sum(one - price for one in takewhile(lambda one: one >= bar, further))
        return gain


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
