"""SpecBranch as in the paper: end the submission where the draft is doubtful, and branch there.

After a miss (DRAFT stage) H-RAD's signal says how much to draft while the target waits: nothing, up to the first
distribution with little confidence, or a whole window. While the target verifies (BRANCH stage) the draft grows k =
max(1, floor(k_max * (1 - confidence))) branches at the branch point, right after the submission. After a hit a new
signal decides how much of the surviving branch to submit (posterior drafting), and the target starts at once.

Three things differ from the paper. Drafted tokens that are not submitted stay in the tree as the first branch. After a
miss the target need not wait: it goes on with the tokens drafted so far, or none, while the draft catches up; on
recorded traces, waiting was slower. And where rows are expensive, only those are run that give the most acceptance
probability for their time. `wait_for_draft` without `cost_aware` is the paper's form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.node import Node
from specbranch.core.planner import Planner, Rows, Settings, Share, Window
from specbranch.core.planners.budget import best_rows
from specbranch.core.round import Round, Signal

_MIN_PROB = 0.02


@dataclass(frozen=True, slots=True)
class SpecbranchSettings(Settings):
    """Settings of `SpecbranchPlanner`. `gamma`: the longest submission. `max_branches`: the most branches at a time.

    `confidence`: a distribution whose likeliest token has a lower probability is doubtful. `wait_for_draft`: after a
    result that was not prepared for, the target waits for a draft. `cost_aware`: grow only the branches
    that give the most acceptance probability for the draft's time.
    """

    gamma: Window = 8
    confidence: Share = 0.3
    max_branches: Rows = 6
    wait_for_draft: bool = False
    cost_aware: bool = True


class SpecbranchPlanner(Planner[SpecbranchSettings]):
    """The SpecBranch method: ends a submission where the draft is doubtful, and grows several branches only there."""

    settings_type = SpecbranchSettings
    asks_predictor = True

    def submit(self, round: Round) -> Sequence[Node] | None:
        chain, tip = self._chain(round)
        return chain if tip is None or round.is_hit or not self.settings.wait_for_draft else None

    def rows_to_run(self, round: Round) -> Sequence[Node]:
        if round.is_waiting:
            _, tip = self._chain(round)
            return (tip,) if tip else ()
        tree = round.tree
        end = tree.end
        if end.distribution is None:
            return (end,)
        if self.settings.cost_aware:
            settings = self.settings
            return best_rows(round, end, settings.gamma, settings.max_branches, _MIN_PROB)
        count = max(1, math.floor(self.settings.max_branches * (1 - end.distribution.confidence)))
        tips = (tree.next_unrun(root, self._branch_len(round, count) - 1) for root in tree.children(end, count))
        return [tip for tip in tips if tip]

    def _chain(self, round: Round) -> tuple[list[Node], Node | None]:
        """Return the drafted part of the chain to submit, and the node whose distribution it needs to grow, if any.

        The signal of the round says where the chain ends: at the root (it is empty), at the first doubtful
        distribution, or after `gamma` tokens.
        """
        if round.signal is None:
            round.signal = self.predictor.predict(round)
        chain: list[Node] = []
        node = round.tree.root
        while len(chain) < self.settings.gamma and round.signal != Signal.NONE:
            if node.distribution is None:
                return chain, node
            # The distribution decides, not the token drawn from it: else rejection sampling would be biased.
            if round.signal == Signal.SOME and node.distribution.confidence < self.settings.confidence:
                break
            children = round.tree.children(node, 1)
            if not children:
                break
            node = children[0]
            chain.append(node)
        return chain, None

    def _branch_len(self, round: Round, num_branches: int) -> int:
        """Return how many tokens to draft for each branch, its root included: as many as fit into a step of the target.

        This is a ratio of measured step times, rounded to the nearest integer: then the draft is idle or late by half a
        draft step at most. Rounding down would turn a measured 4.999 into 4 and leave the draft idle for a whole step.
        """
        ratio = round.costs.draft_steps_per_target_step(num_branches)
        longest = self.settings.gamma
        return longest if ratio is None else max(1, math.floor(min(longest, ratio) + 0.5))
