"""Submit a chain only as far as it is likely to be accepted as a whole; meanwhile draft on behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbranch import Planner, Settings
from specbranch.core.node import Node
from specbranch.core.planners.settings import Share, Window
from specbranch.core.round import Round


@dataclass(frozen=True, slots=True)
class CautiousSettings(Settings):
    """Longest submission, and the least chance that a submitted token is accepted."""

    gamma: Window = 8
    least: Share = 0.3


class CautiousPlanner(Planner[CautiousSettings]):
    """One chain; it never lets the target wait."""

    settings_type = CautiousSettings

    def submit(self, round: Round) -> Sequence[Node]:
        """The chain of the draft's first choices, cut where it becomes unlikely."""
        chain = round.tree.walk(round.tree.root, self.settings.gamma)
        return [node for node in chain if round.tree.chance(node) >= self.settings.least]

    def prepare(self, round: Round) -> Sequence[Node]:
        """Go on behind what was submitted, as if all of it will be accepted."""
        tip = round.tree.unrun(round.tree.end, self.settings.gamma)
        return (tip,) if tip else ()
