"""Measure the step time of a draft engine by row count, fit a line, and compare it with the limit of memory bandwidth.

`measure` times an engine with a given clock; the fitted line and the phrases on what limits a step are pure functions
of these times.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specbranch.core.costs import StepCost
from specbranch.engines.base import DraftEngine, EngineInfo, Row
from specbranch.errors import SpecBranchError
from specbranch.extensions import load_pyplot
from specbranch.machine import cache_bytes

Clock = Callable[[], float]

MEMORY_REACH = 1.5  # a step that takes at most this many times its bound is limited by memory
FREE_ROWS = 1.3  # rows are nearly free while a step with many costs less than this many one-row steps
MANY_ROWS = 8
LOUD = 2.0  # p90 over p10 above which the measurement is too noisy to trust
_CACHE_REACH = 0.9  # a step that takes less than this share of its bound has not read all weights from memory
_BLOCK_BYTES = 512 << 20
_STEP, _LINE, _BOUND = "#264653", "#2a9d8f", "#d1495b"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 10th and 90th percentile of repeated time measurements."""

    median_s: float
    p10_s: float
    p90_s: float


@dataclass(frozen=True, slots=True)
class Timings:
    """The measured times of one engine at one context length: of steps by row count, of a fork, and of prefill.

    `fork_copies_tokens`: a fork copies cached tokens rather than sharing them.
    """

    context_len: int
    by_rows: dict[int, Spread]
    fork_s: float
    fork_copies_tokens: bool
    prefill_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class StepCostFit:
    """A straight line fitted to median step times by row count.

    `worst_deviation` is the largest distance of a median from the line, as a share of that median.
    """

    cost: StepCost
    worst_deviation: float


def measure(
    engine: DraftEngine,
    rows: Sequence[int],
    context_len: int,
    num_steps: int,
    *,
    seed: int = 0,
    clock: Clock = time.perf_counter,
    on_round: Callable[[], object] = lambda: None,
    is_enough: Callable[[], bool] = lambda: True,
) -> Timings:
    """Time draft steps with each row count in `rows`, all after a context of `context_len` tokens; return the times.

    Every round runs one step of each row count, in a new order, so that noise of the machine and the step before affect
    all row counts alike. The first round is a warm-up and is not counted. After `num_steps` more rounds the measurement
    continues until `is_enough` returns True. `on_round` is called after every round.
    """
    bench = _Bench(engine, context_len, random.Random(seed), clock)
    try:
        num_rounds = 0
        while num_rounds <= num_steps or not is_enough():
            bench.run_round(rows)
            on_round()
            num_rounds += 1
        return bench.timings(rows)
    finally:
        bench.close()


class _Bench:
    """Times the steps of an engine, each on forks of one prefilled handle, so that all have the same context."""

    def __init__(self, engine: DraftEngine, context_len: int, rng: random.Random, clock: Clock) -> None:
        self._engine = engine
        self._context_len = context_len
        self._rng = rng
        self._clock = clock
        self._steps_s: dict[int, list[float]] = {}
        self._forks_s: list[list[float]] = []  # [round][fork]
        self._has_copied = False
        self._touch_weights()
        self._trunk = engine.open()
        self._prefill_s = self._run([Row(self._trunk, self._tokens(context_len))])

    def run_round(self, rows: Sequence[int]) -> None:
        self._forks_s.append([])
        for num_rows in self._rng.sample(rows, len(rows)):
            handles = self._fork(num_rows)
            step_s = self._run([Row(handle, self._tokens(1)) for handle in handles])
            self._steps_s.setdefault(num_rows, []).append(step_s)
            for handle in handles:
                self._engine.close(handle)

    def timings(self, rows: Sequence[int]) -> Timings:
        """Summarize the measured times for the row counts `rows`, without the first round, which is a warm-up."""
        forks_s = [fork_s for round_s in self._forks_s[1:] for fork_s in round_s]
        return Timings(
            self._context_len,
            {num_rows: spread_of(self._steps_s[num_rows][1:]) for num_rows in sorted(rows)},
            float(np.median(forks_s)),
            self._has_copied,
            self._context_len / self._prefill_s,
        )

    def close(self) -> None:
        self._engine.close(self._trunk)

    def _touch_weights(self) -> None:
        # The first step reads the model from disk; it must not count as prefill.
        handle = self._engine.open()
        self._engine.run([Row(handle, self._tokens(1))])
        self._engine.close(handle)

    def _fork(self, num_rows: int) -> list[int]:
        before = self._engine.num_tokens
        handles = []
        for _ in range(num_rows):
            start = self._clock()
            handles.append(self._engine.fork(self._trunk, self._context_len))
            self._forks_s[-1].append(self._clock() - start)
        self._has_copied |= self._engine.num_tokens != before
        return handles

    def _run(self, rows: Sequence[Row]) -> float:
        start = self._clock()
        self._engine.run(rows)
        return self._clock() - start

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(self._engine.info.vocab_len) for _ in range(count))


