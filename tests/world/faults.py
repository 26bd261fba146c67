"""Which faults a world has and how often, and how much its service may remember: drawn from its seed.

Some worlds have many faults and some only one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

MAX_TEXT = 140  # tokens of a target


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances: the first group of each message, the second of each draft step, the third of each shake of the world."""

    delayed: float = 0.0
    lost: float = 0.0
    reordered: float = 0.0
    doubled: float = 0.0
    garbled: float = 0.0

    engine_error: float = 0.0
    engine_full: float = 0.0

    restart: float = 0.0  # of the service: all sessions are lost
    hang: float = 0.0
    reconnect: float = 0.0  # of a client: it has another name for the service
    client_restart: float = 0.0
    leap: float = 0.0
    wall_jump: float = 0.0
    full_disk: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random) -> Faults:
        """Draw the chances; each kind of fault occurs in half of all worlds."""
        most = {"delayed": 0.3, "engine_error": 0.05, "engine_full": 0.05}
        return cls(
            **{
                field.name: most.get(field.name, 0.2) * rng.random() if rng.random() < 0.5 else 0.0
                for field in fields(cls)
            }
        )

    def __str__(self) -> str:
        there = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name} {chance:.3f}" for name, chance in there.items() if chance) or "no faults"


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a service may remember: little in most worlds, but always one text of each target."""

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
