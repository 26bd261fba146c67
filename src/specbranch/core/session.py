"""One sequence being decoded: its tokens, its draft tree, its planner and its counters.

The simulator, the in-process loop and the draft service all drive this object; it has no clock and does no I/O.
A round is: `propose` (until it returns tokens), `rows` and `add_distribution` as often as there is time, `commit`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution, RequestSampling
from specbranch.core.ngram import NgramDrafter
from specbranch.core.node import Node, TokenPicker, rejection_picker
from specbranch.core.planner import Planner
from specbranch.core.round import MAX_WINDOW, AcceptanceHint, Round, Stats, Verdict
from specbranch.core.tree import Tree

_MIN_PROB = 0.01  # lowest probability of a verdict for which a draft is prefetched


@dataclass(frozen=True, slots=True)
class StopCondition:
    """When a sequence ends: after `max_new_tokens`, or at one of the tokens `eos_ids`."""

    max_new_tokens: int | None = None
    eos_ids: frozenset[int] = field(default_factory=frozenset)

    def trim(self, tokens: Sequence[int], num_emitted: int) -> tuple[list[int], bool]:
        """Return the part of `tokens` to emit after `num_emitted` earlier tokens, and whether the sequence ends."""
        room = len(tokens) if self.max_new_tokens is None else self.max_new_tokens - num_emitted
        for index, token in enumerate(tokens[:room]):
            if token in self.eos_ids:
                return list(tokens[: index + 1]), True
        return list(tokens[:room]), self.max_new_tokens is not None and room <= len(tokens)


class Session:
    """One sequence being decoded, with its draft tree, planner and counters; `tokens` holds verified tokens only.

    `draw` chooses draft tokens unless `set_sampling` replaces it; `costs` has what was learned about the pair of
    models: step times, acceptance probabilities and past answers.
    """

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
        self.max_draft_tokens: int | None = None  # the request's limit for one submission; None: no limit
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
        """The draft tree below the last committed token."""
        return self.round.tree

    @property
    def submitted(self) -> list[int]:
        """The draft tokens under verification; empty if nothing is submitted."""
        return [node.token for node in self.round.tree.submitted or ()]

    @property
    def output(self) -> list[int]:
        """The tokens emitted so far."""
        return self.tokens[self.prompt_len :]

    @property
    def sampled_from(self) -> list[Distribution | None]:
        """For each token under verification the distribution that it was sampled from; None if it was not sampled."""
        return [node.sampled_from for node in self.round.tree.submitted or ()]

    @property
    def waits_for_prefill(self) -> bool:
        """Whether a target that waits for a draft also waits while the draft model prefills the sequence."""
        return self._planner.waits_for_prefill

    @property
    def is_sampled(self) -> bool:
        """Whether draft tokens are sampled, and so verified by rejection sampling."""
        return self._sampling is not None

    def set_sampling(self, sampling: RequestSampling | None) -> None:
        """Sample further draft tokens with the request's sampling parameters, for verification by rejection sampling.

        With None, propose the likeliest tokens, for verification by exact match.
        """
        if sampling != self._sampling:
            self._sampling = sampling
            self._use_calibration()

    def seclude(self) -> None:
        """Add no more tokens of this sequence to the history, and let its verdicts update only its own calibration.

        So its tokens and verdicts no longer change the drafts of other sequences. This is for a request whose random
        numbers may recur, such as one with a seed: a draft must not depend on the numbers that will test it. The
        sequence still uses the history, and its calibration starts as a copy of the shared one.
        """
        if not self._is_secluded:
            self._is_secluded = True
            self.round.costs = self.round.costs.copy_for_one()
            self._use_calibration()

    def propose(self) -> list[int] | None:
        """Submit the chain that the planner chooses, and return its tokens; None if the planner waits for more drafts.

        A second call in the same round returns the same tokens.
        """
        tree = self.round.tree
        if tree.submitted is None:
            nodes = self._planner.submit(self.round)
            if nodes is None:
                return None
            tree.submit(nodes[: self.max_draft_tokens])
        return self.submitted

    def drafts_by_verdict(self, count: int) -> list[tuple[list[int], Sequence[Node]]]:
        """Return, for each likely next verdict, the tokens that it commits and the chain to submit after it.

        These are at most the `count` likeliest verdicts. A verdict is left out if the planner cannot choose the chain
        before the verdict comes, or would submit no token.
        """
        drafts: list[tuple[list[int], Sequence[Node]]] = []
        for node in likely_verdicts(self.round.tree, count, _MIN_PROB):
            nodes = self._planner.submit_after(self.round, node)
            if nodes:
                drafts.append((node.path(), nodes[: self.max_draft_tokens]))
        return drafts

    def mark_submitted(self, tokens: Sequence[int]) -> None:
        """Mark the nodes of prefetched tokens as submitted, up to the first token that is not in the draft tree.

        Do nothing if this round has a submission already.
        """
        if self.round.is_waiting:
            self.round.tree.submit(self.round.tree.find(tokens))

    def skip_round(self) -> None:
        """Submit an empty chain, unless this round has a submission already."""
        if self.round.is_waiting:
            self.round.tree.submit(())

    def submit_ready(self) -> None:
        """Submit at the deadline, even if the planner would let the target wait, unless this round has a submission.

        The chain is that of the planner's `submit_after`. If the planner has none, it is empty for exact match, and for
        rejection sampling the drafted chain, up to the planner's `gamma`: how long a planner waits depends on the
        tokens that follow a token, and whether a token is tested must not depend on these.
        """
        tree = self.round.tree
        if self.round.is_waiting:
            nodes = self._planner.submit_after(self.round, tree.root)
            if nodes is None and self.is_sampled:
                gamma = getattr(self._planner.settings, "gamma", MAX_WINDOW)
                nodes = tree.chain(tree.root, gamma, has_guesses=False)
            if nodes is not None:
                tree.submit(nodes[: self.max_draft_tokens])
        self.skip_round()

    def rows(self) -> Sequence[Node]:
        """Count rolled-back tokens, and return the nodes whose distributions to compute next, most valuable first."""
        self.count_rollback()
        return self._planner.rows_to_run(self.round)

    def add_distribution(self, node: Node, distribution: Distribution) -> None:
        """Store the distribution computed for the token after `node`, even if it was rolled back; count one row."""
        self.round.tree.set_distribution(node, distribution)
        self.stats.rows += 1

    def count_rollback(self) -> None:
        """Count the tokens that verdicts rolled back, and add the new tokens of the answer to the history.

        Call it before drafting goes on, but not while the target waits for a reply.
        """
        self.stats.add(self.round.tree.count_rollback())
        if not self._is_secluded:
            self.round.costs.history.add(self._answer, self.tokens[self.prompt_len + len(self._answer.tokens) :])

    def commit(
        self, tokens: Sequence[int], num_submitted: int | None = None, hint: AcceptanceHint | None = None
    ) -> list[int]:
        """End a round: commit the target's tokens, begin the next round with `hint`, and return the emitted tokens.

        `num_submitted` is how many of the proposed tokens were really sent to the target; None means all. `tokens` may
        come from several steps of the target, if it did not ask for a draft in between. All are emitted, except any
        after the end of the sequence.
        """
        if not tokens:
            raise ValueError("a verdict commits at least the target's own token")
        if self.is_finished:
            raise ValueError("the sequence is over; no more tokens can be committed")
        self.skip_round()
        old, tree = self.round, self.round.tree
        if num_submitted is not None:
            tree.unsubmit(num_submitted)
        submitted = self.submitted
        verdict = Verdict.of(tokens, submitted)
        self._planner.learn(old, verdict)
        emitted, self.is_finished = self._ending.trim(tokens, len(self.tokens) - self.prompt_len)
        self.tokens += emitted
        tree.commit(tokens)
        is_hit = tree.root.distribution is not None
        self.round = Round(old.index + 1, tree, old.costs, old.ngrams, is_hit=is_hit, hint=hint)
        self._count(verdict, len(submitted), len(emitted))
        return emitted

    def _use_calibration(self) -> None:
        costs, sampling = self.round.costs, self._sampling
        if sampling is None:
            self.tree.set_sampling(self._draw, costs.calibration)
        else:
            self.tree.set_sampling(rejection_picker(sampling, self.tokens, costs.sampled), costs.sampled)

    def _count(self, verdict: Verdict, num_submitted: int, num_emitted: int) -> None:
        stats = self.stats
        stats.rounds += 1
        stats.hits += self.round.is_hit
        stats.submitted += num_submitted
        stats.accepted += min(verdict.accepted, num_emitted)
        stats.emitted += num_emitted


def likely_verdicts(tree: Tree, count: int, min_prob: float) -> list[Node]:
    """Return the nodes that may be the last token of the next verdict, likeliest first, and draw them if needed.

    A verdict accepts some of the submitted tokens and adds a token of the target's own. At most `count` nodes, none
    with a probability below `min_prob`; the list is empty while nothing is submitted.
    """
    if tree.submitted is None:
        return []
    found: list[Node] = []
    for parent, accepted in zip([tree.root, *tree.submitted], [*tree.submitted, None], strict=True):
        min_prob_here = min_prob * math.exp(tree.root.log_prob - parent.log_prob)
        rank = 0
        while rank < len(parent.children) or tree.grow(parent, min_prob_here):
            child = parent.children[rank]
            if child.log_prob - parent.log_prob < math.log(min_prob_here):
                break
            if child is not accepted:
                found.append(child)
            rank += 1
    return sorted(found, key=attrgetter("log_prob"), reverse=True)[:count]
