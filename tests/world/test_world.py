"""Simulated worlds hold to every rule, whatever goes wrong in them; and the same seed makes the same world."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.root import ROOT
from tests.world.world import World

NUM_WORLDS = 60
NUM_NIGHTLY = 2000


@pytest.mark.parametrize("seed", range(NUM_WORLDS))
def test_a_world_keeps_all_rules(seed: int) -> None:
    World(seed).run()


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_thousands_of_worlds_keep_all_rules() -> None:
    for seed in range(NUM_WORLDS, NUM_NIGHTLY):
        World(seed).run()


def test_a_seed_always_makes_the_same_world() -> None:
    """In this process and in another one, where sets have another order."""
    world = World(7)
    world.run()
    program = "from tests.world.world import World; world = World(7); world.run(); print(world.digest)"
    other = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert other.stdout.strip() == world.digest


def test_nothing_in_a_world_reads_a_real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: object) -> float:
        raise AssertionError("a real clock was read")

    for name in ("monotonic", "time", "time_ns", "perf_counter", "sleep"):
        monkeypatch.setattr(time, name, read)
    monkeypatch.setattr("logging.Logger.isEnabledFor", lambda *_: False)  # a log line has the real time

    World(3).run()
