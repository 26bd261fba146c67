"""Our own int8 product: exact integers, whatever the shapes, in both forms, on one thread and on two."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="the torch engine needs torch")
pytest.importorskip("numba", reason="the kernel needs Numba")

from specbranch.engines.torch.int8_kernel import Int8Product, has_byte_product, pack

FORMS = [False, *([True] if has_byte_product() else [])]
SHAPES = [(32, 4), (96, 64), (37, 101), (1, 3), (1152, 896)]


@pytest.mark.parametrize("uses_bytes", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 17])
def test_rows_of_integers_give_the_exact_product(uses_bytes: bool, shape: tuple[int, int], num_rows: int) -> None:
    """Rows of integers whose largest has the largest code are quantized without any loss."""
    rng = np.random.default_rng(num_rows)
    weights = rng.integers(-127, 128, shape, dtype=np.int8)
    rows = rng.integers(-127, 128, (num_rows, shape[1])).astype(np.float32)
    rows[:, 0] = 127
    residual = rng.integers(-100, 100, (num_rows, shape[0])).astype(np.float32)
    bias = rng.integers(-100, 100, shape[0]).astype(np.float32)
    product = Int8Product(weights, np.ones(shape[0], np.float32), bias, uses_bytes=uses_bytes)
    product.max_code = 127

    wanted = rows.astype(np.int64) @ weights.T.astype(np.int64) + bias
    np.testing.assert_allclose(product(rows, None, 1), wanted, rtol=1e-6)
    np.testing.assert_allclose(product(rows, residual, 1), wanted + residual, rtol=1e-5, atol=0.1)


@pytest.mark.parametrize("uses_bytes", FORMS)
def test_the_largest_sums_do_not_overflow(uses_bytes: bool) -> None:
    width = 8192
    product = Int8Product(np.full((32, width), 127, np.int8), np.ones(32, np.float32), None, uses_bytes=uses_bytes)

    for sign in (1, -1):
        found = product(np.full((2, width), sign, np.float32), None, 1)
        np.testing.assert_allclose(found, sign * 127.0 * width, rtol=1e-5)


@pytest.mark.parametrize("uses_bytes", FORMS)
def test_two_threads_compute_what_one_does(uses_bytes: bool) -> None:
    rng = np.random.default_rng(1)
    product = Int8Product(
        rng.integers(-127, 128, (320, 64), dtype=np.int8), rng.random(320), None, uses_bytes=uses_bytes
    )
    rows = rng.standard_normal((5, 64)).astype(np.float32)

    assert (product(rows, None, 1) == product(rows, None, 2)).all()


@pytest.mark.parametrize("uses_bytes", FORMS)
def test_a_row_of_zeros_gives_the_bias(uses_bytes: bool) -> None:
    bias = np.arange(32, dtype=np.float32)
    product = Int8Product(np.ones((32, 8), np.int8), np.ones(32, np.float32), bias, uses_bytes=uses_bytes)

    found = product(np.zeros((1, 8), np.float32), None, 1)

    np.testing.assert_allclose(found[0], bias, atol=1e-6)


def test_packed_weights_begin_at_a_cache_line() -> None:
    for outputs in range(1, 70, 7):
        packed = pack(np.ones((outputs, 12), np.int8))

        assert packed.ctypes.data % 64 == 0
        assert packed.sum() == outputs * 12
