"""Linear layers: layers with the same input merged into one, and layers with 8-bit weights.

W8A8 also quantizes activations, each row with its own scale, and multiplies integers: more rows cost little where the
CPU has instructions for it. The product is our own (`int8_kernel`), which reads weights faster, or oneDNN's, which is
faster for many rows on a CPU with AMX: `max_kernel_rows` times both. W8A16 keeps activations in bfloat16: it needs no
such instructions and rounds less, but its time grows with each row. A row's result does not depend on the other rows
of a step, unless their number decides between the two products.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from specbranch.errors import EngineError, first_line
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch
    from torch import nn
    from torch.nn.functional import pad, rms_norm
try:
    from specbranch.engines.torch.int8_kernel import Int8Product
except EngineError:  # without Numba
    Int8Product = None  # type: ignore[assignment,misc]

log = logging.getLogger(__name__)

_MIN_PEAK = 1e-8  # lower bound of the largest value that a scale is computed from, so that no scale is zero
_MAX_INT8 = 127.0
_MAX_INT7 = 63.0
_ZERO_POINT = 128.0  # the unsigned byte that stands for zero
_MIN_ROWS = 4  # oneDNN has no fast AMX kernel for fewer rows if a layer is narrow
_CHUNK = 512  # outputs quantized at a time; a whole layer at once would pass through memory five times
_W8A16_BLOCK = 32  # the W8A16 kernel reads weights in blocks of this many inputs
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # as configs name it
_FEW_ROWS, _ALL_ROWS = 16, 1 << 30
_SAMPLE = (12, 4864, 896)  # layers, outputs and inputs to time a product with, more than a core's cache holds
_MUCH_FASTER = 1.5  # oneDNN must be this many times as fast for many rows to be worth a second copy of the weights


class MergedLinear(nn.Module):
    """Linear layers with the same input, merged into one: the outputs are concatenated."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        weights = [linear.weight.detach() for linear in linears]
        self.weight = nn.Parameter(weights[0] if len(weights) == 1 else torch.cat(weights), requires_grad=False)
        bias = merged_bias(linears)
        self.bias = None if bias is None else nn.Parameter(bias.to(self.weight), requires_grad=False)
        self._transposed = self.weight.detach().t()  # a view

    def forward(self, rows: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the concatenated outputs for rows [rows, inputs], plus `residual` if given."""
        base = self.bias if residual is None else residual
        if base is None:
            return torch.mm(rows, self._transposed)
        out = torch.addmm(base, rows, self._transposed)
        return out if residual is None or self.bias is None else out.add_(self.bias)

    def after_norm(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return the outputs for rows [rows, inputs] after an RMS norm with `weight` [inputs] and `epsilon`."""
        return self(rms_norm(rows, weight.shape, weight, epsilon))


def merged_bias(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    """Concatenate the biases in float32, with zeros for layers without one; return None if no layer has one."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            torch.zeros(len(one.weight), device=one.weight.device) if one.bias is None else one.bias.detach().float()
            for one in linears
        ]
    )


class QuantizedLinear(nn.Module):
    """Linear layers with the same input, merged into one with 8-bit weights; inputs and outputs are float32.

    `largest` is the largest integer that a weight is rounded to; `num_bytes` is the number of weight bytes that one
    step reads.
    """

    def __init__(self, *linears: nn.Linear, largest: float = _MAX_INT8) -> None:
        super().__init__()
        parts = [_quantized(part, largest) for linear in linears for part in linear.weight.detach().split(_CHUNK)]
        self._scales = torch.cat([scales for _, scales in parts])
        self._bias = merged_bias(linears)
        integers = torch.cat([integers for integers, _ in parts])
        self.num_bytes = integers.numel()
        self._pack(integers)

    def forward(self, rows: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the concatenated outputs for rows [..., inputs], up to quantization, plus `residual` if given."""
        base = None if residual is None else residual.reshape(-1, residual.shape[-1])
        out = self._product(rows.reshape(-1, rows.shape[-1]), base)
        return out.view(*rows.shape[:-1], -1)

    def after_norm(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return the outputs for rows [rows, inputs] after an RMS norm with `weight` [inputs] and `epsilon`."""
        return self(rms_norm(rows, weight.shape, weight, epsilon))

    def _pack(self, integers: torch.Tensor) -> None:
        """Store the weights [outputs, inputs] in the layout that the kernel reads."""
        raise NotImplementedError

    def _product(self, rows: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Multiply rows [rows, inputs] by the weights, and add the bias and `residual`; return a new tensor."""
        raise NotImplementedError


class Int8Linear(QuantizedLinear):
    """Linear layers in W8A8: weights are 8-bit integers, activations are integers too.

    Our own kernel serves steps of up to `max_kernel_rows` rows, oneDNN all others. oneDNN gets unsigned activations,
    because it is fast with signed ones only on a CPU with AMX. Without VNNI it adds two products of bytes in 16 bits,
    which can overflow; with 7-bit weights they cannot.
    """

    def __init__(self, *linears: nn.Linear, max_rows: int | None = None) -> None:
        """`max_rows`: the most rows that our own kernel serves; None for the fastest choice."""
        self._max_rows = max_kernel_rows() if max_rows is None else max_rows
        overflows = self._max_rows < _ALL_ROWS and sums_overflow()
        super().__init__(*linears, largest=_MAX_INT7 if overflows else _MAX_INT8)

    def serves(self, num_rows: int) -> bool:
        """Return whether our own kernel, `kernel`, multiplies that many rows."""
        return num_rows <= self._max_rows

    def after_norm(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Return the outputs for rows [rows, inputs] after an RMS norm with `weight` [inputs] and `epsilon`."""
        if not self.serves(len(rows)):
            return super().after_norm(rows, weight, epsilon)
        out = self.kernel.after_norm(rows.contiguous().numpy(), weight.numpy(), epsilon, torch.get_num_threads())
        return torch.from_numpy(out)

    def _pack(self, integers: torch.Tensor) -> None:
        self.kernel: Any = None  # an Int8Product, if it serves any step
        if self._max_rows > 0:
            bias = None if self._bias is None else self._bias.numpy()
            self.kernel = Int8Product(integers.numpy(), self._scales.numpy(), bias)
        if self._max_rows < _ALL_ROWS:
            self._zeros = torch.zeros(len(integers), dtype=torch.int64)
            self._packed = torch.ops.onednn.qlinear_prepack(integers, None)
            # What the zero point adds to every output. oneDNN could subtract it, but more slowly.
            self._shift = _ZERO_POINT * integers.sum(dim=1) * self._scales
            # A buffer for small steps; its rows beyond those in use hold leftovers.
            self._few = torch.zeros(_MIN_ROWS, integers.shape[1], dtype=torch.uint8)

    def _product(self, rows: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        count = len(rows)
        if self.serves(count):
            given = None if residual is None else residual.float().contiguous().numpy()
            return torch.from_numpy(self.kernel(rows.float().contiguous().numpy(), given, torch.get_num_threads()))
        scales = rows.abs().amax(dim=-1, keepdim=True).clamp_(min=_MIN_PEAK).div_(_MAX_INT8)
        integers = self._few if count <= _MIN_ROWS else torch.empty(rows.shape, dtype=torch.uint8)
        # The copy truncates: 0.5 makes it round.
        integers[:count].copy_(torch.div(rows, scales).add_(_ZERO_POINT + 0.5))
        out = _int8_product(integers, self._packed, self._scales, self._zeros)[:count].sub_(self._shift)
        out = out.mul_(scales) if residual is None else torch.addcmul(residual, out, scales)
        return out if self._bias is None else out.add_(self._bias)


class WeightOnlyLinear(QuantizedLinear):
    """Linear layers in W8A16: weights are 8-bit integers, activations are in bfloat16."""

    def _pack(self, integers: torch.Tensor) -> None:
        self._extra = -integers.shape[1] % _W8A16_BLOCK
        self._weight = pad(integers, (0, self._extra))
        self._scales = self._scales.bfloat16()

    def _product(self, rows: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        halves = rows.bfloat16().contiguous()
        if self._extra:
            halves = pad(halves, (0, self._extra))
        found: torch.Tensor = torch.ops.aten._weight_int8pack_mm(halves, self._weight, self._scales)
        out = found.float() if residual is None else residual + found
        return out if self._bias is None else out.add_(self._bias)


PACKED: dict[str, type[QuantizedLinear]] = {"int8": Int8Linear, "w8a16": WeightOnlyLinear}


@cache
def max_kernel_rows() -> int:
    """Time our own int8 product and oneDNN's on this CPU; return the most rows for which to use our own.

    Return 0 if ours takes longer for two draft steps, of one and of eight rows, or if Numba is missing. Return 16 if
    oneDNN's is over 1.5 times as fast for 64 rows, as with AMX: it then serves larger steps, at the cost of a second
    copy of the weights. Otherwise there is no limit.
    """
    if Int8Product is None:
        return 0
    try:
        return _timed_kernel_rows()
    except Exception as error:  # Numba and LLVM fail in many ways, and oneDNN's product is there
        log.warning("the int8 product of our own does not run here (%s); oneDNN's is used", first_line(error))
        return 0


def _timed_kernel_rows() -> int:
    count, *shape = _SAMPLE
    weight = torch.randint(-127, 128, shape, dtype=torch.int8)
    scales, zeros = torch.ones(shape[0]), torch.zeros(shape[0], dtype=torch.int64)
    own = [Int8Product(weight.numpy(), scales.numpy(), None) for _ in range(count)]
    packed = [torch.ops.onednn.qlinear_prepack(weight.clone(), None) for _ in range(count)]
    threads = torch.get_num_threads()
    for num_rows in (1, 8):  # every form must compile here, where a failure leaves oneDNN's
        rows, residual = np.ones((num_rows, shape[1]), np.float32), np.zeros((num_rows, shape[0]), np.float32)
        own[0](rows, residual, threads)
        own[0].after_norm(rows, rows[0], 1e-6, threads)

    def seconds(num_rows: int, run: Callable[[int, torch.Tensor], object]) -> float:
        rows = torch.ones(num_rows, shape[1])
        times_s = []
        for _ in range(4):  # the first run may compile
            start_s = time.perf_counter()
            for index in range(count):
                run(index, rows)
            times_s.append(time.perf_counter() - start_s)
        return min(times_s[1:])

    def run_onednn(index: int, rows: torch.Tensor) -> object:
        return _int8_product(rows.expand(max(len(rows), _MIN_ROWS), -1).byte(), packed[index], scales, zeros)

    ours, theirs = (
        {num_rows: seconds(num_rows, run) for num_rows in (1, 8, 64)}
        for run in (lambda index, rows: own[index](rows.numpy(), None, threads), run_onednn)
    )
    if ours[1] + ours[8] > theirs[1] + theirs[8]:
        return 0
    return _FEW_ROWS if ours[64] > _MUCH_FASTER * theirs[64] else _ALL_ROWS


@cache
def sums_overflow() -> bool:
    """Compute one int8 product, and return whether it is wrong on this CPU because sums of large values overflow.

    oneDNN does not say whether they do.
    """
    width, most = 64, 255
    weight = torch.full((width, width), int(_MAX_INT8), dtype=torch.int8)
    rows = torch.full((_MIN_ROWS, width), most, dtype=torch.uint8)
    ones, zeros = torch.ones(width), torch.zeros(width, dtype=torch.int64)
    out = _int8_product(rows, torch.ops.onednn.qlinear_prepack(weight, None), ones, zeros)
    return bool((out != width * most * _MAX_INT8).any())


def _int8_product(
    integers: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        integers, 1.0, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out


def _quantized(weight: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [outputs, inputs] as integers of at most `largest`, and the scale of each output."""
    scales = weight.abs().amax(dim=1).float().clamp_(min=_MIN_PEAK).div_(largest)
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def can_int8() -> bool:
    """Return whether this build of torch has the kernels for 8-bit weights, W8A8 and W8A16."""
    return hasattr(torch.ops.onednn, "qlinear_pointwise") and hasattr(torch.ops.aten, "_weight_int8pack_mm")


def pack_linears(model: Any, kind: type[QuantizedLinear]) -> Any:
    """Replace the model's linear layers by layers of the class `kind`, in place; return the model.

    Layers that choose experts stay as they are: they are small, and some models read their weights themselves.
    """
    experts = {getattr(getattr(model, "config", None), name, None) for name in _NUM_EXPERTS}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child.out_features not in experts:
                setattr(module, name, kind(child))
    return model


def packed_bytes(model: Any) -> int:
    """Return the bytes of a model's 8-bit weights."""
    return sum(module.num_bytes for module in model.modules() if isinstance(module, QuantizedLinear))
