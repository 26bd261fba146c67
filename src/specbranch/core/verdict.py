"""The verdict: what the target says of a submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many submitted tokens the target accepted, and the token that it puts after them."""

    accepted: int
    next_token: int

    @classmethod
    def of(cls, tokens: Sequence[int], submitted: Sequence[int]) -> Verdict:
        """The verdict that an engine gave by committing these tokens; the last one is always its own."""
        accepted = 0
        while accepted < min(len(submitted), len(tokens) - 1) and submitted[accepted] == tokens[accepted]:
            accepted += 1
        return cls(accepted, tokens[accepted])

    def committed(self, submitted: Sequence[int]) -> list[int]:
        """The tokens that this verdict commits."""
        if not 0 <= self.accepted <= len(submitted):
            raise ValueError(f"a verdict accepts {self.accepted} of {len(submitted)} submitted tokens")
        return [*submitted[: self.accepted], self.next_token]
