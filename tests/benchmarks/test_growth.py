"""The run that finds why vLLM's engine grows: how it counts products and what it makes of samples."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.root import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def growth() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))

    yield importlib.import_module("growth")
    sys.path.remove(str(BENCHMARKS))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("under_load", "growth")]:
        del sys.modules[name]


def line(variant: str, unit: str, sizes: dict[int, float]) -> dict[str, Any]:
    return {"variant": variant, "samples": [{unit: count, "anonymous": size} for count, size in sizes.items()]}


def test_a_product_that_both_caches_have_dropped_is_a_miss(growth: Any) -> None:
    once = [(576, 960, size) for size in range(1, 101)]

    assert growth.count_misses(once + once, capacity=1024) == 100
    assert growth.count_misses(once + once, capacity=64) == 200


def test_vllms_own_cache_of_a_shape_answers_before_that_of_onednn(growth: Any) -> None:
    few = [(576, 960, size) for size in range(32)]

    assert growth.count_misses(few * 3, capacity=1) == 32


def test_growth_leaves_out_the_requests_of_the_warm_up(growth: Any) -> None:
    samples = {0: 100.0, 250: 200.0, 500: 210.0, 750: 220.0}

    assert growth.growth(line(growth.BARE, "requests", samples)) == pytest.approx(40.0)


def test_growth_without_an_engine_counts_from_the_first_product(growth: Any) -> None:
    assert growth.growth(line(growth.PRODUCTS, "products", {0: 10.0, 100: 90.0})) == pytest.approx(800.0)


def test_each_case_with_a_small_cache_has_a_partner_with_the_usual_one(growth: Any) -> None:
    found = set(growth.cases(trials=2, bounded=64))

    small = [case for case in found if case.capacity == 64]
    assert len(small) == 8
    assert all(growth.Case(case.variant, growth.USUAL, case.trial) in found for case in small)
    assert {case.capacity for case in growth.cases(trials=1, bounded=0)} == {growth.USUAL}
