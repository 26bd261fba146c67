"""PEARL: one chain, drafted without pause while the target verifies what is already there.

A window is gamma tokens: the root that a hit commits, and gamma - 1 tokens to submit after it. After a miss there is
nothing to submit; the target's pass over the newest token then serves as the pre-verify of the window being drafted.
Liu et al. 2025. The original moves in lock step; here the target never waits, which is the same while gamma <= c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.node import Node
from specbranch.core.planners.protocol import Planner
from specbranch.core.planners.settings import Settings, Window
from specbranch.core.round import Round


@dataclass(frozen=True, slots=True)
class PearlSettings(Settings):
    """`gamma`: tokens per window, the root included."""

    gamma: Window = 5


class PearlPlanner(Planner[PearlSettings]):
    """Submit what is there; prepare for full acceptance and the most likely token after it."""

    settings_type = PearlSettings

    def submit(self, round: Round) -> Sequence[Node]:
        return round.tree.walk(round.tree.root, self.settings.gamma - 1)

    def prepare(self, round: Round) -> Sequence[Node]:
        if round.is_waiting:
            return ()
        tip = round.tree.unrun(round.tree.end, self.settings.gamma)
        return (tip,) if tip else ()
