"""Exact two-sample tests, their correction for many tests, and their power; all random numbers come from a given `rng`.

All tests are permutation tests. If both samples come from one distribution, every way to divide the pooled values into
two samples is equally likely, whatever the distribution; so P(p-value <= level) <= level holds exactly, for every size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

_MAX_TABLES = 20_000  # up to this number of tables, all are enumerated; if there are more, random ones are drawn
_ROUNDING = 1e-9  # equal statistics may differ by this much in floating point
_CHUNK = 4_000_000  # numbers held at a time
_RARE = 5  # values with a lower count in both samples together are merged into one


@dataclass(frozen=True, slots=True)
class Test:
    """The result of a test: p-value, statistic, and critical value (the least statistic that is significant)."""

    p_value: float
    statistic: float
    critical: float


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of comparing two samples of one feature; `what` names the quantity that was compared.

    `p_value` is corrected for the number of tests in a report; the p-value in `test` is not. `shift` is the least
    total-variation distance that the test detects; None for tests of means.
    """

    what: str
    test: Test
    p_value: float
    shift: float | None = None


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Two samples of outputs, each output as one value, such as its text or tokens, to compare their distributions."""

    ones: Sequence[Hashable]
    others: Sequence[Hashable]

    def compared(self, level: float, rng: np.random.Generator) -> Compared:
        """Test at significance `level` whether both samples follow the same distribution, and return the result.

        The result's p-value is not corrected for the number of tests.
        """
        ones, others = count_pairs(self.ones, self.others)
        test = compare_counts(ones, others, level, rng)
        shift = detectable_shift(ones, others, test.critical, rng)
        return Compared(f"joint distribution, {len(ones)} cells", test, test.p_value, shift)


@dataclass(frozen=True, slots=True)
class LogprobMeans:
    """Two samples of log-probabilities, one number for each output, to compare their means."""

    ones: Sequence[float]
    others: Sequence[float]

    def compared(self, level: float, rng: np.random.Generator) -> Compared:
        """Test at significance `level` whether both samples have the same mean, and return the result.

        The result's p-value is not corrected for the number of tests.
        """
        test = compare_means(np.array(self.ones), np.array(self.others), level, rng)
        return Compared("mean log-probability of a sample", test, test.p_value)


def compare_all(
    pairs: Sequence[Outcomes | LogprobMeans], alpha: float, rng: np.random.Generator, together: bool = False
) -> list[Compared]:
    """Test each pair of samples and return the results in the order of the pairs, with corrected p-values.

    The family-wise false-alarm rate is at most `alpha`. `together` adds a last test of all pairs, which must then be
    independent of each other: a shift that is too small for the test of one pair can show in the tests of many pairs.
    """
    level = alpha / (len(pairs) + together)
    tested = [pair.compared(level, rng) for pair in pairs]
    if together:
        p_value = combine_p_values([one.test.p_value for one in tested])
        tested.append(Compared("all p-values in one", Test(p_value, -math.log(p_value), math.inf), p_value))
    adjusted = holm([one.test.p_value for one in tested])
    return [replace(one, p_value=p_value) for one, p_value in zip(tested, adjusted, strict=True)]


def count_pairs(one: Sequence[Hashable], other: Sequence[Hashable], rare: int = _RARE) -> tuple[Ints, Ints]:
    """Return how often each value occurs in the first sample, and how often in the second; merge rare values into one.

    A value is rare if both samples together have it fewer than `rare` times. The merging depends on the pooled values
    only, which a permutation does not change, so the test stays exact.
    """
    ones, others = Counter(one), Counter(other)
    pooled = ones + others
    kept = [value for value, count in pooled.most_common() if count >= rare]
    first, second = ([counts[value] for value in kept] for counts in (ones, others))
    first.append(len(one) - sum(first))
    second.append(len(other) - sum(second))
    if first[-1] + second[-1] == 0:
        first.pop()
        second.pop()
    return np.array(first, dtype=np.int64), np.array(second, dtype=np.int64)


def chi_square(ones: Ints, others: Ints) -> Floats:
    """Return the two-sample chi-square statistic of counts, shape [..., values]; it is large if the samples differ."""
    size, other_size = ones.sum(axis=-1, keepdims=True), others.sum(axis=-1, keepdims=True)
    pooled = np.maximum(ones + others, 1)
    ratio = np.sqrt(other_size / size)
    statistic: Floats = ((ones * ratio - others / ratio) ** 2 / pooled).sum(axis=-1)
    return statistic


def compare_counts(ones: Ints, others: Ints, level: float, rng: np.random.Generator) -> Test:
    """Test at significance `level` whether two samples come from the same distribution, and return the result.

    `ones` and `others` have the count of each value in the two samples. The statistic is chi-square. It is compared
    with the statistics of random permutations, or with those of all possible tables of counts if these are few.
    """
    observed = float(chi_square(ones, others))
    pooled, size = ones + others, int(ones.sum())
    if math.prod(int(count) + 1 for count in pooled) <= _MAX_TABLES:
        return _test_by_enumeration(pooled, size, observed, level)
    num_draws = draws_for(level)
    step = max(1, _CHUNK // len(pooled))
    null = np.concatenate(
        [_sampled_statistics(pooled, size, min(step, num_draws - start), rng) for start in range(0, num_draws, step)]
    )
    return _test_by_sampling(null, observed, level)


def compare_means(ones: Floats, others: Floats, level: float, rng: np.random.Generator) -> Test:
    """Test at significance `level` whether two samples of numbers come from the same distribution; return the result.

    The statistic is the distance of the means; it is compared with the distances after random permutations.
    """
    pooled = np.concatenate([ones, others])
    centred = pooled - pooled.mean()
    # Centred values sum to zero, so one sample's sum gives the distance of the means.
    scale = 1 / len(ones) + 1 / len(others)
    observed = abs(float(centred[: len(ones)].sum())) * scale
    num_draws = draws_for(level)
    step = max(1, _CHUNK // len(pooled))
    null = [
        np.abs(rng.permuted(np.tile(centred, (min(step, num_draws - start), 1)), axis=1)[:, : len(ones)].sum(axis=1))
        * scale
        for start in range(0, num_draws, step)
    ]
    return _test_by_sampling(np.concatenate(null), observed, level)


def draws_for(level: float) -> int:
    """Return how many random permutations to draw, so that the smallest possible p-value is a tenth of `level`."""
    return math.ceil(10 / level)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of tests (Holm 1979).

    Rejecting every null hypothesis with an adjusted p-value of at most x has a family-wise error rate of at most x.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted


def combine_p_values(p_values: Sequence[float]) -> float:
    """Combine independent p-values into one (Fisher 1932), and return it.

    It is the probability that the product of as many uniform random numbers is at most the product of the p-values.
    """
    product = math.prod(p_values)
    term, tail = 1.0, 0.0
    for rank in range(len(p_values)):
        tail += term
        term *= -math.log(product) / (rank + 1)
    return min(1.0, product * tail)


def detectable_shift(ones: Ints, others: Ints, critical: float, rng: np.random.Generator, power: float = 0.9) -> float:
    """Return the least total-variation distance that `compare_counts` detects with this power; 1.0 if it detects none.

    The distance is simulated, in steps of 0.01, for the pooled distribution and for the shift that is hardest to
    detect: mass moved evenly from one half of the distribution to the other half. `critical` is the critical value of
    the statistic.
    """
    distribution = (ones + others) / (ones + others).sum()
    sizes = int(ones.sum()), int(others.sum())
    low, high = 0, 100
    while low < high:
        middle = (low + high) // 2
        if _power(distribution, shifted(distribution, middle / 100), sizes, critical, rng) >= power:
            high = middle
        else:
            low = middle + 1
    return high / 100


def shifted(distribution: Floats, distance: float) -> Floats:
    """Return a distribution with probability mass moved evenly from one half of `distribution` to the other half.

    `distance` is the mass to move, and so the total-variation distance; a half with less mass gives all that it has.
    """
    gives, mass = np.zeros(len(distribution), dtype=bool), 0.0
    for index in np.argsort(distribution, kind="stable")[::-1]:
        if mass + distribution[index] <= 0.5 + _ROUNDING or not gives.any():
            gives[index] = True
            mass += float(distribution[index])
    if mass >= 1 - _ROUNDING:  # there is only one value
        return distribution
    taken = min(distance, mass)
    result: Floats = np.where(gives, distribution * (1 - taken / mass), distribution * (1 + taken / (1 - mass)))
    return np.clip(result, 0.0, 1.0)  # the last digit may lie outside


def tables(pooled: Sequence[int], size: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield every way to divide the pooled values into a first sample of `size` and the rest.

    `pooled` has the count of each value. Each result has the counts of the values in the first sample, and the number
    of draws that give these counts.
    """
    if not pooled:
        if size == 0:
            yield (), 1
        return
    head, rest = pooled[0], pooled[1:]
    for taken in range(max(0, size - sum(rest)), min(head, size) + 1):
        for tail, ways in tables(rest, size - taken):
            yield (taken, *tail), ways * math.comb(head, taken)


