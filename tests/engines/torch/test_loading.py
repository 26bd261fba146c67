"""Which dtype of weights is taken on this CPU: measurements decide, and a dtype that is too slow costs little time."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch engine needs torch")

from specbranch.engines.torch.linear import PACKED, Int8Linear, can_int8, max_kernel_rows, sums_overflow
from specbranch.engines.torch.loading import ROWS, fastest_dtype

pytestmark = pytest.mark.skipif(not can_int8(), reason="this build of torch has no int8 kernels")


@pytest.fixture
def model() -> Any:
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))


class Slow(Int8Linear):
    """As if the library had no kernel for this CPU, only a loop over all weights."""

    num_products = 0

    def forward(self, rows: Any, residual: Any = None) -> Any:
        type(self).num_products += 1
        time.sleep(1.2e-6 * self.num_bytes)
        return super().forward(rows, residual)


def test_the_fastest_dtype_is_taken_and_the_choice_says_what_each_costs(model: Any) -> None:
    choice = fastest_dtype(model)

    assert set(choice.seconds) >= {"float32", "int8", "w8a16"}
    assert all(len(seconds) == len(ROWS) and min(seconds) > 0 for seconds in choice.seconds.values())
    assert sum(choice.seconds[choice.dtype]) == min(sum(seconds) for seconds in choice.seconds.values())
    assert str(choice).startswith(f"{choice.dtype}, ") and all(f"{dtype} " in str(choice) for dtype in choice.seconds)


def test_a_dtype_without_a_kernel_is_given_up_after_a_few_products(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKED, "int8", Slow)
    monkeypatch.setitem(PACKED, "w8a16", Slow)

    choice = fastest_dtype(model)

    assert choice.dtype in ("float32", "bfloat16")
    assert not {"int8", "w8a16"} & set(choice.seconds)
    assert Slow.num_products == 6


def test_a_dtype_that_this_torch_only_names_is_left_out(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", fail)
    monkeypatch.setattr("specbranch.engines.torch.linear.Int8Product", None)
    caches = (sums_overflow, max_kernel_rows)
    for one in caches:
        one.cache_clear()
    try:
        choice = fastest_dtype(model)
    finally:
        for one in caches:
            one.cache_clear()

    assert set(choice.seconds) == {"float32", "bfloat16", "w8a16"}


def test_the_cost_of_a_few_layers_stands_for_all(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbranch.engines.torch.loading._SAMPLE", 2 * 512 * 512)
    monkeypatch.setattr(
        "specbranch.engines.torch.loading._seconds", lambda products, linears, rows: float(len(linears))
    )

    assert fastest_dtype(model).seconds["float32"] == (4.0,) * len(ROWS)


def test_a_model_without_linear_layers_keeps_float32() -> None:
    choice = fastest_dtype(torch.nn.Sequential(torch.nn.ReLU()))

    assert choice.dtype == "float32" and not choice.seconds
