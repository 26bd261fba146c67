"""The draft tree of one sequence: grow it, submit a chain of it, commit a verdict, count what is rolled back.

The root is the last committed token. A node's distribution becomes known when the draft has run the node; only then can
tokens be drawn after it. Nodes are addressed by content, so a verdict re-roots the tree by walking along its tokens,
and every branch below the new root survives with its distributions. The tree knows nothing of planners, engines or
time.

Each node is created once and settled once, so all book-keeping is linear in the tokens drafted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbranch.core.calibration import Calibration, Grounds
from specbranch.core.distribution import Distribution
from specbranch.core.node import Node, TokenOutcome, TokenPicker

_LEAST = 1e-30  # the last of top-k may have been rounded to nothing
# Why drafted tokens are rolled back.
CAUSES = (TokenOutcome.REJECTED.value, TokenOutcome.UNUSED.value, TokenOutcome.CUT.value)


class Tree:
    """A tree of drafted tokens below the last committed one."""

    def __init__(self, tokens: Sequence[int], draw: TokenPicker, calibration: Calibration | None = None) -> None:
        if not tokens:
            raise ValueError("a draft tree needs at least one committed token to start from")
        self.set_sampling(draw, calibration or Calibration())
        self.root = Node(tokens[-1], None, len(tokens) - 1, 0)
        self.submitted: list[Node] | None = None
        self.num_drafted = 0
        self.num_alive = 0
        self._submissions = 0
        self._unsettled: list[DiscardedBranches] = []

    def set_sampling(self, draw: TokenPicker, calibration: Calibration) -> None:
        """Draw further tokens this way from now on, and judge them by this."""
        self._draw = draw
        self.calibration = calibration

    @property
    def end(self) -> Node:
        """The node that the next verdict's own token follows if everything submitted is accepted."""
        return self.submitted[-1] if self.submitted else self.root

    def children(self, node: Node, count: int) -> list[Node]:
        """The first `count` children of a node that was run, drawn as needed; fewer if its top-k holds no more."""
        while len(node.children) < count and self._grow(node):
            pass
        return node.children[:count]

    def chain(self, start: Node, length: int) -> list[Node]:
        """The principal chain below `start`, first children all the way, drawn as far as distributions are known.

        At most `length` nodes. If it is shorter, its last node (or `start`) is the one to run next.
        """
        chain: list[Node] = []
        node = start
        while len(chain) < length and (node.children or self._grow(node)):
            node = node.children[0]
            chain.append(node)
        return chain

    def drafted_chain(self, start: Node, length: int) -> list[Node]:
        """The principal chain below `start` as far as the draft itself proposes it: behind nodes that were run."""
        chain: list[Node] = []
        node = start
        while len(chain) < length and node.distribution is not None and (node.children or self._grow(node)):
            node = node.children[0]
            chain.append(node)
        return chain

    def next_unrun(self, start: Node, length: int) -> Node | None:
        """The node to run so that the chain below `start` grows to `length` tokens; None if it is that long already.

        None also where the distribution has no token left to draw.
        """
        chain = self.chain(start, length)
        tip = chain[-1] if chain else start
        return tip if len(chain) < length and tip.distribution is None else None

    def frontier(
        self,
        start: Node,
        depth: int,
        count: int,
        least: float,
        share: float = 0.0,
        guess: Callable[[Node, float], object] | None = None,
    ) -> list[tuple[Node, float]]:
        """The likeliest nodes at or below `start` that were not run yet, each with its chance seen from there.

        A node comes before its children, which were planted: they can run in the same step. At most `count`, none
        deeper than `depth` tokens, with a chance below `least`, or below that `share` of the likeliest one's. No child
        is drawn that could not have the least chance. `guess` may plant children below a node that is found, none less
        likely than it is told.
        """
        found: list[tuple[Node, float]] = []
        heap = [(0.0, 0, start)]
        num_seen = 1
        while heap and len(found) < count:
            weight, _, node = heapq.heappop(heap)
            nexts = []
            if node.distribution is None:
                chance = math.exp(-weight)
                if chance < least:
                    break
                if not found:
                    least = max(least, chance * share)
                found.append((node, chance))
                if guess is not None and not node.children:
                    guess(node, least)
            if node.position < start.position + depth:
                nexts.append((node, 1))  # of a node that was not run: a child that was planted
            if node is not start and node.parent is not None:
                nexts.append((node.parent, node.parent.children.index(node) + 2))
            for parent, rank in nexts:
                child = self._child_at(parent, rank, least * math.exp(start.log_prob - parent.log_prob))
                if child is not None:
                    heapq.heappush(heap, (start.log_prob - child.log_prob, num_seen, child))
                    num_seen += 1
        return found

    def likely_verdicts(self, count: int, least: float) -> list[Node]:
        """Where the sequence may be after the verdict on what was submitted, the likeliest first: at most `count`.

        A verdict accepts some of the submission and adds a token of its own. None is named with a chance below `least`.
        """
        found: list[Node] = []
        submitted = self.submitted or []
        for parent, accepted in zip([self.root, *submitted], [*submitted, None], strict=True):
            lowest = least * math.exp(self.root.log_prob - parent.log_prob)
            rank = 1
            while (child := self._child_at(parent, rank, lowest)) is not None:
                found += [child] if child is not accepted else []
                rank += 1
        return sorted(found, key=lambda node: -node.log_prob)[:count]

    def find(self, tokens: Sequence[int]) -> list[Node]:
        """The drafted nodes along these tokens below the root, as far as there are any."""
        path: list[Node] = []
        node: Node | None = self.root
        for token in tokens:
            node = node.child_with(token) if node else None
            if node is None:
                break
            path.append(node)
        return path

    def _child_at(self, node: Node, rank: int, least: float) -> Node | None:
        """A node's child of that rank, from 1; drawn only if the rest can give it the least chance."""
        if len(node.children) < rank:
            left = 1.0 - sum(math.exp(child.log_prob - node.log_prob) for child in node.children)
            if left < least:
                return None
        children = self.children(node, rank)
        if len(children) < rank or children[-1].log_prob - node.log_prob < math.log(least):
            return None
        return children[-1]

    def add_guess(self, parent: Node, token: int, grounds: Grounds) -> Node:
        """A child that is guessed, below a node that was not run; how likely it is right was learned by its grounds.

        Only for verification by match (rule A), which takes any proposal.
        """
        child = parent.child_with(token)
        if child is None:
            child = self._add(parent, token, self.calibration.guess_accept_prob(grounds))
            child.guess_source = grounds
        return child

    def set_distribution(self, node: Node, distribution: Distribution) -> None:
        """Take in a node's distribution. Children that were planted before get their chances and their ranks by it."""
        node.distribution = distribution
        if not node.children:
            return
        left = 1 - self.calibration.top1_accept_prob(distribution)
        for child in node.children:
            if child.token not in distribution.ids:
                self._shift_log_prob(child, math.log(max(left, _LEAST)))
        self._draw_first(node)
        self._rescore_children(node)

    def _rescore_children(self, node: Node) -> None:
        """Give the children of a node that was run their chances: the one to submit first, then the likeliest."""
        distribution, drawn = node.distribution, _drawn_child(node)
        assert distribution is not None, "a node that was run"
        for child in node.children:
            if child.token in distribution.ids:
                chance = self._chance(distribution, child.token, drawn)
                self._shift_log_prob(child, node.log_prob + math.log(max(chance, _LEAST)) - child.log_prob)
        node.children.sort(key=lambda child: (child is not drawn, -child.log_prob))

    def _chance(self, distribution: Distribution, token: int, drawn: Node | None) -> float:
        """How likely a token is right behind a node with this distribution, of which one child may have been drawn."""
        if drawn is None or drawn.sampled_from is None:
            return self.calibration.accept_prob(distribution, token)
        if token == drawn.token:
            return self.calibration.sampled_accept_prob(drawn.sampled_from)
        return self.calibration.alternative_accept_prob(distribution, token, drawn.token, drawn.sampled_from)

    def submit(self, nodes: Sequence[Node]) -> None:
        """Mark a chain that starts below the root as sent for verification."""
        parent = self.root
        for node in nodes:
            if node.parent is not parent:
                raise ValueError(f"{node!r} does not continue the submitted chain")
            node.is_submitted = True
            parent = node
        self.submitted = list(nodes)
        self._submissions += 1
        drawn = _drawn_child(self.end)
        if drawn is not None:
            # It is not tested: the target will say its own token here. So it is one guess of that among others.
            drawn.sampled_from = None
            self._rescore_children(self.end)

    def unsubmit(self, length: int) -> None:
        """Take back what was not sent after all: only the first `length` submitted tokens are under verification."""
        if self.submitted is not None:
            for node in self.submitted[length:]:
                node.is_submitted = False
            del self.submitted[length:]

    def path_prob(self, node: Node, start: Node | None = None) -> float:
        """How likely it is that the sequence goes on to this node, seen from the root or from a node on the way."""
        return math.exp(node.log_prob - (start or self.root).log_prob)

    def path(self, node: Node) -> list[int]:
        """The tokens from the root, which does not count, to a node below it."""
        return node.path()

    def commit(self, tokens: Sequence[int]) -> None:
        """Re-root at the end of `tokens` and keep every branch below it. What is lost is left for `count_rollback`."""
        if not tokens:
            raise ValueError("a verdict commits at least the target's own token")
        old = self.root
        path = self._walk_used(tokens)
        is_drafted = len(path) == len(tokens)
        root = path[-1] if is_drafted else Node(tokens[-1], None, old.position + len(tokens), self._submissions)
        end = self.end if self.submitted is not None else None
        self._unsettled.append(DiscardedBranches(old, root, end, len(path), self._submissions))
        root.parent = None
        self.root = root
        self.submitted = None

    def count_rollback(self) -> RollbackCounts:
        """Give every token that verdicts have left behind its fate, and count them.

        Apart from `commit`, because an answer to the target must not wait for it: the answer costs the length of the
        verdict, settling costs the size of what is lost.
        """
        total = RollbackCounts()
        for left in self._unsettled:
            total.add(left.count_rollback())
        self._unsettled.clear()
        self.num_alive -= total.used + total.rolled_back
        return total

    def update_calibration(self, tokens: Sequence[int]) -> None:
        """Let the calibration see where distributions and guesses were right, before these tokens are committed."""
        node: Node | None = self.root
        for token in tokens:
            if node is None:
                return
            if node.distribution is not None:
                self.calibration.observe(node.distribution, token)
                drawn = _drawn_child(node)
                if drawn is not None and drawn.sampled_from is not None and drawn.is_submitted:
                    self.calibration.observe_drawn(node.distribution, token, drawn.token, drawn.sampled_from)
            for child in node.children:
                if child.guess_source is not None:
                    self.calibration.observe_guess(child.guess_source, child.token == token)
            node = node.child_with(token)

    def distributions(self, tokens: Sequence[int]) -> list[Distribution | None]:
        """The draft's distribution before each of these tokens after the root; None where it is not known."""
        found: list[Distribution | None] = []
        node: Node | None = self.root
        for token in tokens:
            found.append(node.distribution if node else None)
            node = node.child_with(token) if node else None
        return found

    def _grow(self, node: Node) -> bool:
        """Draw one more child of a node; False if its distribution is unknown or has nothing left."""
        if node.distribution is None:
            return False
        if not node.children:
            return self._draw_first(node)
        token = self._draw.further(node.distribution, [child.token for child in node.children])
        if token is None:
            return False
        self._add(node, token, self._chance(node.distribution, token, _drawn_child(node)))
        return True

    def _draw_first(self, node: Node) -> bool:
        """Draw the child of a node that is submitted behind it; it may have been planted already.

        Behind all that is under verification the target says its own token: there the likeliest comes first. And so it
        does where a guess is under verification already: whether that was drawn must not be decided afterwards.
        """
        is_decided = any(child.is_submitted for child in node.children)
        is_tested = not is_decided and (self.submitted is None or node is not self.end)
        distribution = node.distribution
        assert distribution is not None, "a node that was run"
        first = self._draw.first(node, is_tested)
        if first is None:
            return False
        token, q = first
        child = node.child_with(token)
        if child is None:
            chance = (
                self.calibration.accept_prob(distribution, token)
                if q is None
                else self.calibration.sampled_accept_prob(q)
            )
            child = self._add(node, token, chance)
        child.sampled_from = q
        return True

    def _add(self, node: Node, token: int, chance: float) -> Node:
        child = Node(token, node, node.position + 1, self._submissions)
        child.log_prob = node.log_prob + math.log(max(chance, _LEAST))
        node.children.append(child)
        self.num_drafted += 1
        self.num_alive += 1
        return child

    def _shift_log_prob(self, node: Node, change: float) -> None:
        """Change the chance of a node and of all below it."""
        stack = [node]
        while stack:
            one = stack.pop()
            one.log_prob += change
            stack += one.children

    def _walk_used(self, tokens: Sequence[int]) -> list[Node]:
        """The drafted nodes along a verdict's tokens, which are thereby used."""
        path = self.find(tokens)
        for node in path:
            node.outcome = TokenOutcome.USED
            assert node.parent is not None, "below the root"
            node.parent.has_committed_child = True
        return path


