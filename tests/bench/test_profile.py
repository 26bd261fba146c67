"""Profiles are exact where the clock is: a scripted engine moves a clock of its own by a given cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from specbranch.bench.profile import (
    PlotError,
    Profile,
    Spread,
    Timings,
    check_plot,
    fit_line,
    measure,
    plot_profile,
    read_bandwidth,
    rows_limit,
    spread_of,
    step_limit,
)
from specbranch.core.costs import StepCost
from specbranch.core.distribution import Distribution
from specbranch.engines.base import EngineInfo, Row
from specbranch.errors import EngineFull
from specbranch.machine import cpu_name, instruction_sets, onednn_limits, provenance
from specbranch.simulation.scripted import ScriptedEngine
from tests.toys import random_script

# Sums of powers of two: floats add them without error.
COST = StepCost(0.25, 0.0625)
FORK_S = 0.125


class ClockedEngine(ScriptedEngine):
    """A scripted engine that moves its own clock, and remembers how many rows and tokens each step had."""

    def __init__(self, cost: StepCost = COST, hiccups: Sequence[int] = ()) -> None:
        super().__init__(random_script(0, 5))
        self.now_s = 0.0
        self.steps: list[tuple[int, int]] = []  # (rows, tokens in the cache before)
        self._cost = cost
        self._hiccups = hiccups  # numbers of steps that take a second longer

    def clock(self) -> float:
        return self.now_s

    def fork(self, handle: int, length: int) -> int:
        self.now_s += FORK_S
        return super().fork(handle, length)

    def run(self, rows: Sequence[Row]) -> list[Distribution]:
        self.now_s += self._cost.at(len(rows)) + (len(self.steps) in self._hiccups)
        self.steps.append((len(rows), self.num_tokens))
        return super().run(rows)


class CopyingEngine(ClockedEngine):
    """An engine whose forks copy every token."""

    def fork(self, handle: int, length: int) -> int:
        fork = self.open()
        super().run([Row(fork, (0,) * length)])
        return fork


TOY = EngineInfo(model="toy", device="cpu", vocab_len=5, row_limit=64, max_handles=64, max_tokens=64)


def a_profile(size: int | None = 1000, bandwidth: float | None = 1e5, noise: float = 1.5) -> Profile:
    by_rows = {rows: Spread(step_s, step_s, noise * step_s) for rows, step_s in ((1, 0.25), (2, 0.5), (3, 0.75))}
    timings = Timings(16, by_rows, 0.5, False, 64.0)
    return Profile(
        engine="scripted",
        info=replace(TOY, weight_bytes=size),
        threads=2,
        timings=timings,
        bandwidth=bandwidth,
    )


def test_the_measured_medians_are_exactly_the_given_line() -> None:
    engine = ClockedEngine()
    timings = measure(engine, (1, 2, 4, 8), 16, 5, clock=engine.clock)

    assert timings.by_rows == {rows: Spread(*3 * (COST.at(rows),)) for rows in (1, 2, 4, 8)}
    assert (timings.fork_s, timings.prefill_tokens_per_s) == (FORK_S, 16 / COST.base_s)
    assert fit_line({rows: spread.median_s for rows, spread in timings.by_rows.items()}).cost == COST


def test_every_step_sees_the_same_context() -> None:
    engine = ClockedEngine()
    measure(engine, (1, 3), 16, 4, clock=engine.clock)

    weights, prefill, *steps = engine.steps
    assert (weights, prefill) == ((1, 0), (1, 0))
    assert sorted(steps) == [(1, 16)] * 5 + [(3, 16)] * 5


def test_every_round_takes_each_row_count_once() -> None:
    engine = ClockedEngine()
    measure(engine, (1, 2, 4), 8, 6, clock=engine.clock)

    rows = [rows for rows, _ in engine.steps[2:]]
    starts = range(0, len(rows) + 1, 3)
    assert len(rows) == 7 * 3
    assert all(sorted(rows[start:end]) == [1, 2, 4] for start, end in pairwise(starts))


def test_the_warm_up_round_does_not_count() -> None:
    engine = ClockedEngine(hiccups=(0, 2, 3))  # the reading of the weights, and the first round
    timings = measure(engine, (1, 2), 8, 3, clock=engine.clock)

    assert timings.prefill_tokens_per_s == 8 / COST.base_s
    assert all(spread.p90_s == COST.at(rows) for rows, spread in timings.by_rows.items())


def test_every_round_is_reported() -> None:
    engine, rounds = ClockedEngine(), []
    measure(engine, (1, 2), 8, 3, clock=engine.clock, on_round=lambda: rounds.append(1))

    assert len(rounds) == 4


def test_a_measurement_leaves_no_handles_behind() -> None:
    engine = ClockedEngine()
    measure(engine, (1, 4), 8, 2, clock=engine.clock)

    assert engine.num_handles == 0


def test_a_fork_that_copies_is_noticed() -> None:
    shares, copies = ClockedEngine(), CopyingEngine()

    assert not measure(shares, (1, 2), 4, 1, clock=shares.clock).fork_copies_tokens
    assert measure(copies, (1, 2), 4, 1, clock=copies.clock).fork_copies_tokens


def test_an_engine_without_room_says_so() -> None:
    class Full(ClockedEngine):
        def fork(self, handle: int, length: int) -> int:
            raise EngineFull("all handles are in use")

    engine = Full()
    with pytest.raises(EngineFull, match="in use"):
        measure(engine, (1, 2), 4, 1, clock=engine.clock)
    assert engine.num_handles == 0


def test_the_spread_runs_from_the_tenth_to_the_ninetieth_percentile() -> None:
    assert spread_of([float(number) for number in range(11)]) == Spread(5.0, 1.0, 9.0)


def test_a_line_is_fitted_without_deviation() -> None:
    fit = fit_line({rows: COST.at(rows) for rows in (1, 2, 4, 8, 16)})

    assert (fit.cost, fit.worst_deviation) == (COST, 0.0)


def test_the_fit_is_least_squares_and_tells_its_worst_deviation() -> None:
    """The line is 2, 3, 4: it misses by 1 of 1, 2 of 5 and 1 of 3."""
    fit = fit_line({1: 1.0, 2: 5.0, 3: 3.0})

    assert fit.cost == StepCost(2.0, 1.0)
    assert fit.worst_deviation == 1.0


def test_a_falling_line_is_not_made_up() -> None:
    assert fit_line({1: 1.0, 2: 0.5}).cost == StepCost(1.0, -0.5)


@pytest.mark.parametrize(
    ("one_row_s", "bound_s", "limit"),
    [
        (1.0, 1.0, "memory bandwidth"),
        (1.5, 1.0, "memory bandwidth"),
        (1.51, 1.0, "computation or overhead"),
        (0.95, 1.0, "memory bandwidth"),
        (0.8, 1.0, "beats the bound"),
        (1.0, None, "no bound is known"),
    ],
)
def test_a_step_near_its_bound_is_limited_by_memory(one_row_s: float, bound_s: float | None, limit: str) -> None:
    assert limit in step_limit(one_row_s, bound_s)


@pytest.mark.parametrize(
    ("medians_s", "limit"),
    [
        ({1: 1.0, 8: 1.29, 16: 4.0}, "rows are nearly free"),
        ({1: 1.0, 8: 1.3, 16: 1.3}, "each row costs compute: 62.5 ms"),
        ({1: 1.0, 2: 1.1, 4: 1.2}, "rows are nearly free"),
        ({1: 1.0, 2: 1.1, 4: 1.4}, "each row costs compute: 62.5 ms"),
    ],
)
def test_rows_are_judged_at_eight_or_at_the_most_measured(medians_s: dict[int, float], limit: str) -> None:
    assert rows_limit(medians_s, StepCost(1.0, 0.0625)) == limit


def test_the_bound_is_weights_over_bandwidth() -> None:
    profile = a_profile(size=50_000, bandwidth=400_000.0)

    assert (profile.bound_s, profile.bound_share) == (0.125, 0.5)
    assert profile.as_json()["bound_ms"] == 125.0
    assert profile.limit == "computation or overhead limits a step of one row; each row costs compute: 250 ms"


def test_a_noisy_verdict_carries_a_warning() -> None:
    assert "noisy" not in a_profile(noise=2.0).limit
    assert "p90 is up to 2.5 times p10, too noisy to trust" in a_profile(noise=2.5).limit


@pytest.mark.parametrize(("size", "bandwidth"), [(None, 1e9), (1000, None)])
def test_without_weights_or_bandwidth_there_is_no_bound(size: int | None, bandwidth: float | None) -> None:
    document = a_profile(size, bandwidth).as_json()

    assert (document["bound_ms"], document["bound_share"]) == (None, None)
    assert document["limit"].startswith("no bound is known")


def test_weights_are_known_only_from_engines_that_tell() -> None:
    assert ClockedEngine().info.weight_bytes is None
    assert a_profile(size=None).weight_bytes is None
    assert a_profile(size=7).weight_bytes == 7


def test_the_bandwidth_of_this_machine_is_read_with_any_number_of_threads() -> None:
    for threads in (1, 3):
        bandwidth = read_bandwidth("llamacpp", "cpu", threads, num_bytes=1 << 20, num_reads=2)
        assert bandwidth is not None
        assert bandwidth > 1e6


def test_torch_reads_its_own_device() -> None:
    pytest.importorskip("torch")
    bandwidth = read_bandwidth("torch", "cpu", 1, num_bytes=1 << 20, num_reads=2)

    assert bandwidth is not None
    assert bandwidth > 1e6


def test_a_device_of_llama_cpp_other_than_the_processor_is_out_of_reach() -> None:
    assert read_bandwidth("llamacpp", "gpu:0", 1) is None


def test_the_processor_is_named_without_the_host() -> None:
    assert cpu_name("processor\t: 0\nmodel name\t: Some CPU: 2 GHz\nmodel name\t: Other") == "Some CPU: 2 GHz"
    assert cpu_name("") is None
    machine = {"cpu", "instruction_sets", "onednn_max_cpu_isa", "num_cores", "cache_bytes"}
    assert set(provenance()) == {"version", "commit", "numpy", *machine}


def test_instruction_sets_are_those_that_the_cpu_names() -> None:
    cpuinfo = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512bw amx_int8\nflags\t\t: avx_vnni"

    assert instruction_sets(cpuinfo) == ["avx2", "avx512f", "amx_int8"]
    assert instruction_sets("") == []


@pytest.mark.parametrize(
    ("named", "limits"),
    [
        (["avx2", "avx512f", "avx512_vnni", "amx_int8"], ["ALL", "AVX512_CORE_VNNI", "AVX512_CORE", "AVX2"]),
        (["avx2", "avx512f", "avx512_vnni"], ["ALL", "AVX512_CORE", "AVX2"]),
        (["avx2", "avx512f"], ["ALL", "AVX2"]),
        ([], ["ALL"]),
    ],
)
def test_onednn_is_held_only_to_what_the_cpu_has_more_of(named: list[str], limits: list[str]) -> None:
    assert onednn_limits(named) == limits


@pytest.mark.parametrize("size", [1000, None])
def test_the_picture_is_drawn(tmp_path: Path, size: int | None) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "profile.png"
    check_plot(path)
    plot_profile(path, a_profile(size))

    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "message"), [("profile.odt", "end its name"), ("absent/profile.png", "no directory")])
def test_a_file_that_cannot_be_drawn_is_refused_beforehand(tmp_path: Path, name: str, message: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(PlotError, match=message):
        check_plot(tmp_path / name)
