"""SpS, plain speculative decoding: draft gamma tokens while the target waits, then verify while the draft waits.

Leviathan et al. 2023, Chen et al. 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.node import Node
from specbranch.core.planners.protocol import Planner
from specbranch.core.planners.settings import Settings, Window
from specbranch.core.round import Round


@dataclass(frozen=True, slots=True)
class SpsSettings(Settings):
    """`gamma`: tokens per submission."""

    gamma: Window = 5


class SpsPlanner(Planner[SpsSettings]):
    """Fixed length, strictly in turns."""

    settings_type = SpsSettings

    def submit(self, round: Round) -> Sequence[Node] | None:
        root = round.tree.root
        return None if round.tree.unrun(root, self.settings.gamma) else round.tree.walk(root, self.settings.gamma)

    def prepare(self, round: Round) -> Sequence[Node]:
        if not round.is_waiting:
            return ()
        tip = round.tree.unrun(round.tree.root, self.settings.gamma)
        return (tip,) if tip else ()
