"""One sequence being decoded: its tokens, its draft tree, its planner and its counters.

The simulator, the in-process loop and the draft service all drive this object; it has no clock and does no I/O.
A round is: `propose` (until it answers), `rows` and `grow` as often as there is time, `commit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specbranch.core.costs import Costs
from specbranch.core.distribution import Distribution
from specbranch.core.draw import Draw
from specbranch.core.planners.protocol import Planner
from specbranch.core.round import Outlook, Round
from specbranch.core.stats import Stats
from specbranch.core.suffix import SuffixIndex
from specbranch.core.tree import Node, Tree
from specbranch.core.verify import Verdict


@dataclass(frozen=True, slots=True)
class Ending:
    """When a sequence is over: after so many new tokens, or at one of these tokens."""

    max_new_tokens: int | None = None
    eos_ids: frozenset[int] = field(default_factory=frozenset)

    def trim(self, tokens: Sequence[int], num_emitted: int) -> tuple[list[int], bool]:
        """The tokens that may still be emitted, and whether the sequence ends with them."""
        room = len(tokens) if self.max_new_tokens is None else self.max_new_tokens - num_emitted
        for index, token in enumerate(tokens[:room]):
            if token in self.eos_ids:
                return list(tokens[: index + 1]), True
        return list(tokens[:room]), self.max_new_tokens is not None and room <= len(tokens)


class Session:
    """A sequence and everything that is prepared for it. Only verified tokens ever enter `tokens`."""

    def __init__(
        self, prompt: Sequence[int], planner: Planner, draw: Draw, costs: Costs, ending: Ending | None = None
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.stats = Stats()
        self.is_finished = False
        self._planner = planner
        self._ending = ending or Ending()
        self.round = Round(0, Tree(prompt, draw, costs.calibration), costs, SuffixIndex(self.tokens))

    @property
    def tree(self) -> Tree:
        """What is drafted after the committed tokens."""
        return self.round.tree

    @property
    def submitted(self) -> list[int]:
        """The tokens under verification."""
        return [node.token for node in self.tree.submitted or ()]

    @property
    def output(self) -> list[int]:
        """The tokens emitted so far."""
        return self.tokens[self.prompt_len :]

    def propose(self) -> list[int] | None:
        """Tokens for the target to verify now; None while the planner lets it wait. Asking again repeats the answer."""
        if self.round.is_waiting:
            nodes = self._planner.submit(self.round)
            if nodes is None:
                return None
            self.tree.submit(nodes)
        return self.submitted

    def stand_aside(self) -> None:
        """Let this round go without a draft: the deadline has passed, or nothing can be drafted."""
        if self.round.is_waiting:
            self.tree.submit(())

    def rows(self) -> Sequence[Node]:
        """The nodes that the draft should run next, most valuable first."""
        self.settle()
        return self._planner.prepare(self.round)

    def grow(self, node: Node, distribution: Distribution) -> None:
        """Take in the distribution after a node that was run. A node that was rolled back meanwhile does no harm."""
        self.tree.set_distribution(node, distribution)
        self.stats.rows += 1

    def settle(self) -> None:
        """Count what verdicts have rolled back. Done before drafting goes on, not before the target is answered."""
        self.stats.settle(self.tree.settle())

    def commit(self, verdict: Verdict, round_index: int, outlook: Outlook | None = None) -> list[int]:
        """Settle a round and return the tokens that it emits. A verdict for a round that is over changes nothing.

        `outlook` is for the round that begins.
        """
        if self.is_finished or round_index != self.round.index or self.round.is_waiting:
            self.stats.superseded += 1
            return []
        submitted = self.submitted
        if not 0 <= verdict.accepted <= len(submitted):
            raise ValueError(f"a verdict accepts {verdict.accepted} of {len(submitted)} submitted tokens")
        self._planner.learn(self.round, verdict)
        committed = verdict.committed(submitted)
        emitted, self.is_finished = self._ending.trim(committed, len(self.tokens) - self.prompt_len)
        self._enter(committed, emitted, verdict, len(submitted), outlook)
        return emitted

    def follow(self, tokens: Sequence[int], num_submitted: int, outlook: Outlook | None = None) -> None:
        """Settle a round by content alone: these tokens were committed after `num_submitted` had been sent.

        This is how an engine that drives itself reports. It may have gone on by several tokens without asking.
        `outlook` is for the round that begins.
        """
        if not tokens:
            raise ValueError("a verdict commits at least the target's own token")
        self.stand_aside()
        self.tree.retract(num_submitted)
        submitted = self.submitted
        accepted = 0
        while accepted < min(len(submitted), len(tokens) - 1) and submitted[accepted] == tokens[accepted]:
            accepted += 1
        verdict = Verdict(accepted, tokens[accepted])
        self._planner.learn(self.round, verdict)
        self._enter(tokens, tokens, verdict, len(submitted), outlook)

    def _enter(
        self,
        committed: Sequence[int],
        emitted: Sequence[int],
        verdict: Verdict,
        num_submitted: int,
        outlook: Outlook | None,
    ) -> None:
        """Take tokens in and begin the next round."""
        self.tokens += emitted
        tree = self.tree
        tree.learn(committed)
        tree.commit(committed)
        is_hit = tree.root.distribution is not None
        self.round = Round(self.round.index + 1, tree, self.round.costs, self.round.suffixes, is_hit, outlook=outlook)
        self._count(verdict, num_submitted, len(emitted))

    def _count(self, verdict: Verdict, num_submitted: int, num_emitted: int) -> None:
        stats = self.stats
        stats.rounds += 1
        stats.hits += self.round.is_hit
        stats.submitted += num_submitted
        stats.accepted += min(verdict.accepted, num_emitted)
        stats.emitted += num_emitted
