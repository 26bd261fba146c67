"""Budget: spend draft rows where the probability is, whatever the verdict that they prepare for.

Every drafted or drawable token has a chance to stand in the text: the product, along its path from the last committed
token, of how often the draft is right there (`core/calibration.py`). A row on it is worth that chance, whether it lies
behind the whole submission, behind a refusal half-way, or deep on a branch. So one ranking answers which outcomes to
prepare and how deep; the measured cost of rows answers how many. Concentrated on one place this is SpecBranch, with a
fixed prior SSD, with dear rows PEARL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.planners.rows import rows_that_pay
from specbranch.core.planners.settings import require_positive
from specbranch.core.round import Round
from specbranch.core.tree import Node
from specbranch.core.verify import Verdict

_LEAST_CHANCE = 0.01


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """Longest submission, and the most rows of one draft step."""

    gamma: int = 8
    max_rows: int = 12

    def __post_init__(self) -> None:
        require_positive(self, "gamma", "max_rows")


class BudgetPlanner:
    """The likeliest outcomes first, as many as pay for their time."""

    def __init__(self, settings: BudgetSettings) -> None:
        self._settings = settings

    def submit(self, round: Round) -> Sequence[Node]:
        return round.tree.walk(round.tree.root, self._settings.gamma)

    def prepare(self, round: Round) -> Sequence[Node]:
        tree, settings = round.tree, self._settings
        depth = len(tree.submitted or ()) + settings.gamma
        return rows_that_pay(round, tree.root, depth, settings.max_rows, _LEAST_CHANCE)

    def learn(self, round: Round, verdict: Verdict) -> None:
        pass
