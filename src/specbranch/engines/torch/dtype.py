"""Which dtype of weights is fastest on this CPU: measured on some of the model's own layers.

The same dtype can be the fastest on one CPU and a hundred times too slow on the next, where the library has no kernel
for its instructions.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from specbranch.engines.extras import extra
from specbranch.engines.torch.int8 import PACKED, can_int8

with extra("torch"):
    import torch
    from torch import nn
    from torch.nn.functional import linear as plain_linear

PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS = (1, 8)  # typical row counts of a draft step
_SAMPLE = 32 << 20  # weights, few enough to be timed within a second
_TOO_SLOW = 10.0  # a dtype that takes this many times as long as float32 for one layer is skipped,
_TOO_SLOW_S = 1.0  # if the sample would take at least this long: times of single layers are noisy
_SPAN_S = 0.1  # how long one dtype is timed for one row count
_MIN_RUNS = 3

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen dtype, and the time of all the model's matrix products in each dtype, at each count of `ROWS`."""

    dtype: str
    seconds: dict[str, tuple[float, ...]]

    def __str__(self) -> str:
        times = [f"{dtype} {_milliseconds(seconds)}" for dtype, seconds in self.seconds.items()]
        rows = " and ".join(str(count) for count in ROWS)
        return f"{self.dtype}, the fastest here; time of all matrix products at {rows} rows: {', '.join(times)}"


def fastest_dtype(model: Any) -> Choice:
    """The dtype with the fastest matrix products here, summed over all counts of `ROWS`."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    sample = list(_first(linears))
    scale = sum(_size(one) for one in linears) / max(sum(_size(one) for one in sample), 1)
    seconds: dict[str, tuple[float, ...]] = {}
    for dtype in ("float32", "bfloat16", *(PACKED if can_int8() else ())) if sample else ():
        with contextlib.suppress(RuntimeError):  # some builds of torch list kernels that they do not have
            if dtype == "float32" or not _is_too_slow(dtype, sample):
                products = [_product(dtype, one) for one in sample]
                seconds[dtype] = tuple(scale * _seconds(products, sample, rows) for rows in ROWS)
    return Choice(min(seconds, key=lambda dtype: sum(seconds[dtype]), default="float32"), seconds)


def _is_too_slow(dtype: str, sample: list[nn.Linear]) -> bool:
    """Whether a dtype has no fast kernel here, by the smallest layer: to time all layers would take minutes."""
    smallest = min(sample, key=_size)
    product = [_product(dtype, smallest)]
    shortest_s = min(_once(product, [smallest], ROWS[0]) for _ in range(3))  # the first run may compile
    if shortest_s * sum(_size(one) for one in sample) < _TOO_SLOW_S * _size(smallest):
        return False
    return shortest_s > _TOO_SLOW * _seconds([_product("float32", smallest)], [smallest], ROWS[0])


def _first(linears: list[nn.Linear]) -> Iterator[nn.Linear]:
    """The first layers, until there are enough weights."""
    num_weights = 0
    for one in linears:
        if num_weights >= _SAMPLE:
            return
        num_weights += _size(one)
        yield one


def _size(linear: nn.Linear) -> int:
    return int(linear.weight.numel())


def _product(dtype: str, linear: nn.Linear) -> Product:
    """A layer in one of the dtypes."""
    if dtype in PACKED:
        packed: Product = PACKED[dtype](linear)
        return packed
    weight = linear.weight.detach().to(PLAIN[dtype])
    return lambda rows: plain_linear(rows.to(weight.dtype), weight)


def _seconds(products: list[Product], linears: list[nn.Linear], rows: int) -> float:
    """The shortest time of a pass over all layers: noise only adds to it."""
    passes: list[float] = []
    end_s = time.perf_counter() + _SPAN_S
    while len(passes) < 1 + _MIN_RUNS or time.perf_counter() < end_s:
        passes.append(_once(products, linears, rows))
    return min(passes[1:])


def _once(products: list[Product], linears: list[nn.Linear], rows: int) -> float:
    """The time of one pass."""
    inputs = [torch.ones(rows, one.in_features) for one in linears]
    with torch.inference_mode():
        start_s = time.perf_counter()
        for product, given in zip(products, inputs, strict=True):
            product(given)
        return time.perf_counter() - start_s


def _milliseconds(seconds: tuple[float, ...]) -> str:
    return "/".join(f"{1000 * one:.0f}" for one in seconds) + " ms"
