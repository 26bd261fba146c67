"""How much a service of a simulated world may remember."""

from __future__ import annotations

import random
from dataclasses import dataclass

MAX_TEXT = 140  # of a target


@dataclass(frozen=True, slots=True)
class Limits:
    """Small ones in most worlds; one text of each target always finds room."""

    max_sessions: int
    max_session_tokens: int
    max_handles: int
    max_tokens: int  # in the engine's cache

    @classmethod
    def drawn(cls, rng: random.Random, num_targets: int) -> Limits:
        room = 2 * num_targets * MAX_TEXT
        return cls(
            max_sessions=rng.choice([num_targets + 1, 3 * num_targets, 64]),
            max_session_tokens=rng.choice([room, 4 * room, 1 << 20]),
            max_handles=rng.choice([4 * num_targets, 64, 1 << 20]),
            max_tokens=rng.choice([room, 2 * room, 1 << 20]),
        )
