"""What is counted, each thing defined once. Ratios are properties, so that sums over sessions stay meaningful."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import attrgetter

from specbranch.core.rollback import Settled


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counters of one session, or the sum over several."""

    rounds: int = 0  # verdicts taken
    hits: int = 0  # verdicts whose root the draft had drawn and run
    submitted: int = 0  # tokens sent for verification
    accepted: int = 0  # submitted tokens that were accepted
    emitted: int = 0  # tokens given to the user, the target's own included
    rows: int = 0  # draft rows run
    used: int = 0  # drafted tokens that a verdict committed
    rejected: int = 0  # rolled back: submitted and refused
    unused: int = 0  # rolled back: prepared for another outcome
    cut: int = 0  # rolled back: drafted, then not submitted
    losing: int = 0  # of the rolled back: on branches that were not the draft's first choice
    wait_s: float = 0.0  # time the target waited for a draft
    target_s: float = 0.0  # time the target computed

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """The sum over several sessions."""
        return cls(**dict(zip(_NAMES, map(sum, zip(*map(_VALUES, parts), strict=True)), strict=False)))

    def add(self, other: Stats) -> None:
        """Add another session's counters to these."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def since(self, earlier: Stats) -> Stats:
        """What was counted after `earlier` was read."""
        return Stats(**{name: getattr(self, name) - getattr(earlier, name) for name in _NAMES})

    def settle(self, settled: Settled) -> None:
        """Count what became of drafted tokens."""
        self.used += settled.used
        self.rejected += settled.rejected
        self.unused += settled.unused
        self.cut += settled.cut
        self.losing += settled.losing

    @property
    def rolled_back(self) -> int:
        """Drafted tokens that a verdict made useless, whatever the cause."""
        return self.rejected + self.unused + self.cut

    @property
    def hit_rate(self) -> float:
        """Share of verdicts that were prepared."""
        return self.hits / self.rounds if self.rounds else 0.0

    @property
    def accepted_per_round(self) -> float:
        """Submitted tokens that were accepted, per verdict: without the target's own token."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def emitted_per_round(self) -> float:
        """Tokens per verdict with the target's own one: what vLLM calls mean acceptance length."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def rows_per_round(self) -> float:
        """Draft rows run per verdict."""
        return self.rows / self.rounds if self.rounds else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the target's time that it waited for a draft."""
        busy = self.wait_s + self.target_s
        return self.wait_s / busy if busy else 0.0


_NAMES = tuple(field.name for field in fields(Stats))
_VALUES = attrgetter(*_NAMES)
