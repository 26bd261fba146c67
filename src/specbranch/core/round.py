"""One draft-verify round: its state, the verdict that ends it, and the counters of a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter

from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution
from specbranch.core.ngram import NgramDrafter
from specbranch.core.tree import RollbackCounts, Tree

MAX_WINDOW = 64  # draft tokens in one submission


class Signal(IntEnum):
    """A predictor's answer, such as that of H-RAD: how much of the next window of draft tokens the target accepts."""

    NONE = 0  # no token of the window will be accepted
    SOME = 1  # the draft's confidence decides
    ALL = 2  # every token will be accepted


@dataclass(frozen=True, slots=True)
class AcceptanceHint:
    """A prediction of how much of the next window is accepted, made from the target's hidden states."""

    signal: Signal


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens to verify next, and the distribution that each was sampled from: None if it was not sampled.

    `sampled_from` is empty if no token was sampled.
    """

    tokens: list[int]
    sampled_from: Sequence[Distribution | None] = ()


@dataclass(slots=True)
class Round:
    """The state of one sequence between two verdicts.

    A verdict is the target's result of verifying a chain of draft tokens: how many of them it accepted, and its own
    token after them. In each round one chain, perhaps an empty one, is submitted for verification. Until then the
    target may wait for it, but not beyond its deadline.
    """

    index: int
    tree: Tree
    costs: PairModel
    ngrams: NgramDrafter
    is_hit: bool = False
    signal: Signal | None = None
    hint: AcceptanceHint | None = None  # sent with the verdict that began the round
    num_unprefilled: int = 0  # committed tokens that the draft model must prefill before it can draft

    @property
    def is_waiting(self) -> bool:
        """Whether no chain has been submitted in this round yet, so that the target may wait for one."""
        return self.tree.submitted is None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's result of verifying a chain: how many submitted tokens it accepted, and its own token after them."""

    accepted: int
    next_token: int

    @classmethod
    def of(cls, tokens: Sequence[int], submitted: Sequence[int]) -> Verdict:
        """Return the verdict of an engine that committed `tokens`; the last token always counts as the target's own."""
        accepted = 0
        while accepted < min(len(submitted), len(tokens) - 1) and submitted[accepted] == tokens[accepted]:
            accepted += 1
        return cls(accepted, tokens[accepted])

    def committed(self, submitted: Sequence[int]) -> list[int]:
        """Return the tokens that this verdict commits: the accepted part of `submitted`, then `next_token`."""
        if not 0 <= self.accepted <= len(submitted):
            raise ValueError(f"a verdict accepts {self.accepted} of {len(submitted)} submitted tokens")
        return [*submitted[: self.accepted], self.next_token]


@dataclass(slots=True, kw_only=True)
class Stats(RollbackCounts):
    """Counters of one session, or their sums over several sessions."""

    rounds: int = 0  # verdicts committed
    hits: int = 0  # verdicts whose last token the draft had drawn and run
    submitted: int = 0  # tokens sent for verification
    accepted: int = 0  # submitted tokens that were accepted
    emitted: int = 0  # tokens given to the user, the target's own included
    rows: int = 0  # draft rows run
    wait_s: float = 0.0  # time the target waited for a draft
    target_s: float = 0.0  # time the target computed

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """Return the sums of the counters of several sessions."""
        return cls(**dict(zip(_NAMES, map(sum, zip(*map(_VALUES, parts), strict=True)), strict=False)))

    def since(self, earlier: Stats) -> Stats:
        """Return how much each counter has grown since `earlier`, an older copy of these counters."""
        return Stats(**{name: getattr(self, name) - getattr(earlier, name) for name in _NAMES})

    @property
    def hit_rate(self) -> float:
        """Share of verdicts after which the draft had already computed its distribution; 0 before the first verdict."""
        return self.hits / self.rounds if self.rounds else 0.0

    @property
    def accepted_per_round(self) -> float:
        """Submitted tokens that were accepted, per verdict: without the target's own token."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def emitted_per_round(self) -> float:
        """Emitted tokens per verdict, the target's own token included: what vLLM calls mean acceptance length."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def rows_per_round(self) -> float:
        """Draft rows per verdict; each row computes one distribution."""
        return self.rows / self.rounds if self.rounds else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the target's time in which it waited for a draft."""
        busy = self.wait_s + self.target_s
        return self.wait_s / busy if busy else 0.0


_NAMES = tuple(field.name for field in fields(Stats))
_VALUES = attrgetter(*_NAMES)
