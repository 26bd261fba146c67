"""Double: a PEARL chain whose draft and whose target both look up what followed the same tokens before.

Shen et al. 2026 (arXiv 2601.05524). Its abstract names two lookups: the draft's own, step by step, so that a draft step
gives more than one token; and the target's, behind the token that only the target can give. No code and no more of the
method is public to us. So this is the abstract on our tree: one chain without branches, the sequence's own repetitions
behind its tip in every draft step, and behind the target's own token in the submission.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.guesser import TEXT
from specbranch.core.node import Node
from specbranch.core.planners.protocol import Planner
from specbranch.core.planners.settings import Settings, Window
from specbranch.core.round import Round


@dataclass(frozen=True, slots=True)
class DoubleSettings(Settings):
    """`gamma`: tokens per window, the root included; `lookup`: the most tokens that one lookup gives."""

    gamma: Window = 8
    lookup: Window = 4


class DoublePlanner(Planner[DoubleSettings]):
    """Submit the chain and what followed it before; prepare for full acceptance, several tokens in a step."""

    settings_type = DoubleSettings

    def submit(self, round: Round) -> Sequence[Node]:
        tree, longest = round.tree, self.settings.gamma - 1
        chain = tree.walk_run(tree.root, longest)
        tip = _tip(tree.root, chain)
        if tip.distribution is None:
            round.guesser.catch_up()
            chain += self._look_up(round, tip, longest - len(chain))
        return chain

    def prepare(self, round: Round) -> Sequence[Node]:
        if round.is_waiting:
            return ()
        round.guesser.catch_up()
        tree = round.tree
        left = tree.end.position + self.settings.gamma - 1
        tip = _tip(tree.root, tree.walk_run(tree.root, left - tree.root.position + 1))
        if tip.distribution is not None or tip.position > left:
            return ()
        return tip, *self._look_up(round, tip, left - tip.position)

    def _look_up(self, round: Round, tip: Node, most: int) -> list[Node]:
        return round.guesser.plant(round.tree, tip, min(most, self.settings.lookup), 0.0, [TEXT])


def _tip(root: Node, chain: Sequence[Node]) -> Node:
    """The last node of a chain; only it may not have been run."""
    return chain[-1] if chain else root
