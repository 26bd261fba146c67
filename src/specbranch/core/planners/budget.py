"""Budget: spend draft rows where the probability is, whatever the verdict that they prepare for.

Every drafted or drawable token has a chance to come true: the product, along its path from the last
committed token, of how often the draft is right there (`core/calibration.py`). A row on it is worth that chance,
whether it lies behind the whole submission, behind a refusal half-way, or deep on a branch. So one ranking answers
which outcomes to prepare and how deep; the measured cost of rows answers how many. Concentrated on one position this is
SpecBranch, with a fixed prior SSD, with expensive rows PEARL. Where the draft has nothing yet, the sequence itself may:
what followed the same few tokens the last time is submitted behind the chain, and costs no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.node import Node
from specbranch.core.planners.protocol import Planner, Predictor
from specbranch.core.planners.rows import rows_that_pay
from specbranch.core.planners.settings import Rows, Settings, Window
from specbranch.core.round import Round
from specbranch.core.verdict import Verdict

_LEAST_CHANCE = 0.01
_NEWEST = 64  # tokens of the sequence that are looked at before an answer
_LEAST_REPEAT = 0.1  # a token that is verified in vain costs the target a little


@dataclass(frozen=True, slots=True)
class BudgetSettings(Settings):
    """Longest submission, the most rows of one draft step, and whether the sequence's own repetitions are submitted.

    The last is for verification by match alone, as vLLM's is for what a draft service proposes.
    """

    gamma: Window = 8
    max_rows: Rows = 12
    uses_text: bool = True


@dataclass(frozen=True, slots=True)
class _Repeat:
    """The part of a submission that repeats the sequence: where it begins, and how many tokens before it agreed."""

    start: int
    num_agreed: int


class BudgetPlanner(Planner[BudgetSettings]):
    """The likeliest outcomes first, as many as pay for their time."""

    settings_type = BudgetSettings

    def __init__(self, settings: BudgetSettings, predictor: Predictor) -> None:
        super().__init__(settings, predictor)
        self._repeat: _Repeat | None = None

    def submit(self, round: Round) -> Sequence[Node]:
        chain = round.tree.walk(round.tree.root, self.settings.gamma)
        self._repeat = None
        if self.settings.uses_text and len(chain) < self.settings.gamma:
            self._go_on(round, chain)
        return chain

    def prepare(self, round: Round) -> Sequence[Node]:
        tree, settings = round.tree, self.settings
        if settings.uses_text:  # here, because an answer to the target must not wait for it
            round.suffixes.catch_up()
        depth = len(tree.submitted or ()) + settings.gamma
        return rows_that_pay(round, tree.root, depth, settings.max_rows, _LEAST_CHANCE)

    def learn(self, round: Round, verdict: Verdict) -> None:
        """See whether the sequence repeated itself, as far as the verdict tells."""
        submitted = round.tree.submitted or []
        if self._repeat is None or verdict.accepted < self._repeat.start:
            return
        for position in range(self._repeat.start, min(verdict.accepted + 1, len(submitted))):
            round.costs.calibration.observe_repeat(self._repeat.num_agreed, position < verdict.accepted)

    def _go_on(self, round: Round, chain: list[Node]) -> None:
        """Let the chain go on as the sequence did the last time, while that is likely enough."""
        tree, start = round.tree, len(chain)
        tip = chain[-1] if chain else tree.root
        round.suffixes.catch_up(most=_NEWEST)
        tokens, num_agreed = round.suffixes.after([node.token for node in chain], self.settings.gamma - start)
        chance = round.costs.calibration.repeat_chance(num_agreed)
        for token in tokens:
            if tip.distribution is not None or tree.chance(tip) * chance < _LEAST_REPEAT:
                break
            tip = tree.plant(tip, token, chance)
            chain.append(tip)
        if len(chain) > start:
            self._repeat = _Repeat(start, num_agreed)
