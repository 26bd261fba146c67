"""The draft tree of one sequence: grow it, submit a chain of it, commit a verdict, count the rolled-back tokens.

The root is the last committed token. Tokens are drawn after a node once its distribution is known, which the draft
model computes when it runs the node. Nodes are found by their tokens: those of a verdict lead to the new root, and
every branch below it survives with its distributions. The tree knows nothing of planners, engines or time.

Each node is created once and its outcome is set once, so the work in total is linear in the number of drafted tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.calibration import Calibration, Grounds, GuessTrust
from specbranch.core.distribution import Distribution
from specbranch.core.node import Node, TokenOutcome, TokenPicker

_MIN_PROB = 1e-30  # the last token of the top-k may have been rounded to 0, which has no logarithm
# Why drafted tokens are rolled back.
CAUSES = (TokenOutcome.REJECTED.value, TokenOutcome.UNUSED.value, TokenOutcome.CUT.value)


class Tree:
    """The drafted tokens that may follow the last committed token, which is the root of the tree."""

    def __init__(self, tokens: Sequence[int], draw: TokenPicker, calibration: Calibration | None = None) -> None:
        if not tokens:
            raise ValueError("a draft tree needs at least one committed token to start from")
        self.trust = GuessTrust()
        self.set_sampling(draw, calibration or Calibration())
        self.root = Node(tokens[-1], None, len(tokens) - 1, 0)
        self.submitted: list[Node] | None = None  # None while the target waits for a submission
        self.num_drafted = 0
        self.num_alive = 0
        self._num_submissions = 0
        self._discarded: list[DiscardedBranches] = []  # one for each verdict not counted yet

    def set_sampling(self, draw: TokenPicker, calibration: Calibration) -> None:
        """Set how tokens are drawn from now on (`draw`), and how their acceptance is estimated (`calibration`)."""
        self._draw = draw
        self.calibration = calibration

    @property
    def end(self) -> Node:
        """The last submitted node, or the root if no node is submitted.

        A target that accepts all submitted tokens adds its own token after this node.
        """
        return self.submitted[-1] if self.submitted else self.root

    def grow(self, node: Node, min_prob: float = 0.0) -> bool:
        """Draw one more child of a node, and return whether one was drawn.

        No child is drawn in three cases: the draft model has not computed the distribution after the node; all tokens
        of its top-k are drawn; or all tokens not drawn yet have a total probability below `min_prob`.
        """
        distribution, children = node.distribution, node.children
        if distribution is None:
            return False
        if min_prob and 1.0 - sum(math.exp(child.log_prob - node.log_prob) for child in children) < min_prob:
            return False
        if not children:
            return self._draw_first(node)
        token = self._draw.further(distribution, [child.token for child in children])
        if token is None:
            return False
        self._add(node, token, self._accept_prob(distribution, token, children[0]))
        return True

    def children(self, node: Node, count: int) -> list[Node]:
        """Return the first `count` children of a node, and draw them if needed; fewer if no more can be drawn."""
        while len(node.children) < count and self.grow(node):
            pass
        return node.children[:count]

    def chain(self, start: Node, length: int, has_guesses: bool = True) -> list[Node]:
        """Return the chain of first children below `start`, at most `length` nodes, and draw them if needed.

        If the chain is shorter, it can grow only once the distribution after its last node (or `start`) is computed.
        With `has_guesses` the chain includes guessed nodes below a node without a distribution; otherwise it ends at
        such a node.
        """
        chain: list[Node] = []
        node = start
        while (
            len(chain) < length
            and (has_guesses or node.distribution is not None)
            and (node.children or self.grow(node))
        ):
            node = node.children[0]
            chain.append(node)
        return chain

    def next_unrun(self, start: Node, length: int) -> Node | None:
        """Return the node whose distribution is needed next for the chain below `start` to grow to `length` tokens.

        Return None if the chain has `length` tokens already, or if the distribution at its end has no token to draw.
        """
        chain = self.chain(start, length)
        tip = chain[-1] if chain else start
        return tip if len(chain) < length and tip.distribution is None else None

    def find(self, tokens: Sequence[int]) -> list[Node]:
        """Return the nodes that hold these tokens below the root, up to the first token that was not drafted."""
        path: list[Node] = []
        node: Node | None = self.root
        for token in tokens:
            node = node.child_with(token) if node else None
            if node is None:
                break
            path.append(node)
        return path

    def distributions(self, tokens: Sequence[int]) -> list[Distribution | None]:
        """Return the draft's distribution at the position of each of `tokens`, which follow the root.

        An entry is None if that distribution was not computed, or if the tokens before it were not drafted.
        """
        nodes = [self.root, *self.find(tokens)]
        found = [node.distribution for node in nodes[: len(tokens)]]
        return found + [None] * (len(tokens) - len(found))

    def path_prob(self, node: Node, start: Node | None = None) -> float:
        """Return the probability that the target emits the tokens below `start` (None: the root) down to `node`."""
        return math.exp(node.log_prob - (start or self.root).log_prob)

    def add_guess(self, parent: Node, token: int, grounds: Grounds) -> Node:
        """Add a guessed token below `parent`, a node without a distribution, and return the new or existing child.

        `grounds` is what it rests on, by which its probability is learned. A guess is not sampled from a distribution:
        the target must verify such tokens by exact match, which is exact for any proposed token.
        """
        child = parent.child_with(token)
        if child is None:
            child = self._add(parent, token, self.trust.accept_prob(grounds, self.calibration))
            child.guess_source = grounds
        return child

    def set_distribution(self, node: Node, distribution: Distribution) -> None:
        """Store the distribution that the draft model computed for the token after a node.

        If the node already has guessed children, also draw the child to submit, and set the guesses' probabilities.
        """
        node.distribution = distribution
        if not node.children:
            return
        left = 1 - self.calibration.top1_accept_prob(distribution)
        for child in node.children:
            if child.token not in distribution.ids:
                _shift_log_prob(child, math.log(max(left, _MIN_PROB)))
        self._draw_first(node)
        self._rescore_children(node)

    def submit(self, nodes: Sequence[Node]) -> None:
        """Mark a chain that starts below the root as sent for verification; raise `ValueError` if it is not a chain."""
        parent = self.root
        for node in nodes:
            if node.parent is not parent:
                raise ValueError(f"{node!r} does not continue the submitted chain")
            node.is_submitted = True
            parent = node
        self.submitted = list(nodes)
        self._num_submissions += 1
        drawn = _sampled_child(parent)
        if drawn is not None:
            # The target does not test this child: it samples its own token here, and the child only guesses that token.
            drawn.sampled_from = None
            self._rescore_children(parent)

    def unsubmit(self, length: int) -> None:
        """Withdraw all but the first `length` submitted tokens, because they were not sent."""
        if self.submitted is not None:
            for node in self.submitted[length:]:
                node.is_submitted = False
            del self.submitted[length:]

    def commit(self, tokens: Sequence[int]) -> None:
        """Make the last of `tokens` the root, keep all branches below it, and let the calibration learn from `tokens`.

        All other branches are discarded; they stay in memory until `count_rollback` has counted them.
        """
        if not tokens:
            raise ValueError("a verdict commits at least the target's own token")
        old = node = self.root
        num_used = 0
        for token in tokens:
            _calibrate(self.calibration, self.trust, node, token)
            child = node.child_with(token)
            if child is None:
                break
            child.outcome = TokenOutcome.USED
            node.has_committed_child = True
            node = child
            num_used += 1
        if num_used < len(tokens):
            node = Node(tokens[-1], None, old.position + len(tokens), self._num_submissions)
        end = self.end if self.submitted is not None else None
        self._discarded.append(DiscardedBranches(old, node, end, num_used, self._num_submissions))
        node.parent = None
        self.root = node
        self.submitted = None

    def count_rollback(self) -> RollbackCounts:
        """Set the outcome of every token that verdicts discarded since the last call, and return the counts.

        It is separate from `commit` because the target waits for `commit`, which takes time for each token of the
        verdict; counting takes time for each discarded node.
        """
        total = RollbackCounts()
        for discarded in self._discarded:
            total.add(discarded.count_rollback())
        self._discarded.clear()
        self.num_alive -= total.used + total.rolled_back
        return total

    def _rescore_children(self, node: Node) -> None:
        """Update the probabilities of a node's children, and sort these: a sampled child first, then the likeliest."""
        distribution, drawn = node.distribution, _sampled_child(node)
        assert distribution is not None, "a node that was run"
        for child in node.children:
            if child.token in distribution.ids:
                prob = self._accept_prob(distribution, child.token, drawn)
                _shift_log_prob(child, node.log_prob + math.log(max(prob, _MIN_PROB)) - child.log_prob)
        node.children.sort(key=lambda child: (child is not drawn, -child.log_prob))

    def _accept_prob(self, distribution: Distribution, token: int, first: Node | None) -> float:
        """Return the acceptance probability of a token after a node with this distribution.

        `first` is the child that the target tests first, if any. If that child was sampled, another token can only be
        emitted after the target has rejected it.
        """
        if first is None or first.sampled_from is None:
            return self.calibration.accept_prob(distribution, token)
        if token == first.token:
            return self.calibration.sampled_accept_prob(first.sampled_from)
        return self.calibration.alternative_accept_prob(distribution, token, first.token, first.sampled_from)

    def _draw_first(self, node: Node) -> bool:
        """Draw the child to submit after a node, perhaps a child guessed before; return False if the top-k is empty.

        The likeliest token is drawn instead of a sampled one in two cases: after the last submitted token, where the
        target samples its own token, and if a child was submitted already, which must not be marked as sampled later.
        """
        is_decided = any(child.is_submitted for child in node.children)
        is_tested = not is_decided and (self.submitted is None or node is not self.end)
        distribution = node.distribution
        assert distribution is not None, "a node that was run"
        first = self._draw.first(node, is_tested)
        if first is None:
            return False
        token, q = first
        child = node.child_with(token) if node.children else None
        if child is None:
            prob = (
                self.calibration.accept_prob(distribution, token)
                if q is None
                else self.calibration.sampled_accept_prob(q)
            )
            child = self._add(node, token, prob)
        child.sampled_from = q
        return True

    def _add(self, node: Node, token: int, prob: float) -> Node:
        child = Node(token, node, node.position + 1, self._num_submissions)
        child.log_prob = node.log_prob + math.log(max(prob, _MIN_PROB))
        node.children.append(child)
        self.num_drafted += 1
        self.num_alive += 1
        return child


