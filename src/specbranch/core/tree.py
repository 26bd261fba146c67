"""The draft tree of one sequence: grow it, submit a chain of it, commit a verdict, count what is rolled back.

The root is the last committed token. A node's distribution becomes known when the draft has run the node; only then can
tokens be drawn after it. Nodes are addressed by content: a verdict re-roots the tree by walking along its tokens, and
every branch below the new root survives with its distributions. The tree knows nothing of planners, engines or time.

Each node is created once and settled once, so all book-keeping is linear in the tokens drafted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from specbranch.core.calibration import Calibration, Grounds
from specbranch.core.distribution import Distribution
from specbranch.core.node import Node, TokenOutcome, TokenPicker

_MIN_PROB = 1e-30  # the last token of the top-k may have been rounded to 0, which has no logarithm
# Why drafted tokens are rolled back.
CAUSES = (TokenOutcome.REJECTED.value, TokenOutcome.UNUSED.value, TokenOutcome.CUT.value)


class Tree:
    """A tree of drafted tokens below the last committed one."""

    def __init__(self, tokens: Sequence[int], draw: TokenPicker, calibration: Calibration | None = None) -> None:
        if not tokens:
            raise ValueError("a draft tree needs at least one committed token to start from")
        self.set_sampling(draw, calibration or Calibration())
        self.root = Node(tokens[-1], None, len(tokens) - 1, 0)
        self.submitted: list[Node] | None = None  # None while the target waits for a submission
        self.num_drafted = 0
        self.num_alive = 0
        self._num_submissions = 0
        self._discarded: list[DiscardedBranches] = []  # by verdicts that `count_rollback` has not counted

    def set_sampling(self, draw: TokenPicker, calibration: Calibration) -> None:
        """Draw further tokens with `draw`, and estimate their probabilities with `calibration`."""
        self._draw = draw
        self.calibration = calibration

    @property
    def end(self) -> Node:
        """The node after which the target samples its own token if it accepts everything submitted."""
        return self.submitted[-1] if self.submitted else self.root

    def grow(self, node: Node, min_prob: float = 0.0) -> bool:
        """Draw one more child of a node; return False if it was not run, or if its top-k holds no further token.

        Return False, too, if the probability that its children leave for others is below `min_prob`.
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
        """Return the first `count` children of a node, drawing those that are missing; fewer if there are no more."""
        while len(node.children) < count and self.grow(node):
            pass
        return node.children[:count]

    def chain(self, start: Node, length: int, has_guesses: bool = True) -> list[Node]:
        """Return the first children below `start`, drawing those that are missing: at most `length` nodes in a row.

        If the chain is shorter, its last node (or `start`) is the one to run next. With `has_guesses` it may go on
        over guesses below nodes that were not run; otherwise it ends there.
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
        """Return the node to run so that the chain below `start` grows to `length` tokens; None if it is that long.

        Return None, too, if the distribution at its end has no token left to draw.
        """
        chain = self.chain(start, length)
        tip = chain[-1] if chain else start
        return tip if len(chain) < length and tip.distribution is None else None

    def find(self, tokens: Sequence[int]) -> list[Node]:
        """Return the drafted nodes along these tokens below the root, as far as there are any."""
        path: list[Node] = []
        node: Node | None = self.root
        for token in tokens:
            node = node.child_with(token) if node else None
            if node is None:
                break
            path.append(node)
        return path

    def distributions(self, tokens: Sequence[int]) -> list[Distribution | None]:
        """Return the draft's distribution before each of these tokens after the root; None where it is not known."""
        nodes = [self.root, *self.find(tokens)]
        found = [node.distribution for node in nodes[: len(tokens)]]
        return found + [None] * (len(tokens) - len(found))

    def path_prob(self, node: Node, start: Node | None = None) -> float:
        """Return how likely it is that the sequence reaches a node from `start`, a node above it, or from the root."""
        return math.exp(node.log_prob - (start or self.root).log_prob)

    def add_guess(self, parent: Node, token: int, grounds: Grounds) -> Node:
        """Add a guessed child below a node that was not run, and return it; its probability is learned by `grounds`.

        Only for verification by match (rule A), which takes any proposal.
        """
        child = parent.child_with(token)
        if child is None:
            child = self._add(parent, token, self.calibration.guess_accept_prob(grounds))
            child.guess_source = grounds
        return child

    def set_distribution(self, node: Node, distribution: Distribution) -> None:
        """Set the distribution after a node that was run, and rescore the guesses below it."""
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
        """Mark a chain that starts below the root as sent for verification."""
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
            # Nothing tests it: the target samples its own token here. So it is one guess of that among others.
            drawn.sampled_from = None
            self._rescore_children(parent)

    def unsubmit(self, length: int) -> None:
        """Withdraw all but the first `length` submitted tokens, because they were not sent."""
        if self.submitted is not None:
            for node in self.submitted[length:]:
                node.is_submitted = False
            del self.submitted[length:]

    def commit(self, tokens: Sequence[int]) -> None:
        """Re-root at the end of `tokens`, keep every branch below it, and calibrate by the tokens on the way.

        The branches that are lost stay for `count_rollback`.
        """
        if not tokens:
            raise ValueError("a verdict commits at least the target's own token")
        old = node = self.root
        num_used = 0
        for token in tokens:
            _calibrate(self.calibration, node, token)
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
        """Settle the outcome of every token that verdicts have discarded, and return the counts.

        Apart from `commit`, because an answer to the target must not wait for it: the answer takes time for each token
        of the verdict, settling takes time for each node that is lost.
        """
        total = RollbackCounts()
        for discarded in self._discarded:
            total.add(discarded.count_rollback())
        self._discarded.clear()
        self.num_alive -= total.used + total.rolled_back
        return total

    def _rescore_children(self, node: Node) -> None:
        """Update the probabilities of the children of a node that was run, and sort them: a sampled one first."""
        distribution, drawn = node.distribution, _sampled_child(node)
        assert distribution is not None, "a node that was run"
        for child in node.children:
            if child.token in distribution.ids:
                prob = self._accept_prob(distribution, child.token, drawn)
                _shift_log_prob(child, node.log_prob + math.log(max(prob, _MIN_PROB)) - child.log_prob)
        node.children.sort(key=lambda child: (child is not drawn, -child.log_prob))

    def _accept_prob(self, distribution: Distribution, token: int, first: Node | None) -> float:
        """Return how likely a token is right after a node with this distribution and this first child."""
        if first is None or first.sampled_from is None:
            return self.calibration.accept_prob(distribution, token)
        if token == first.token:
            return self.calibration.sampled_accept_prob(first.sampled_from)
        return self.calibration.alternative_accept_prob(distribution, token, first.token, first.sampled_from)

    def _draw_first(self, node: Node) -> bool:
        """Draw the child of a node that is submitted after it, which may be a guess already; return False if none is.

        After the last submitted token the target samples freely, so the likeliest token comes first there. The same
        holds if a child was submitted already: it must not be labelled as sampled afterwards.
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
    """Find the child that was sampled from a distribution; None if none was."""
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


def _calibrate(calibration: Calibration, node: Node, token: int) -> None:
    """Let the calibration learn which distribution, sampled token or guess after `node` foresaw the target's token."""
    if node.distribution is not None:
        calibration.observe(node.distribution, token)
        drawn = _sampled_child(node)
        if drawn is not None and drawn.sampled_from is not None and drawn.is_submitted:
            calibration.observe_drawn(node.distribution, token, drawn.token, drawn.sampled_from)
    for child in node.children:
        if child.guess_source is not None:
            calibration.observe_guess(child.guess_source, child.token == token)


@dataclass(slots=True, kw_only=True)
class RollbackCounts:
    """Outcomes of drafted tokens."""

    used: int = 0  # drafted tokens that a verdict committed
    rejected: int = 0  # rolled back: submitted and refused
    unused: int = 0  # rolled back: prepared for another outcome
    cut: int = 0  # rolled back: drafted, then not submitted
    losing: int = 0  # of the rolled back: on branches that were not the draft's first choice

    @property
    def rolled_back(self) -> int:
        """Drafted tokens that a verdict made useless, whatever the cause."""
        return self.rejected + self.unused + self.cut

    def add(self, other: RollbackCounts) -> None:
        """Add the counters of `other` to those of the same names."""
        for one in fields(other):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(frozen=True, slots=True)
class DiscardedBranches:
    """The branches that one verdict discarded: all nodes below `old` that are not below `root`."""

    old: Node
    root: Node
    end: Node | None  # of the submission
    num_used: int
    num_submissions: int

    def count_rollback(self) -> RollbackCounts:
        """Set the outcome of every discarded node, unlink its children, and return the counts."""
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