def spread_of(times_s: Sequence[float]) -> Spread:
    """Return the median and the 10th and 90th percentile of these times."""
    p10_s, median_s, p90_s = np.percentile(times_s, (10, 50, 90)).tolist()
    return Spread(median_s, p10_s, p90_s)


def fit_line(medians_s: Mapping[int, float]) -> StepCostFit:
    """Fit a least-squares line to step times by row count; at least two row counts are needed.

    A slope below zero is kept: it shows that the noise is larger than the cost of a row.
    """
    count = len(medians_s)
    x = sum(rows - 1 for rows in medians_s)
    xx = sum((rows - 1) ** 2 for rows in medians_s)
    y = sum(medians_s.values())
    xy = sum((rows - 1) * step_s for rows, step_s in medians_s.items())
    more_s = (count * xy - x * y) / (count * xx - x * x)
    cost = StepCost((y - more_s * x) / count, more_s)
    worst = max(abs(step_s - cost.at(rows)) / step_s for rows, step_s in medians_s.items())
    return StepCostFit(cost, worst)


def step_limit(one_row_s: float, bound_s: float | None) -> str:
    """Return a phrase that says whether memory bandwidth limits a step of one row, judged by its time `one_row_s`.

    `bound_s` is the time in which memory could deliver all weights; None if it is not known.
    """
    if bound_s is None:
        return "no bound is known for a step of one row"
    if one_row_s < _CACHE_REACH * bound_s:
        return "a step of one row beats the bound: some weights stay in the processor's cache or are not read"
    if one_row_s <= MEMORY_REACH * bound_s:
        return "memory bandwidth limits a step of one row"
    return "computation or overhead limits a step of one row"


