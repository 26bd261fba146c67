"""Which type of weights is fastest on this CPU: measured on some of the model's own layers, not believed.

The same type can be the fastest on one CPU and a hundred times too slow on the next, where the library has no kernel
for its instructions.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from specbranch.engines.protocol import EngineError

try:
    import torch
    from torch import nn
    from torch.nn.functional import linear as plain_linear
except ImportError as missing:
    raise EngineError(f"types of weights need torch ({missing}); pip install 'specbranch[torch]'") from missing

from specbranch.engines.int8 import PACKED, can_int8

PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS = (1, 8)  # a step of a draft has about so many
_SAMPLE = 32 << 20  # weights, few enough to be timed within a second
_HOPELESS = 10.0  # a type that takes so many times as long as float32 for one layer is not looked at more closely,
_HOPELESS_S = 1.0  # if the sample would take this long: the times of single layers are easily disturbed
_SPAN_S = 0.1  # how long one type is timed for one number of rows
_LEAST_RUNS = 3

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Choice:
    """The type that was chosen, and what all products of the model cost in each, for a step of each of `ROWS`."""

    dtype: str
    seconds: dict[str, tuple[float, ...]]

    def __str__(self) -> str:
        times = [f"{dtype} {_milliseconds(seconds)}" for dtype, seconds in self.seconds.items()]
        rows = " and ".join(str(count) for count in ROWS)
        return f"{self.dtype}, by the time of the model's matrix products at {rows} rows: {', '.join(times)}"


def fastest_dtype(model: Any) -> Choice:
    """The type that makes a model's products fastest here, a step of one row and a step of many taken together."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    sample = list(_first(linears))
    scale = sum(_size(one) for one in linears) / max(sum(_size(one) for one in sample), 1)
    seconds: dict[str, tuple[float, ...]] = {}
    for dtype in ("float32", "bfloat16", *(PACKED if can_int8() else ())) if sample else ():
        with contextlib.suppress(RuntimeError):  # some builds of torch name products that they do not have
            if dtype == "float32" or not _is_hopeless(dtype, sample):
                products = [_product(dtype, one) for one in sample]
                seconds[dtype] = tuple(scale * _seconds(products, sample, rows) for rows in ROWS)
    return Choice(min(seconds, key=lambda dtype: sum(seconds[dtype]), default="float32"), seconds)


def _is_hopeless(dtype: str, sample: list[nn.Linear]) -> bool:
    """Whether a type is out of the question, by its smallest layer: without a kernel, all of them take minutes."""
    smallest = min(sample, key=_size)
    product = [_product(dtype, smallest)]
    least_s = min(_once(product, [smallest], ROWS[0]) for _ in range(3))  # the first one may have to compile
    if least_s * sum(_size(one) for one in sample) < _HOPELESS_S * _size(smallest):
        return False
    return least_s > _HOPELESS * _seconds([_product("float32", smallest)], [smallest], ROWS[0])


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
    """A layer in one of the types."""
    if dtype in PACKED:
        packed: Product = PACKED[dtype](linear)
        return packed
    weight = linear.weight.detach().to(PLAIN[dtype])
    return lambda rows: plain_linear(rows.to(weight.dtype), weight)


def _seconds(products: list[Product], linears: list[nn.Linear], rows: int) -> float:
    """The least time of a pass over all layers: what disturbs a pass only adds to it."""
    passes: list[float] = []
    end_s = time.perf_counter() + _SPAN_S
    while len(passes) < 1 + _LEAST_RUNS or time.perf_counter() < end_s:
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
