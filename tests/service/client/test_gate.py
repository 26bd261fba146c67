"""Does the gate find the better way of decoding, and what does finding it cost?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specbranch.service.client.gate import Gate, StepTimer


def drive(gate: Gate, steps: int, speedup: float, rows: int = 1, warm_up: int = 3) -> tuple[float, int]:
    """Run steps of which those with drafts give `speedup` times the tokens, once warmed up; tokens, open steps."""
    tokens, num_open, since_open = 0.0, 0, 0
    for _ in range(steps):
        is_open = gate.is_open(rows)
        since_open = since_open + 1 if is_open else 0
        gained = rows * (speedup if since_open > warm_up else min(speedup, 1.0)) if is_open else rows
        num_open += is_open
        tokens += gained
        gate.observe(rows, round(1000 * gained), 1.0)
    return tokens / rows, num_open


def test_a_pair_that_pays_is_found_and_kept() -> None:
    tokens, num_open = drive(Gate(), 2000, speedup=2.0)

    assert num_open > 0.93 * 2000
    assert tokens > 0.95 * 2 * 2000


@pytest.mark.parametrize("speedup", [0.5, 0.9, 1.0])
def test_a_pair_that_does_not_pay_costs_next_to_nothing(speedup: float) -> None:
    gate = Gate()
    first, _ = drive(gate, 1000, speedup)
    later, _ = drive(gate, 10_000, speedup)

    assert first > 0.97 * 1000
    assert later > 0.995 * 10_000


def test_a_hopeless_trial_ends_early() -> None:
    _, bad = drive(Gate(), 60, speedup=0.3)
    _, poor = drive(Gate(), 60, speedup=0.95)

    assert bad < poor


def test_it_notices_that_drafts_began_to_pay_and_that_they_ceased() -> None:
    gate = Gate()
    drive(gate, 500, speedup=0.8)
    _, num_open = drive(gate, 2000, speedup=2.0)
    assert num_open > 1000
    drive(gate, 200, speedup=0.5)
    _, num_open = drive(gate, 1000, speedup=0.5)
    assert num_open < 50


def test_loads_are_judged_apart() -> None:
    gate = Gate()
    drive(gate, 200, speedup=2.0, rows=1)
    drive(gate, 200, speedup=0.5, rows=8)

    assert gate.is_open(1)
    assert not gate.is_open(8)
    assert gate.is_open(1)
    assert {rows: decision.is_open for rows, decision in gate.decisions.items()} == {1: True, 8: False}
    won, lost = gate.decisions.values()
    assert (won.rows, lost.rows) == ("1", "5-8")
    assert won.drafted == pytest.approx(2 * won.plain) and lost.drafted == pytest.approx(lost.plain / 2)
    assert (won.num_steps, lost.num_steps) == (128, 600)


def test_waiting_for_drafts_that_slows_every_step_is_trial_enough() -> None:
    gate, num_open = Gate(), 0
    for _ in range(100):
        is_open = gate.is_open(1)
        num_open += is_open
        gate.observe(1, 1000, 3.0 if is_open else 1.0, has_drafts=False)

    assert num_open == 4 + 8 + 1, "to settle, to wait, and the one that decides"
    assert gate.decisions[1].drafted == pytest.approx(gate.decisions[1].plain / 3)


@pytest.mark.parametrize(("speedup", "pauses"), [(0.95, [256, 512]), (0.5, [600, 1200]), (0.01, [1024, 2048])])
def test_the_more_a_trial_has_lost_the_later_is_the_next_one(speedup: float, pauses: list[int]) -> None:
    gate, seen = Gate(), []
    for _ in range(1500):
        drive(gate, 1, speedup)
        decision = gate.decisions.get(1)
        if decision is not None and decision.num_steps not in seen:
            seen.append(decision.num_steps)

    assert seen[:2] == pauses


def test_a_wrong_measurement_opens_it_for_a_short_time_only() -> None:
    """Plain steps that others slowed down make slow drafts look good, once."""
    gate = Gate()
    for _ in range(12):
        gate.is_open(1)
        gate.observe(1, 1000, 3.0)
    _, num_open = drive(gate, 512, speedup=0.6)

    assert 64 < num_open < 110


def test_it_opens_for_longer_each_time_that_drafts_win_again() -> None:
    gate, stretches = Gate(), []
    for _ in range(2000):
        drive(gate, 1, speedup=2.0, warm_up=0)
        decision = gate.decisions.get(1)
        if decision is not None and decision.num_steps not in stretches:
            stretches.append(decision.num_steps)

    assert stretches == [64, 128, 256, 512]


def test_plain_decoding_is_measured_again_now_and_then() -> None:
    gate = Gate()
    drive(gate, 2000, speedup=2.0)
    _, num_open = drive(gate, 1600, speedup=2.0)

    assert 1600 - 60 < num_open <= 1600 - 24, "12 plain steps in about 530, 4 of them to settle"


def test_a_step_of_the_other_way_is_not_counted() -> None:
    """A verdict of another load comes in between: what ran was not what this load would have run."""
    gate = Gate()
    while not gate.is_open(1):
        gate.observe(1, 1, 1.0)
    for _ in range(40):
        gate.observe(8, 8, 1.0)

    assert not gate.is_open(8)


def test_a_trial_waits_until_the_draft_has_read_the_text() -> None:
    """For the first 30 steps after opening no drafts come; they are not held against it."""
    for first, is_found in ((30, True), (200, False)):
        gate, since_open = Gate(), 0
        for _ in range(150):
            is_open = gate.is_open(1)
            since_open = since_open + 1 if is_open else 0
            has_drafts = since_open > first
            gate.observe(1, 2000 if has_drafts else 1000, 1.0, has_drafts)

        assert gate.was_open == is_found


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_the_first_steps_after_others_do_not_count(is_interrupted: bool) -> None:
    gate = Gate()
    drive(gate, 60, speedup=2.0)
    if is_interrupted:
        gate.interrupt()
    for _ in range(4):
        gate.is_open(1)
        gate.observe(1, 0, 50.0)

    assert gate.is_open(1) == is_interrupted


def steps_until_open(gate: Gate, rows: int = 1, limit: int = 10_000) -> int:
    """Drafts give twice the tokens from now on: steps until that is decided."""
    for step in range(limit):
        drive(gate, 1, speedup=2.0, rows=rows, warm_up=0)
        decision = gate.decisions.get(1 << (rows - 1).bit_length())
        if decision is not None and decision.is_open:
            return step
    return limit


@pytest.mark.parametrize(
    ("has_drafts", "speed", "is_soon"), [(False, 1.0, True), (False, 0.9, False), (True, 1.0, False)]
)
def test_a_draft_that_was_away_for_long_is_found_soon(has_drafts: bool, speed: float, is_soon: bool) -> None:
    """Trials without any draft do not make the next one rarer; those that lose time or had drafts do."""
    gate = Gate()
    for _ in range(20_000):
        is_open = gate.is_open(1)
        gate.observe(1, round(1000 * (speed if is_open else 1.0)), 1.0, has_drafts and is_open)

    assert gate.decisions[1].num_steps == (256 if is_soon else 8192)
    assert (steps_until_open(gate) < 400) == is_soon


def test_where_drafts_pay_again_the_other_loads_try_them_soon() -> None:
    gate = Gate()
    for rows in (1, 8):
        drive(gate, 20_000, speedup=0.9, rows=rows)
    assert steps_until_open(gate, rows=8) > 400
    assert steps_until_open(gate, rows=1) < 400


def test_a_load_that_opens_and_closes_in_turns_hurries_no_other() -> None:
    gate = Gate()
    drive(gate, 20_000, speedup=0.9, rows=8)
    pause = gate.decisions[8].num_steps
    for speedup in (2.0, 0.9, 2.0):
        drive(gate, 600, speedup, rows=1)
    assert gate.decisions[1].is_open

    assert steps_until_open(gate, rows=8) > pause // 4


@pytest.mark.parametrize(("speed", "is_early"), [(0.4, True), (0.95, False)])
def test_waiting_for_drafts_that_never_come_ends_early_where_it_costs_time(speed: float, is_early: bool) -> None:
    gate, num_open = Gate(), 0
    for _ in range(150):
        is_open = gate.is_open(1)
        num_open += is_open
        gate.observe(1, round(1000 * (speed if is_open else 1.0)), 1.0, has_drafts=False)

    assert not gate.was_open
    assert (num_open < 25) == is_early


def clock() -> Iterator[float]:
    yield from (float(second) for second in range(100))


def test_only_steps_that_go_on_with_the_same_rows_count() -> None:
    pace = StepTimer(clock().__next__)

    assert pace.step_s([1, 1], [10, 20]) is None  # both are new
    assert pace.step_s([1, 3], [11, 23]) == 1.0
    assert pace.step_s([2, 1], [25, 12]) == 1.0  # rows may change places
    assert pace.step_s([1], [13]) is None  # one has left
    assert pace.step_s([1], [14]) == 1.0
    assert pace.step_s([1, 0], [15]) is None  # one is being prefilled
    assert pace.step_s([1, 1], [16, 40]) is None  # and has got its first token
    assert pace.step_s([1, 1], [17, 41]) == 1.0
    assert pace.step_s([1, 1], [18, 9]) is None  # one left and another came
