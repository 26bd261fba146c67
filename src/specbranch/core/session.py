"""One sequence being decoded: its tokens, its draft tree, its planner and its counters.

The simulator, the in-process loop and the draft service all drive this object; it has no clock and does no I/O.
A round is: `propose` (until it answers), `rows` and `add_distribution` as often as there is time, `commit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution, RequestSampling
from specbranch.core.ngram import NgramDrafter
from specbranch.core.node import Node, TokenPicker, rejection_picker
from specbranch.core.planner import Planner
from specbranch.core.round import MAX_WINDOW, AcceptanceHint, Round, Stats, Verdict
from specbranch.core.tree import Tree

_MIN_PROB = 0.01  # of a verdict that is looked at before it comes


@dataclass(frozen=True, slots=True)
class StopCondition:
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
        self,
        prompt: Sequence[int],
        planner: Planner[Any],
        draw: TokenPicker,
        costs: PairModel,
        ending: StopCondition | None = None,
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.stats = Stats()
        self.is_finished = False
        self.longest: int | None = None  # the most tokens that the request lets be submitted at once
        self._planner = planner
        self._draw = draw
        self._sampling: RequestSampling | None = None
        self._ending = ending or StopCondition()
        self._answer = costs.history.begin()
        self._is_secluded = False
        tree = Tree(prompt, draw, costs.calibration)
        self.round = Round(0, tree, costs, NgramDrafter(self.tokens, costs.history, self._answer))

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

    @property
    def sampled_from(self) -> list[Distribution | None]:
        """What each token under verification was drawn from by chance; None for those that were not."""
        return [node.sampled_from for node in self.tree.submitted or ()]

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn by chance."""
        return self._sampling is not None

    def set_sampling(self, sampling: RequestSampling | None) -> None:
        """Draw further tokens by chance, as the target samples (rule B); None: propose the likeliest (rule A)."""
        if sampling != self._sampling:
            self._sampling = sampling
            self._use_calibration()

    def seclude(self) -> None:
        """Teach no other sequence from now on: no token is remembered, and what verdicts tell is learned for this one.

        For tokens that were made with random numbers which may come again, as those of a seed do: a draft must not
        depend on the numbers that will test it. What others have taught may still be used.
        """
        if not self._is_secluded:
            self._is_secluded = True
            self.round.costs = self.round.costs.copy_for_one()
            self._use_calibration()

    def propose(self) -> list[int] | None:
        """Tokens for the target to verify now; None while the planner lets it wait. Asking again repeats the answer."""
        if self.round.is_waiting:
            nodes = self._planner.submit(self.round)
            if nodes is None:
                return None
            self.tree.submit(nodes[: self.longest])
        return self.submitted

    def drafts_by_verdict(self, count: int) -> list[tuple[list[int], Sequence[Node]]]:
        """What `propose` will answer after the verdict that is awaited: committed tokens, and the chain to submit then.

        For the likeliest verdicts, at most `count` of them. Nothing where the planner cannot say it before, or has
        nothing to submit so far: the verdict itself may help.
        """
        foreseen: list[tuple[list[int], Sequence[Node]]] = []
        for node in () if self.round.is_waiting else self.tree.likely_verdicts(count, _MIN_PROB):
            nodes = self._planner.submit_after(self.round, node)
            if nodes:
                foreseen.append((self.tree.path(node), nodes[: self.longest]))
        return foreseen

    def mark_submitted(self, tokens: Sequence[int]) -> None:
        """The target verifies these tokens now, which were foreseen; those that the tree has lost do not count."""
        if self.round.is_waiting:
            self.tree.submit(self.tree.find(tokens))

    def skip_round(self) -> None:
        """Let this round go without a draft: the deadline has passed, or nothing can be drafted."""
        if self.round.is_waiting:
            self.tree.submit(())

    def submit_ready(self) -> None:
        """The deadline has passed while the planner let the target wait: this round goes without a draft.

        Where tokens were drawn by chance, with what was drafted in time: how long a planner waits depends on what
        follows a token, and whether the token is tested must not.
        """
        if self.is_sampled and self.round.is_waiting:
            gamma = getattr(self._planner.settings, "gamma", MAX_WINDOW)
            self.tree.submit(self.tree.drafted_chain(self.tree.root, gamma)[: self.longest])
        self.skip_round()

    def rows(self) -> Sequence[Node]:
        """The nodes that the draft should run next, most valuable first."""
        self.count_rollback()
        return self._planner.rows_to_run(self.round)

    def add_distribution(self, node: Node, distribution: Distribution) -> None:
        """Take in the distribution after a node that was run. A node that was rolled back meanwhile does no harm."""
        self.tree.set_distribution(node, distribution)
        self.stats.rows += 1

    def count_rollback(self) -> None:
        """Count what verdicts have rolled back, and remember what was said.

        Done before drafting goes on, not before the target is answered.
        """
        self.stats.settle(self.tree.count_rollback())
        if not self._is_secluded:
            self.round.costs.history.add(self._answer, self.tokens[self.prompt_len + len(self._answer.tokens) :])

    def commit(
        self, tokens: Sequence[int], num_submitted: int | None = None, hint: AcceptanceHint | None = None
    ) -> list[int]:
        """End a round by content: the target committed these tokens after `num_submitted` had been sent.

        None: all that was proposed had been sent. An engine that drives itself may have gone on by several tokens
        without asking. `hint` is for the round that begins. Returns the tokens that are emitted: all of them, unless
        the sequence ends before.
        """
        if not tokens:
            raise ValueError("a verdict commits at least the target's own token")
        if self.is_finished:
            raise ValueError("the sequence is over; no more tokens can be committed")
        self.skip_round()
        if num_submitted is not None:
            self.tree.unsubmit(num_submitted)
        submitted = self.submitted
        verdict = Verdict.of(tokens, submitted)
        self._planner.learn(self.round, verdict)
        emitted, self.is_finished = self._ending.trim(tokens, len(self.tokens) - self.prompt_len)
        self.tokens += emitted
        self._begin_round(tokens, hint)
        self._count(verdict, len(submitted), len(emitted))
        return emitted

    def _use_calibration(self) -> None:
        costs, sampling = self.round.costs, self._sampling
        if sampling is None:
            self.tree.set_sampling(self._draw, costs.calibration)
        else:
            self.tree.set_sampling(rejection_picker(sampling, self.tokens, costs.sampled), costs.sampled)

    def _begin_round(self, committed: Sequence[int], hint: AcceptanceHint | None) -> None:
        tree, old = self.tree, self.round
        tree.update_calibration(committed)
        tree.commit(committed)
        is_hit = tree.root.distribution is not None
        self.round = Round(old.index + 1, tree, old.costs, old.ngrams, is_hit=is_hit, hint=hint)

    def _count(self, verdict: Verdict, num_submitted: int, num_emitted: int) -> None:
        stats = self.stats
        stats.rounds += 1
        stats.hits += self.round.is_hit
        stats.submitted += num_submitted
        stats.accepted += min(verdict.accepted, num_emitted)
        stats.emitted += num_emitted