def _sampled_child(node: Node) -> Node | None:
    """Return the child whose token was sampled from a distribution; None if there is no such child."""
    for child in node.children:
        if child.sampled_from is not None:
            return child
    return None


def _shift_log_prob(node: Node, change: float) -> None:
    """Add `change` to the log probability of a node and of all nodes below it."""
    stack = [node]
    while stack:
        one = stack.pop()
        one.log_prob += change
        stack += one.children


def _calibrate(calibration: Calibration, trust: GuessTrust, node: Node, token: int) -> None:
    """Let the calibration learn how well distribution, sampled token and guesses after `node` predicted `token`."""
    if node.distribution is not None:
        calibration.observe(node.distribution, token)
        drawn = _sampled_child(node)
        if drawn is not None and drawn.sampled_from is not None and drawn.is_submitted:
            calibration.observe_drawn(node.distribution, token, drawn.token, drawn.sampled_from)
    for child in node.children:
        if child.guess_source is not None:
            is_right = child.token == token
            trust.observe(child.guess_source, is_right, calibration.guess_accept_prob(child.guess_source))
            calibration.observe_guess(child.guess_source, is_right)


@dataclass(slots=True, kw_only=True)
class RollbackCounts:
    """How many drafted tokens were committed, and how many were rolled back, by cause."""

    used: int = 0  # drafted tokens that a verdict committed
    rejected: int = 0  # rolled back: submitted and refused
    unused: int = 0  # rolled back: prepared for another verdict
    cut: int = 0  # rolled back: drafted, then not submitted
    losing: int = 0  # of the rolled back: on branches that were not the draft's first choice

    @property
    def rolled_back(self) -> int:
        """Number of drafted tokens that verdicts rolled back, for any cause."""
        return self.rejected + self.unused + self.cut

    @property
    def rollback_rate(self) -> float:
        """The share of drafted tokens that were rolled back, as papers count it: branches that lost do not count."""
        lost = self.rolled_back - self.losing
        return lost / (lost + self.used) if lost + self.used else 0.0

    @property
    def rollback_rate_with_losing(self) -> float:
        """The share of all drafted tokens that were rolled back."""
        return self.rolled_back / (self.rolled_back + self.used) if self.rolled_back + self.used else 0.0

    def add(self, other: RollbackCounts) -> None:
        """Add the counters of `other` to those of the same names."""
        for name in other.__dataclass_fields__:  # `fields` would take most of the time
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class DiscardedBranches:
    """The branches that one verdict discarded: the nodes below `old` except those above or below the new `root`."""

    old: Node
    root: Node
    end: Node | None  # last submitted node, `old` if none; None if the target was waiting
    num_used: int  # drafted tokens that the verdict committed
    num_submissions: int  # of the tree, that of this verdict included

    def count_rollback(self) -> RollbackCounts:
        """Set the outcome of every discarded node, remove its links to children, and return the counts."""
        outcomes: Counter[str] = Counter()
        num_losing = 0
        stack = [(self.old, False, False)]
        while stack:
            node, is_after_end, is_losing = stack.pop()
            if node is self.root:
                continue
            if node.outcome is None and node is not self.old:
                if node.is_submitted:
                    node.outcome = TokenOutcome.REJECTED
                elif is_after_end and node.submission_index < self.num_submissions:
                    node.outcome = TokenOutcome.CUT
                else:
                    node.outcome = TokenOutcome.UNUSED
                outcomes[node.outcome.value] += 1
                num_losing += is_losing
            if node.children:
                is_after_end = is_after_end or node is self.end
                first, *others = node.children
                stack.append((first, is_after_end, is_losing))
                stack += [(child, is_after_end, True) for child in others]
                # Only upward links stay, so settled nodes are freed without a search for cycles.
                node.children = []
        return RollbackCounts(used=self.num_used, losing=num_losing, **outcomes)
