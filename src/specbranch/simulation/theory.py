"""Closed forms, under the papers' assumption that every draft token is accepted alike and independently.

They turn published speeds into acceptances, and tests hold the simulator to them. `gamma` is the window, c the speed
ratio.
"""

from __future__ import annotations

from collections.abc import Callable


def pearl_emitted(acceptance: float, gamma: int) -> float:
    """Tokens per round of PEARL, from its two-state chain.

    Pre-verify yields one token and turns to post-verify if that token was drafted. Post-verify yields what was
    accepted plus a correction, gamma tokens at most, and stays only if all gamma were right.
    """
    stay = acceptance**gamma
    post_share = acceptance / (acceptance + 1 - stay)
    post = sum(acceptance**k for k in range(gamma))
    return (1 - post_share) + post_share * post


def pearl_speed(acceptance: float, gamma: int, c: float) -> float:
    """Speed of PEARL over plain decoding, in lock step."""
    return pearl_emitted(acceptance, gamma) * c / max(gamma, c)


def solve_acceptance(speed: Callable[[float], float], published: float) -> float:
    """The acceptance at which a speed formula, rising in it, gives a published speed."""
    low, high = 0.0, 1.0 - 1e-9
    if not speed(low) <= published <= speed(high):
        raise ValueError(f"no acceptance gives a speed of {published}")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if speed(middle) < published else (low, middle)
    return (low + high) / 2