def _drawn_child(node: Node) -> Node | None:
    """The child that was drawn by chance, if one was."""
    return next((child for child in node.children if child.sampled_from is not None), None)


@dataclass(slots=True, kw_only=True)
class RollbackCounts:
    """What a verdict did to drafted tokens; `losing`: lost on a root that was not the draft's first choice."""

    used: int = 0
    rejected: int = 0
    unused: int = 0
    cut: int = 0
    losing: int = 0

    @property
    def rolled_back(self) -> int:
        """Tokens lost, whatever the cause."""
        return self.rejected + self.unused + self.cut

    def add(self, other: RollbackCounts) -> None:
        """Add another count to this one."""
        self.used += other.used
        self.rejected += other.rejected
        self.unused += other.unused
        self.cut += other.cut
        self.losing += other.losing


@dataclass(frozen=True, slots=True)
class DiscardedBranches:
    """What one verdict left behind: all below `old` that is not below `root`."""

    old: Node
    root: Node
    end: Node | None  # of the submission
    num_used: int
    submissions: int

    def count_rollback(self) -> RollbackCounts:
        """Give every abandoned node its fate, and count them."""
        settled = RollbackCounts(used=self.num_used)
        stack = [(self.old, False, False)]
        while stack:
            node, is_behind, is_losing = stack.pop()
            if node is self.root:
                continue
            if node.outcome is None and node is not self.old:
                settled.losing += is_losing
                self._give_fate(node, is_behind, settled)
            if node.children:
                is_behind = is_behind or node is self.end
                first, *others = node.children
                stack.append((first, is_behind, is_losing))
                stack += [(child, is_behind, True) for child in others]
                # Only upward links stay, so settled nodes are freed without a search for cycles.
                node.children = []
        return settled

    def _give_fate(self, node: Node, is_behind: bool, settled: RollbackCounts) -> None:
        if node.is_submitted:
            node.outcome = TokenOutcome.REJECTED
            settled.rejected += 1
        elif is_behind and node.submission_index < self.submissions:
            node.outcome = TokenOutcome.CUT
            settled.cut += 1
        else:
            node.outcome = TokenOutcome.UNUSED
            settled.unused += 1
