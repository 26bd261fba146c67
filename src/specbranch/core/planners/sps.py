"""SpS, plain speculative decoding: draft gamma tokens while the target waits, then verify while the draft waits.

Leviathan et al. 2023, Chen et al. 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.planners.settings import Settings, Window
from specbranch.core.round import Round
from specbranch.core.tree import Node
from specbranch.core.verify import Verdict


@dataclass(frozen=True, slots=True)
class SpsSettings(Settings):
    """`gamma`: tokens per submission."""

    gamma: Window = 5


class SpsPlanner:
    """Fixed length, strictly in turns."""

    def __init__(self, settings: SpsSettings) -> None:
        self._gamma = settings.gamma

    def submit(self, round: Round) -> Sequence[Node] | None:
        root = round.tree.root
        return None if round.tree.unrun(root, self._gamma) else round.tree.walk(root, self._gamma)

    def prepare(self, round: Round) -> Sequence[Node]:
        if not round.is_waiting:
            return ()
        tip = round.tree.unrun(round.tree.root, self._gamma)
        return (tip,) if tip else ()

    def learn(self, round: Round, verdict: Verdict) -> None:
        pass