def rows_limit(medians_s: Mapping[int, float], cost: StepCost) -> str:
    """Return a phrase that says whether further rows are nearly free, or gives the cost of each in milliseconds.

    Rows are nearly free if the median step of 8 rows, or of the largest measured row count if 8 rows were not measured,
    takes less than 1.3 times as long as that of one row.
    """
    many = MANY_ROWS if MANY_ROWS in medians_s else max(medians_s)
    if medians_s[many] < FREE_ROWS * medians_s[1]:
        return "rows are nearly free"
    return f"each row costs compute: {1e3 * cost.per_row_s:.3g} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The measured step times of a draft engine, the bandwidth of its memory, and values derived from them."""

    engine: str
    info: EngineInfo
    threads: int
    timings: Timings
    bandwidth: float | None  # bytes per second; None if it cannot be measured

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of the model's weights; None if the engine does not report them."""
        return self.info.weight_bytes

    @property
    def medians_s(self) -> dict[int, float]:
        """Median step time in seconds by row count."""
        return {rows: spread.median_s for rows, spread in self.timings.by_rows.items()}

    @property
    def fit(self) -> StepCostFit:
        """The line fitted to the median step times by row count."""
        return fit_line(self.medians_s)

    @property
    def bound_s(self) -> float | None:
        """The seconds in which memory delivers all weights once, without the keys and values of the context.

        None if the bandwidth or the size of the weights is unknown.
        """
        if self.weight_bytes is None or self.bandwidth is None:
            return None
        return self.weight_bytes / self.bandwidth

    @property
    def bound_share(self) -> float | None:
        """The bound `bound_s` divided by the median time of a step of one row; None without a bound."""
        return None if self.bound_s is None else self.bound_s / self.medians_s[1]

    @property
    def noise(self) -> float:
        """The noise of the measurement: the largest ratio of p90 to p10 among all row counts."""
        return max(spread.p90_s / spread.p10_s for spread in self.timings.by_rows.values())

    @property
    def limit(self) -> str:
        """A sentence on two findings: whether memory bandwidth limits a step of one row, and the cost of further rows.

        If `noise` is above 2, a warning follows that the measurement is too noisy to trust.
        """
        parts = [step_limit(self.medians_s[1], self.bound_s), rows_limit(self.medians_s, self.fit.cost)]
        if self.noise > LOUD:
            parts.append(f"but p90 is up to {self.noise:.1f} times p10, too noisy to trust: measure on idle cores")
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return all figures as a JSON dict."""
        timings, fit = self.timings, self.fit
        return {
            "model": self.info.model,
            "engine": self.engine,
            "device": self.info.device,
            "dtype": self.info.dtype,
            "threads": self.threads,
            "context": timings.context_len,
            "vocab_len": self.info.vocab_len,
            "rows": {str(rows): _spread_json(spread) for rows, spread in timings.by_rows.items()},
            "fit": {
                "first_ms": 1e3 * fit.cost.base_s,
                "more_ms": 1e3 * fit.cost.per_row_s,
                "worst_deviation": fit.worst_deviation,
            },
            "fork_us": 1e6 * timings.fork_s,
            "fork_copies_tokens": timings.fork_copies_tokens,
            "prefill_tokens_per_s": timings.prefill_tokens_per_s,
            "bandwidth_gb_per_s": None if self.bandwidth is None else self.bandwidth / 1e9,
            "weight_bytes": self.weight_bytes,
            "bound_ms": None if self.bound_s is None else 1e3 * self.bound_s,
            "bound_share": self.bound_share,
            "noise": self.noise,
            "limit": self.limit,
        }


def _spread_json(spread: Spread) -> dict[str, float]:
    return {"median_ms": 1e3 * spread.median_s, "p10_ms": 1e3 * spread.p10_s, "p90_ms": 1e3 * spread.p90_s}


def read_bandwidth(
    engine: str, device: str, threads: int, num_bytes: int | None = None, num_reads: int = 5
) -> float | None:
    """Measure and return how many bytes per second this process reads from the device's memory.

    Return None for an unsupported device. A block of `num_bytes`, by default at least twice the last-level cache, is
    read `num_reads` times, and the fastest read counts.
    """
    num_bytes = num_bytes or max(_BLOCK_BYTES, 2 * (cache_bytes() or 0))
    if engine == "torch":
        return _torch_bandwidth(device, num_bytes, num_reads)
    return _numpy_bandwidth(threads, num_bytes, num_reads) if device == "cpu" else None


def _numpy_bandwidth(threads: int, num_bytes: int, num_reads: int) -> float:
    # The maximum, not the sum: numpy's sum in one thread is slower than memory.
    block = np.ones(num_bytes // 4, dtype=np.float32)
    parts = np.array_split(block, threads)
    with ThreadPoolExecutor(threads) as pool:
        return block.nbytes / _best_s(lambda: list(pool.map(np.max, parts)), num_reads)


def _torch_bandwidth(device: str, num_bytes: int, num_reads: int) -> float:
    import torch

    block = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    # item() waits for the device. The engine has set the number of threads for the whole process.
    return float(4 * block.numel() / _best_s(lambda: block.sum().item(), num_reads))


def _best_s(work: Callable[[], object], num_reads: int) -> float:
    best_s = float("inf")
    for _ in range(num_reads):
        start = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s


class PlotError(SpecBranchError, ValueError):
    """A figure cannot be drawn to this file."""


def check_plot(path: Path) -> None:
    """Raise `PlotError` if no figure can be drawn to this path; to be called before a long measurement."""
    formats = load_pyplot().Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise PlotError(f"cannot draw to {path}: end its name in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise PlotError(f"cannot draw to {path}: there is no directory {path.parent}")


def plot_profile(path: Path, profile: Profile) -> None:
    """Draw the profile to a file; its suffix gives the format."""
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(8, 4.8), layout="constrained")
    _draw_steps(axis, profile)
    _draw_line(axis, profile)
    _draw_bound(axis, profile)
    _dress(axis, profile)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _draw_steps(axis: Any, profile: Profile) -> None:
    spreads = profile.timings.by_rows
    medians = [1e3 * spread.median_s for spread in spreads.values()]
    below = [1e3 * (spread.median_s - spread.p10_s) for spread in spreads.values()]
    above = [1e3 * (spread.p90_s - spread.median_s) for spread in spreads.values()]
    axis.errorbar(
        list(spreads), medians, yerr=(below, above), fmt="o", color=_STEP, ms=6, capsize=4, lw=1.4, zorder=3,
        label="median step, bars from p10 to p90",
    )  # fmt: skip


def _draw_line(axis: Any, profile: Profile) -> None:
    cost = profile.fit.cost
    ends = [1, max(profile.timings.by_rows)]
    label = f"fit: {1e3 * cost.base_s:.4g} ms {1e3 * cost.per_row_s:+.4g} ms for each further row"
    axis.plot(ends, [1e3 * cost.at(rows) for rows in ends], color=_LINE, lw=2, zorder=2, label=label)


def _draw_bound(axis: Any, profile: Profile) -> None:
    if profile.bound_s is None or profile.bandwidth is None or profile.weight_bytes is None:
        return
    size, speed = f"{profile.weight_bytes / 1e6:.0f} MB", f"{profile.bandwidth / 1e9:.1f} GB/s"
    label = f"bound: {size} of weights at {speed} = {1e3 * profile.bound_s:.3g} ms"
    axis.axhline(1e3 * profile.bound_s, color=_BOUND, ls="--", lw=1.4, zorder=1, label=label)


def _dress(axis: Any, profile: Profile) -> None:
    info, timings = profile.info, profile.timings
    title = f"{info.model}: {profile.engine} on {info.device}, threads {profile.threads}, context {timings.context_len}"
    axis.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axis.set_xlabel("rows in one step")
    axis.set_ylabel("step time, ms")
    axis.set_xticks(list(timings.by_rows))
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="upper left")
