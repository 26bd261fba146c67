"""Chance replaced by enumeration: the exact distribution of anything random, in rational numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import TypeVar

from specbranch.core.distribution import Prob, RandomSource

T = TypeVar("T", bound=Hashable)


class _Path:
    """One way through all choices: the first ones are given, the rest take the first option that can happen."""

    def __init__(self, given: list[int]) -> None:
        self._given = given
        self.taken: list[int] = []
        self.options: list[list[int]] = []
        self.weight = Fraction(1)

    def pick(self, weights: Sequence[Prob]) -> int:
        possible = [index for index, weight in enumerate(weights) if weight]
        depth = len(self.taken)
        index = self._given[depth] if depth < len(self._given) else possible[0]
        self.taken.append(index)
        self.options.append(possible)
        self.weight *= Fraction(weights[index]) / Fraction(sum(weights))
        return index


def exact_distribution(run: Callable[[RandomSource], T], most: int = 300_000) -> dict[T, Fraction]:
    """The distribution of what `run` returns, over every way that chance can go."""
    distribution: dict[T, Fraction] = {}
    given: list[int] = []
    for _ in range(most):
        path = _Path(given)
        result = run(path)
        distribution[result] = distribution.get(result, Fraction(0)) + path.weight
        following = _following(path)
        if following is None:
            assert sum(distribution.values()) == 1
            return distribution
        given = following
    raise AssertionError(f"more than {most} ways; make the case smaller")


def _following(path: _Path) -> list[int] | None:
    for depth in reversed(range(len(path.taken))):
        options = path.options[depth]
        place = options.index(path.taken[depth])
        if place + 1 < len(options):
            return [*path.taken[:depth], options[place + 1]]
    return None
