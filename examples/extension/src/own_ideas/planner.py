"""Submit a chain only as far as it is likely to be accepted as a whole; meanwhile draft on after it."""

from collections.abc import Sequence
from dataclasses import dataclass

from specbranch import Node, Planner, Round, Settings, Share, Window


@dataclass(frozen=True, slots=True)
class CautiousSettings(Settings):
    """`gamma`: the longest submission. `least`: the least probability that a submitted token is accepted.

    `wait_for_draft`: while nothing is drafted, the target waits for a first token, at most for its deadline.
    """

    gamma: Window = 8
    least: Share = 0.3
    wait_for_draft: bool = False


class CautiousPlanner(Planner[CautiousSettings]):
    """Drafts one chain of the draft model's first choices, and submits the likely part of it."""

    settings_type = CautiousSettings

    @property
    def may_block_target(self) -> bool:
        """Return whether `submit` may let the target wait; if not, vLLM waits only briefly for each reply."""
        return self.settings.wait_for_draft

    def submit(self, round: Round) -> Sequence[Node] | None:
        """Return the chain, cut where it becomes unlikely; None lets the target wait."""
        if self.settings.wait_for_draft and round.tree.next_unrun(round.tree.root, 1):
            return None
        chain = round.tree.chain(round.tree.root, self.settings.gamma)
        return [node for node in chain if round.tree.path_prob(node) >= self.settings.least]

    def rows_to_run(self, round: Round) -> Sequence[Node]:
        """Return the node to draft after: the end of what was submitted, as if all of it will be accepted."""
        tip = round.tree.next_unrun(round.tree.end, self.settings.gamma)
        return (tip,) if tip else ()