def _test_by_enumeration(pooled: Ints, size: int, observed: float, level: float) -> Test:
    found = list(tables([int(count) for count in pooled], size))
    ones = np.array([table for table, _ in found], dtype=np.int64)
    statistics = chi_square(ones, pooled - ones)
    whole = math.comb(int(pooled.sum()), size)
    as_extreme = sum(
        ways for (_, ways), statistic in zip(found, statistics, strict=True) if statistic >= observed - _ROUNDING
    )
    critical, tail = math.inf, 0
    for index in np.argsort(statistics, kind="stable")[::-1]:
        tail += found[index][1]
        if tail / whole > level:
            break
        critical = float(statistics[index])
    return Test(as_extreme / whole, observed, critical)


def _sampled_statistics(pooled: Ints, size: int, num_draws: int, rng: np.random.Generator) -> Floats:
    ones = rng.multivariate_hypergeometric(pooled, size, size=num_draws, method="marginals")
    return chi_square(ones, pooled - ones)


def _test_by_sampling(null: Floats, observed: float, level: float) -> Test:
    """Test at significance `level` whether the `observed` statistic is large compared with `null`; return the result.

    `null` has the statistics of random permutations; the observed one counts as one more (Phipson and Smyth 2010).
    """
    as_extreme = int((null >= observed - _ROUNDING).sum())
    allowed = math.floor(level * (1 + len(null))) - 1
    critical = float(np.partition(null, len(null) - allowed)[len(null) - allowed]) if allowed > 0 else math.inf
    return Test((1 + as_extreme) / (1 + len(null)), observed, critical)


def _power(
    distribution: Floats, other: Floats, sizes: tuple[int, int], critical: float, rng: np.random.Generator
) -> float:
    num_trials = 1000
    ones = rng.multinomial(sizes[0], distribution, size=num_trials)
    others = rng.multinomial(sizes[1], other, size=num_trials)
    return float((chi_square(ones, others) >= critical - _ROUNDING).mean())
