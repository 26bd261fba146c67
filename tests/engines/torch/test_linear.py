"""Linear layers in 8 bits: as near to the plain ones as 8 bits allow, on every CPU, and each row by itself."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch engine needs torch")

from specbranch.engines.torch import linear as linear_module
from specbranch.engines.torch.int8_kernel import Int8Product
from specbranch.engines.torch.linear import (
    Int8Linear,
    QuantizedLinear,
    WeightOnlyLinear,
    can_int8,
    max_kernel_rows,
    sums_overflow,
)

pytestmark = pytest.mark.skipif(not can_int8(), reason="this build of torch has no int8 kernels")
MAX_APART = {"Onednn": 0.02, "Kernel": 0.02, "Both": 0.02, "WeightOnlyLinear": 0.01}  # relative, over all outputs


class Onednn(Int8Linear):
    """All rows by oneDNN."""

    def __init__(self, *linears: Any) -> None:
        super().__init__(*linears, max_rows=0)


class Kernel(Int8Linear):
    """All rows by our own kernel."""

    def __init__(self, *linears: Any) -> None:
        super().__init__(*linears, max_rows=1 << 30)


class Both(Int8Linear):
    """Few rows by our own kernel, more rows by oneDNN."""

    def __init__(self, *linears: Any) -> None:
        super().__init__(*linears, max_rows=4)


KINDS = [Onednn, Kernel, Both, WeightOnlyLinear]


def plain(num_inputs: int, num_outputs: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    linear = torch.nn.Linear(num_inputs, num_outputs).requires_grad_(False)
    linear.weight.mul_(torch.rand(num_outputs, 1) + 0.1)  # channels of unlike size
    return linear


def ones() -> tuple[Any, Any]:
    """All weights and all activations at their largest."""
    linear = torch.nn.Linear(512, 64, bias=False).requires_grad_(False)
    torch.nn.init.ones_(linear.weight)
    return linear, torch.ones(4, 512)


def apart(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(576, 192), (144, 512), (100, 36), (896, 1152)])
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 16])
def test_it_is_the_plain_layer_within_eight_bits(
    kind: type[QuantizedLinear], shape: tuple[int, int], num_rows: int
) -> None:
    linear = plain(*shape)
    rows = torch.randn(2, num_rows, shape[0])

    found = kind(linear)(rows)

    assert found.shape == (2, num_rows, shape[1])
    assert apart(found, linear(rows)) < MAX_APART[kind.__name__]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_lie_anyhow_in_memory(kind: type[QuantizedLinear]) -> None:
    linear = plain(64, 96)
    rows = torch.randn(64, 3).T

    assert apart(kind(linear)(rows), linear(rows)) < MAX_APART[kind.__name__]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_one_input_are_joined_and_added_to_what_is_there(kind: type[QuantizedLinear]) -> None:
    one, other = plain(64, 96), torch.nn.Linear(64, 32, bias=False).requires_grad_(False)
    rows, residual = torch.randn(1, 3, 64), torch.randn(1, 3, 128)

    found = kind(one, other)(rows, residual)

    assert apart(found - residual, torch.cat((one(rows), other(rows)), dim=-1)) < MAX_APART[kind.__name__]


@pytest.mark.parametrize("kind", [Onednn, Kernel, WeightOnlyLinear])
def test_a_row_is_the_same_whatever_is_beside_it(kind: type[QuantizedLinear]) -> None:
    packed = kind(plain(256, 320))
    rows = torch.randn(9, 256) * torch.logspace(-3, 3, 9)[:, None]

    together = packed(rows)

    for index in range(9):
        assert torch.allclose(packed(rows[index : index + 1])[0], together[index], rtol=1e-5, atol=0)


def test_the_largest_sums_are_not_lost() -> None:
    """Without VNNI, weights of 8 bits would lose half of it."""
    linear, rows = ones()

    assert apart(Onednn(linear)(rows), linear(rows)) < 1e-3


def test_weights_of_eight_bits_are_used_exactly_where_sums_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the CPU's own answer is not believed, the largest sums show it."""
    linear, rows = ones()
    overflows = sums_overflow()
    monkeypatch.setattr("specbranch.engines.torch.linear.sums_overflow", lambda: False)

    assert (apart(Onednn(linear)(rows), linear(rows)) > 0.1) == overflows


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_may_come_before_it(kind: type[QuantizedLinear]) -> None:
    linear = plain(256, 96)
    rows, weight = torch.randn(5, 256) * torch.logspace(-2, 2, 5)[:, None], torch.rand(256) + 0.5

    found = kind(linear).after_norm(rows, weight, 1e-6)

    normed = rows / (rows.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight
    assert apart(found, linear(normed)) < MAX_APART[kind.__name__]


@pytest.mark.parametrize(
    ("own_ms", "onednn_ms", "wanted"),
    [
        ({1: 9, 8: 9, 64: 9}, 1, 0),  # oneDNN is faster
        ({1: 1, 8: 1, 64: 1}, 9, 1 << 30),
        ({1: 1, 8: 1, 64: 20}, 5, 16),  # oneDNN is faster for many rows
    ],
)
def test_the_faster_product_is_chosen_by_time(
    monkeypatch: pytest.MonkeyPatch, own_ms: dict[int, int], onednn_ms: int, wanted: int
) -> None:
    monkeypatch.setattr(linear_module, "_SAMPLE", (1, 64, 64))
    monkeypatch.setattr(Int8Product, "__call__", lambda self, rows, *_: time.sleep(own_ms[len(rows)] / 1000))
    monkeypatch.setattr(linear_module, "_int8_product", lambda *_: time.sleep(onednn_ms / 1000))

    assert max_kernel_rows.__wrapped__() == wanted
