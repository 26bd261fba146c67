"""Forecasts: costs become a layout, and advice follows from them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specbranch.bench.forecast import Advice, advise, forecast_speeds, measured_costs
from specbranch.bench.survey import Survey
from specbranch.simulation.presets import ModelPair, make_trace
from specbranch.simulation.simulate import Layout, Method, simulate

TRACE = make_trace(ModelPair("made", 5.0, 5, 0.85, ""), 8, 60, random.Random(0))
CHEAP = Survey({1: 0.100, 2: 0.101, 4: 0.103}, 0.110, {1: 0.020, 2: 0.022, 4: 0.026}, TRACE)
PLANNERS = ["none", "sps", "pearl", "specbranch"]


def advice_for(survey: Survey, *concurrencies: int) -> Advice:
    return advise(survey, PLANNERS, list(concurrencies))


def test_terms_are_lines_through_what_was_measured() -> None:
    terms = measured_costs(CHEAP)

    assert terms.slowdown == pytest.approx(1.1)
    assert (terms.target.base_s, terms.target.per_row_s) == pytest.approx((0.110, 0.0011))
    assert (terms.draft.base_s, terms.draft.per_row_s) == pytest.approx((0.020, 0.002))
    layout = terms.layout(4, 2.0)
    assert (layout.c, layout.row_cost, layout.token_cost) == pytest.approx((5.5, 0.1, 0.055))
    assert (layout.batch, layout.sharing) == (4, 2.0)


def test_a_step_of_several_tokens_may_be_of_another_kind() -> None:
    """As with emulated bfloat16: what one sequence pays for its first draft token, several pay anyway."""
    terms = measured_costs(replace(CHEAP, target_alone_s={1: 0.1, 2: 0.31, 4: 0.33}))

    assert (terms.target.base_s, terms.target.per_row_s, terms.entry_s) == pytest.approx((0.11, 0.011, 0.22))
    one, two = terms.layout(1), terms.layout(2)
    assert (one.c, one.entry_cost) == pytest.approx((5.5, 11.0))
    assert (two.c, two.entry_cost) == pytest.approx((16.5, 0.0))


def test_noise_never_makes_rows_or_company_cheaper() -> None:
    terms = measured_costs(Survey({1: 0.1, 2: 0.09}, 0.08, {1: 0.02, 2: 0.019}, TRACE))

    assert (terms.slowdown, terms.target.per_row_s, terms.draft.per_row_s) == (1.0, 0.0, 0.0)
    assert terms.entry_s == 0.0
    falling = measured_costs(replace(CHEAP, target_alone_s={1: 0.1, 2: 0.13, 4: 0.1}, target_beside_s=0.1))
    assert (falling.target.per_row_s, falling.entry_s) == pytest.approx((0.0, 0.015))


def test_a_forecast_is_the_simulation_less_the_slowdown() -> None:
    method = Method("pearl", {"gamma": 5})
    simulated = simulate(TRACE, method, Layout(5.5, 0.1, 1, 0.055)).speedup

    assert forecast_speeds(TRACE, method, measured_costs(CHEAP)).speed == pytest.approx(simulated / 1.1)
    assert forecast_speeds(TRACE, Method("none"), measured_costs(CHEAP), batch=32).speed == 1.0


def test_what_the_proposer_alone_costs_is_taken_from_the_most_similar_batch() -> None:
    hooked = replace(CHEAP, hooked_s={1: 0.125, 2: 0.101, 4: 0.09})
    terms = measured_costs(hooked)

    assert [terms.overhead(batch) for batch in (1, 2, 16)] == pytest.approx([1.25, 1.0, 1.0])  # noise is no gain
    method = Method("pearl", {"gamma": 5})
    bare = forecast_speeds(TRACE, method, measured_costs(CHEAP)).speed
    assert forecast_speeds(TRACE, method, terms).speed == pytest.approx(bare / 1.25)
    assert advice_for(hooked, 1).best_at(1).speed == pytest.approx(advice_for(CHEAP, 1).best_at(1).speed / 1.25)
    assert forecast_speeds(TRACE, Method("none"), terms).speed == 1.0  # to serve without a draft is to serve bare vLLM


def test_advice_names_the_best_and_what_devices_would_change() -> None:
    advice = advice_for(CHEAP, 1, 16)
    best = advice.best_at(1)

    assert best.method.planner in ("pearl", "specbranch")
    assert best.speed > 1.5
    assert advice.best_at(16).speed < best.speed
    assert advice.with_two_drafts >= best.speed * 0.98
    assert advice.with_shared_draft <= best.speed
    assert advice.stops_at(best.speed) == 1
    document = advice.as_json()
    assert len(document["forecasts"]) == 2 * len(PLANNERS)
    assert document["c"] == pytest.approx(5.5)


def test_a_draft_as_slow_as_its_target_does_not_pay() -> None:
    slow = Survey(CHEAP.target_alone_s, 0.2, {1: 0.1, 2: 0.2}, TRACE)
    advice = advice_for(slow, 1)

    assert advice.best_at(1).method.planner == "none"
    assert advice.stops_at(0.1) == 1
    assert advice_for(CHEAP, 1).stops_at(0.1) is None
