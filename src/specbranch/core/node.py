"""A node of the draft tree, and how its children are drawn: for exact match or for rejection sampling.

Rejection sampling has two forms. `RejectionPicker` draws for an unmodified engine, which tests one sampled token at a
position. `WithoutReplacementPicker` draws as in the SpecBranch paper, for reference: several tokens at a position,
sampled without replacement and tested one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from specbranch.core.calibration import Calibration, Grounds
from specbranch.core.distribution import (
    TEXT_LEN,
    Distribution,
    Prob,
    RandomSource,
    RequestSampling,
    inverse_cdf,
    seeded_uniform,
)

First = tuple[int, Distribution | None]  # a token, and the distribution that it was sampled from


class TokenOutcome(Enum):
    """The outcome of a drafted token: it was committed, or rolled back for one of three causes."""

    USED = "used"  # a verdict committed it
    REJECTED = "rejected"  # submitted and refused
    UNUSED = "unused"  # prepared for another verdict
    CUT = "cut"  # drafted before a submission that ended above it, and discarded with that submission


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One drafted token in the draft tree. `position` is its index in the whole sequence, prompt included.

    To run a node means to compute the draft model's distribution of the token after it.
    """

    token: int
    parent: Node | None
    position: int
    submission_index: int  # number of submissions before it was drafted
    children: list[Node] = field(default_factory=list)
    distribution: Distribution | None = None  # of the next token, once the node was run
    is_submitted: bool = False
    outcome: TokenOutcome | None = None
    guess_source: Grounds | None = None  # of a token that was guessed, not drawn from a distribution
    sampled_from: Distribution | None = None  # the target tests the token against it; None if it was not sampled
    has_committed_child: bool = False  # a token drawn after this one was committed
    log_prob: float = 0.0  # of the path from the tree's first root, by the draft's distributions as calibrated

    def child_with(self, token: int) -> Node | None:
        """Return the child that holds `token`; None if there is no such child."""
        for child in self.children:
            if child.token == token:
                return child
        return None

    def path(self, max_len: int | None = None) -> list[int]:
        """Return the tokens from the root's child down to this node, or only the last `max_len` of them."""
        tokens: list[int] = []
        node = self
        while node.parent is not None and (max_len is None or len(tokens) < max_len):
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]

    def __repr__(self) -> str:
        return f"Node({self.token} at {self.position}, {len(self.children)} children)"


class TokenPicker(Protocol):
    """Interface for choosing, one at a time, the draft tokens that follow a node whose distribution is known."""

    def first(self, node: Node, is_tested: bool) -> First | None:
        """Draw the token to submit after a node, and return it with the distribution it was sampled from, if any.

        Return None if the node's distribution has no token. Without `is_tested` the target does not test the token: it
        samples a token of its own at this position, which may be the same.
        """
        ...

    def further(self, distribution: Distribution, taken: Collection[int]) -> int | None:
        """Draw one more token that is not among `taken`; return None if the top-k holds no other token."""
        ...


class GreedyPicker:
    """Draws the most likely token not yet drawn.

    The output stays exact if the tokens are verified by exact match, which never uses the draft's distribution.
    """

    def first(self, node: Node, is_tested: bool) -> First | None:
        ids = node.distribution.ids if node.distribution else ()
        return (ids[0], None) if ids else None

    def further(self, distribution: Distribution, taken: Collection[int]) -> int | None:
        return next((token for token in distribution.ids if token not in taken), None)


class WithoutReplacementPicker:
    """Samples tokens without replacement, as the SpecBranch paper's rejection sampling requires.

    The output is exact only if the draft's top-k is its whole distribution. `chance` is the source of randomness.
    """

    def __init__(self, chance: RandomSource) -> None:
        self._chance = chance

    def first(self, node: Node, is_tested: bool) -> First | None:
        token = self.further(node.distribution, ()) if node.distribution else None
        return None if token is None else (token, None)

    def further(self, distribution: Distribution, taken: Collection[int]) -> int | None:
        free = [
            (token, prob)
            for token, prob in zip(distribution.ids, distribution.probs, strict=True)
            if token not in taken
        ]
        if not free:
            return None
        return free[self._chance.pick([prob for _, prob in free])][0]


class RejectionPicker(GreedyPicker):
    """Picks the children of a node; the first, which is submitted, is sampled if that makes its acceptance more likely.

    That is so if a sampled token is more likely to be accepted than the likeliest token. Otherwise, and for all further
    children, the likeliest token not yet picked is taken. Whether to sample depends on the distribution and on
    `calibration`, which estimates how often the target accepts such tokens, never on the token drawn. `shape` turns the
    draft's distribution into the one to sample from; `pick` draws an index from its probabilities, given the node.
    """

    def __init__(
        self,
        shape: Callable[[Distribution], Distribution],
        pick: Callable[[Node, Sequence[Prob]], int],
        calibration: Calibration,
    ) -> None:
        self._shape = shape
        self._pick = pick
        self._calibration = calibration

    def first(self, node: Node, is_tested: bool) -> First | None:
        distribution = node.distribution
        if distribution is None or not distribution.ids or not is_tested:
            return super().first(node, is_tested)
        q = self._shape(distribution)
        if self._calibration.sampled_accept_prob(q) < self._calibration.top1_accept_prob(distribution):
            return distribution.ids[0], None
        return q.ids[self._pick(node, q.probs)], q


def rejection_picker(sampling: RequestSampling, tokens: Sequence[int], calibration: Calibration) -> RejectionPicker:
    """Return a picker that draws the draft tokens of a sampled request, so that rejection sampling can verify them.

    `tokens` is the list of the request's committed tokens, which grows while the request is decoded. `calibration`
    estimates whether the target accepts a sampled token or the likeliest token more often.
    """

    def pick_at(node: Node, probs: Sequence[Prob]) -> int:
        text = [*tokens[-TEXT_LEN:], *node.path()]
        return inverse_cdf(probs, seeded_uniform(sampling.seed, node.position + 1, text))

    return RejectionPicker(sampling.apply, pick_at, calibration)
