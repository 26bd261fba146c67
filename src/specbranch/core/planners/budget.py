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

_MIN_PROB = 0.01
_NEWEST = 64  # tokens of the sequence that are looked at before an answer
_MIN_REPEAT = 0.1  # a token that is verified in vain costs the target a little


@dataclass(frozen=True, slots=True)
class BudgetSettings(Settings):
    """The longest draft, the most rows of one draft step, and where n-gram drafts come from.

    `uses_text`: the sequence's own repetitions; `uses_memory`: past answers of the same target. `run_guesses`: run
    n-gram drafts through the model too, after a node in its draft step. `cost_aware`: submit no token that is less
    likely to be accepted than its verification costs. `min_accept_prob`: nor one that is less likely than this, also
    where verification is free; it wastes less of the target's work and costs some speed. `wait_for_draft`: let the
    target wait for a draft of full length, which only makes sense in tests.
    """

    gamma: Window = 15  # with the target's own token a power of two, as kernels like it
    max_rows: Rows = 12
    uses_text: bool = True
    uses_memory: bool = True
    run_guesses: bool = True
    cost_aware: bool = True
    min_accept_prob: Share = 0.0
    wait_for_draft: bool = False


class BudgetPlanner(Planner[BudgetSettings]):
    """The likeliest outcomes first, as many as pay for their time."""

    settings_type = BudgetSettings

    def __init__(self, settings: BudgetSettings, predictor: Predictor) -> None:
        super().__init__(settings, predictor)
        used = {TEXT: settings.uses_text, MEMORY: settings.uses_memory}
        self._sources = [source for source, is_used in used.items() if is_used]

    @property
    def may_block_target(self) -> bool:
        return self.settings.wait_for_draft

    def submit(self, round: Round) -> Sequence[Node] | None:
        tree = round.tree
        if self.may_block_target:
            tip = tree.next_unrun(tree.root, self.settings.gamma)
            if tip is not None and tree.path_prob(tip) >= _MIN_PROB:
                return None
        return self._worth_submitting(round, tree.root)

    def submit_after(self, round: Round, start: Node) -> Sequence[Node] | None:
        return None if self.may_block_target else self._worth_submitting(round, start)

    def rows_to_run(self, round: Round) -> Sequence[Node]:
        tree, settings = round.tree, self.settings
        depth = len(tree.submitted or ()) + settings.gamma
        deepest = tree.root.position + depth

        def guess(node: Node, least: float) -> None:
            """What is guessed behind a node runs in its step, so that one step gives several tokens of depth."""
            round.ngrams.extend(tree, node, deepest - node.position, least, self._sources)

        if self._sources:  # here, because an answer to the target must not wait for it
            round.ngrams.index_new_tokens()
        deepens = settings.run_guesses and self._sources
        return best_rows(round, tree.root, depth, settings.max_rows, _MIN_PROB, guess if deepens else None)

    def _worth_submitting(self, round: Round, start: Node) -> list[Node]:
        """What the target should verify behind a node, once the sequence has come there."""
        tree, gamma = round.tree, self.settings.gamma
        price = round.costs.target.min_accept_prob if self.settings.cost_aware else 0.0
        bar = max(price, self.settings.min_accept_prob)
        chain = list(takewhile(lambda node: tree.path_prob(node, start) >= bar, tree.drafted_chain(start, gamma)))
        tip = chain[-1] if chain else start
        if self._sources and len(chain) < gamma and tip.distribution is None:
            round.ngrams.index_new_tokens(most=_NEWEST)
            least = max(_MIN_REPEAT, bar) * tree.path_prob(start)
            chain += round.ngrams.extend(tree, tip, gamma - len(chain), least, self._sources)
        gain = self._gain(tree, start, chain, price, bar)
        return chain if not self.settings.cost_aware or gain >= round.costs.target.min_gain else []

    def _gain(self, tree: Tree, start: Node, chain: Sequence[Node], price: float, bar: float) -> float:
        """Tokens that a submission is expected to bring beyond its price; none less likely than the bar is in it.

        Behind a token that was drawn by chance all others count as if they were like it. What is known of them depends
        on the token that it is, and whether it is tested must not (rule B).
        """
        gain = 0.0
        for index, node in enumerate(chain):
            chance = tree.path_prob(node, start)
            gain += chance - price
            if node.sampled_from is not None:
                assert node.parent is not None, "below the start"
                alike = tree.path_prob(node, node.parent)
                further = (chance * alike**more for more in range(1, self.settings.gamma - index))
                return gain + sum(one - price for one in takewhile(lambda one: one >= bar, further))
        return gain


def best_rows(
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
