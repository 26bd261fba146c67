"""An int8 matrix product that reads weights as fast as memory delivers them, compiled by Numba for this CPU.

A draft step has few rows, so its time is that of reading the weights. Weights lie in the order in which the product
reads them, and are prefetched into the CPU's cache. For 32 outputs at a time, four inputs of each output follow each
other; then come the next four. Numba emits one tile of the product from LLVM's own instructions: a CPU with AVX-512
VNNI multiplies bytes (`vpdpbusd`); any other CPU multiplies 16-bit activations with bytes, for which LLVM chooses the
best instruction. With several threads, the product runs on those of torch (`ThreadTeam`).
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbranch.extensions import optional_import

with optional_import("torch"):
    from llvmlite import binding, ir
    from numba import carray, cfunc, njit, types
    from numba.extending import intrinsic

Array = NDArray[Any]

_BLOCK = 32  # outputs
_QUAD = 4  # inputs
_AHEAD = 4096  # bytes between the weights in use and those that are fetched
_ZERO_POINT = 128  # the unsigned byte that stands for zero
_MAX_BYTE, _MAX_SHORT, _MAX_SUM = 127, 32767, (1 << 31) - 1
_FAST = {"fastmath": True, "boundscheck": False, "error_model": "numpy"}
_NUM_NUMBERS = 13  # of a task for several threads: a counter, eight addresses, four sizes
_NUM_SHARES = 8  # of the blocks for each thread, so that a thread that is held up leaves its shares to the others
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_LANES = ir.VectorType(_I32, 16)
_OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b.*\.so")


def cached(decorate: Callable[..., Any], *signature: Any, **options: Any) -> Callable[[Any], Any]:
    """Return Numba's decorator with a cache on disk, or without one if no directory for it can be written."""

    def compiled(function: Any) -> Any:
        try:
            return decorate(*signature, cache=True, **options, **_FAST)(function)
        except RuntimeError:
            return decorate(*signature, **options, **_FAST)(function)

    return compiled


def has_byte_product() -> bool:
    """Return whether this CPU multiplies unsigned by signed bytes without overflow (AVX-512 VNNI)."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512vnni") and features.get("avx512vl"))


def pack(integers: Array) -> Array:
    """Return int8 weights [outputs, inputs] in the order in which the product reads them, padded with zeros.

    The shape is [blocks, quads, 32, 4]. The memory begins at a multiple of 64 bytes, as the product requires.
    """
    num_outputs, num_inputs = integers.shape
    blocks, quads = -(-num_outputs // _BLOCK), -(-num_inputs // _QUAD)
    shape = (blocks, quads, _BLOCK, _QUAD)
    size = blocks * quads * _BLOCK * _QUAD
    memory = np.zeros(size + 64, dtype=np.int8)
    start = -memory.ctypes.data % 64
    packed: Array = memory[start : start + size].reshape(shape)
    for block in range(blocks):
        part = integers[block * _BLOCK : (block + 1) * _BLOCK]
        whole = np.zeros((_BLOCK, quads * _QUAD), dtype=np.int8)
        whole[: len(part), :num_inputs] = part
        packed[block] = whole.reshape(_BLOCK, quads, _QUAD).transpose(1, 0, 2)
    return packed


class Int8Product:
    """The product with one matrix of int8 weights: activations are quantized row by row, outputs are float32.

    `scales` [outputs] are the factors from integers to weights, one for each output; `bias` [outputs] is added to each
    row.
    """

    def __init__(self, integers: Array, scales: Array, bias: Array | None, *, uses_bytes: bool | None = None) -> None:
        """Pack the weights; `uses_bytes` None: multiply bytes if this CPU has the instructions for it."""
        self._uses_bytes = has_byte_product() if uses_bytes is None else uses_bytes
        self._num_outputs, self._num_inputs = integers.shape
        self._packed = pack(integers)
        self._padded = self._packed.shape[1] * _QUAD
        zero = _ZERO_POINT if self._uses_bytes else 0
        sums = integers.sum(axis=1, dtype=np.int32)
        self._scales, self._zeros = self._in_blocks(scales, np.float32), self._in_blocks(zero * sums, np.int32)
        self._bias = self._in_blocks(np.zeros(len(scales)) if bias is None else bias, np.float32)
        self.max_code = _MAX_BYTE if self._uses_bytes else min(_MAX_SHORT, _MAX_SUM // (_MAX_BYTE * self._padded))

    def __call__(self, rows: Array, residual: Array | None, num_threads: int) -> Array:
        """Multiply float32 rows [rows, inputs] by the weights; return [rows, outputs], plus `residual` if given."""
        codes, scales = self.new_codes(len(rows))
        quantize(rows, self.max_code, codes, scales)
        return self.multiply(codes, scales, residual, num_threads)

    def after_norm(self, rows: Array, weight: Array, epsilon: float, num_threads: int) -> Array:
        """Return the outputs for rows [rows, inputs] after an RMS norm with `weight` [inputs] and `epsilon`."""
        codes, scales = self.new_codes(len(rows))
        normalize_and_quantize(rows, weight, epsilon, self.max_code, codes, scales)
        return self.multiply(codes, scales, None, num_threads)

    def _in_blocks(self, values: Array, dtype: Any) -> Array:
        """Return `values`, one for each output, padded with zeros to whole blocks of outputs."""
        found = np.zeros(len(self._packed) * _BLOCK, dtype=dtype)
        found[: self._num_outputs] = values
        return found

    def new_codes(self, num_rows: int) -> tuple[Array, Array]:
        make = np.empty if self._padded == self._num_inputs else np.zeros
        codes = make((num_rows, self._padded), dtype=np.uint8 if self._uses_bytes else np.int16)
        return codes, np.empty(num_rows, dtype=np.float32)

    def multiply(self, codes: Array, scales: Array, residual: Array | None, num_threads: int) -> Array:
        out = np.empty((len(codes), len(self._scales)), dtype=np.float32)
        is_whole = len(self._scales) == self._num_outputs
        base = residual if is_whole else None
        arrays = (codes, scales, self._packed, self._scales, self._zeros, self._bias, base, out)
        team = thread_team() if num_threads > 1 else None
        if team is None:
            _multiply(*arrays)
        else:
            team.multiply(arrays, num_threads)
        if is_whole:
            return out
        out = np.ascontiguousarray(out[:, : self._num_outputs])
        return out if residual is None else out + residual


def _function(builder: Any, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """Return LLVM's intrinsic function `name`, after declaring it if the module has not yet done so."""
    return builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _load(builder: Any, pointer: Any, offset: Any, kind: Any, align: int) -> Any:
    """Emit a load of a `kind` at `offset` elements after a pointer; `align` is the alignment in bytes."""
    loaded = builder.load(builder.bitcast(builder.gep(pointer, [offset]), kind.as_pointer()), typ=kind)
    loaded.align = align
    return loaded


def broadcast(builder: Any, value: Any, num_lanes: int) -> Any:
    """Emit a vector that has `value` in all its lanes."""
    kind = ir.VectorType(value.type, num_lanes)
    nothing, first = ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(_I32, num_lanes), [0] * num_lanes)
    return builder.shuffle_vector(builder.insert_element(nothing, value, _I32(0)), nothing, first)


def _add_pairs(builder: Any, low: Any, high: Any) -> Any:
    """Emit the sums of neighbouring lanes of two vectors, those of `low` first."""
    sums = []
    for start in (0, 1):
        mask = ir.Constant(_LANES, list(range(start, 32, 2)))
        sums.append(builder.shuffle_vector(low, high, mask))
    return builder.add(*sums)


def _emit_bytes(builder: Any, weights: Any, offset: Any, quads: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
    """Emit the products of four unsigned bytes of each row with the weights at `offset`, added to the rows' sums."""
    multiply = _function(builder, "llvm.x86.avx512.vpdpbusd.512", _LANES, [_LANES] * 3)
    halves = [_load(builder, weights, builder.add(offset, _I64(64 * half)), _LANES, 64) for half in range(2)]
    rows = [broadcast(builder, quad, 16) for quad in quads]
    pairs = [(row, half) for row in rows for half in halves]
    return [builder.call(multiply, [total, *pair]) for total, pair in zip(sums, pairs, strict=True)]


def _emit_shorts(builder: Any, weights: Any, offset: Any, quads: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
    """Emit the products of four 16-bit integers of each row with the weights at `offset`, added to the rows' sums."""
    kind, wide, short = ir.VectorType(_I8, 32), ir.VectorType(_I32, 32), ir.VectorType(_I16, 32)
    parts = [
        builder.sext(_load(builder, weights, builder.add(offset, _I64(32 * part)), kind, 32), wide) for part in range(4)
    ]
    found = []
    for quad, row_sums in zip(quads, _rows_of(sums, 4), strict=True):
        row = builder.sext(builder.bitcast(broadcast(builder, quad, 8), short), wide)
        for part, total in zip(parts, row_sums, strict=True):
            product = builder.mul(row, part, flags=["nsw"])
            found.append(builder.add(total, _add_halves(builder, product)))
    return found


def _add_halves(builder: Any, product: Any) -> Any:
    """Emit the sums of neighbouring lanes of a vector of 32, in a form that LLVM turns into one instruction."""
    even, odd = (ir.Constant(_LANES, list(range(start, 32, 2))) for start in (0, 1))
    return builder.add(builder.shuffle_vector(product, product, even), builder.shuffle_vector(product, product, odd))


def _rows_of(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _tile(num_rows: int) -> Any:
    """Return a function for Numba that writes the outputs of `num_rows` rows in one block of 32 to `out`.

    It is called as `tile(codes, row, packed, block, scales, weight_scales, zeros, bias, base, out)`, where `row` is the
    first of the rows, and `base`, if not None, is added to the outputs.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        _: Any, codes: Any, row: Any, packed: Any, block: Any, scales: Any, weight_scales: Any, zeros: Any, bias: Any,
        base: Any, out: Any,
    ) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
        kinds = (codes, types.intp, packed, types.intp, scales, weight_scales, zeros, bias, base, out)

        def emit(context: Any, builder: Any, given: Any, values: Any) -> Any:
            arrays: list[Any] = [
                context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else None
                for kind, value in zip(given.args, values, strict=True)
            ]
            uses_bytes = codes.dtype == types.uint8
            width = builder.extract_value(arrays[0].shape, 1)
            weights = builder.gep(arrays[2].data, [builder.mul(values[3], builder.mul(width, _I64(_BLOCK)))])
            rows = [builder.add(values[1], _I64(index)) for index in range(num_rows)]
            starts = [builder.gep(arrays[0].data, [builder.mul(one, width)]) for one in rows]
            sums = _emit_loop(builder, weights, starts, width, uses_bytes)
            _emit_outputs(builder, arrays, rows, builder.mul(values[3], _I64(_BLOCK)), sums)
            return context.get_dummy_value()

        return types.void(*kinds), emit

    return tile


def _emit_outputs(builder: Any, arrays: Sequence[Any], rows: Sequence[Any], start: Any, sums: Sequence[Any]) -> None:
    """Emit the code that turns a tile's integer sums into float32 outputs and writes these to `out`.

    `sums` has two vectors for each row: the sums of the first and the last 16 outputs of the block that begins at
    output `start`. `arrays` has an entry for each argument of the tile (see `_tile`): the array, or None if it is no
    array.
    """
    scales, weight_scales, zeros, bias, base, out = arrays[4:]
    floats = ir.VectorType(ir.FloatType(), 16)
    num_outputs = builder.extract_value(out.shape, 1)
    for half in range(2):
        place = builder.add(start, _I64(16 * half))
        zero, scale, shift = (
            _load(builder, one.data, place, kind, 4)
            for one, kind in ((zeros, _LANES), (weight_scales, floats), (bias, floats))
        )
        for index, row in enumerate(rows):
            row_scale = broadcast(builder, builder.load(builder.gep(scales.data, [row])), 16)
            value = builder.sitofp(builder.sub(sums[2 * index + half], zero), floats)
            value = builder.fadd(builder.fmul(value, builder.fmul(scale, row_scale)), shift)
            offset = builder.add(builder.mul(row, num_outputs), place)
            if base is not None:
                value = builder.fadd(value, _load(builder, base.data, offset, floats, 4))
            pointer = builder.bitcast(builder.gep(out.data, [offset]), floats.as_pointer())
            builder.store(value, pointer).align = 4


def _emit_loop(builder: Any, weights: Any, rows: Sequence[Any], width: Any, uses_bytes: bool) -> list[Any]:
    """Emit the loop that multiplies and sums over all inputs; return two vectors of 16 sums for each row.

    They are the sums of the first and the last 16 outputs of the block.
    """
    num_sums = len(rows) * (2 if uses_bytes else 4)
    before, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    place = builder.phi(_I64)
    place.add_incoming(_I64(0), before)
    sums = [builder.phi(_LANES) for _ in range(num_sums)]
    for one in sums:
        one.add_incoming(ir.Constant(_LANES, [0] * 16), before)
    offset = builder.mul(place, _I64(_BLOCK))
    fetch = _function(builder, "llvm.prefetch.p0", ir.VoidType(), [ir.PointerType(), _I32, _I32, _I32])
    for line in (0, 64):
        pointer = builder.gep(weights, [builder.add(offset, _I64(_AHEAD + line))])
        builder.call(fetch, [builder.bitcast(pointer, ir.PointerType()), _I32(0), _I32(3), _I32(1)])
    kind, emit = (_I32, _emit_bytes) if uses_bytes else (_I64, _emit_shorts)
    quads = [_load(builder, row, place, kind, kind.width // 8) for row in rows]
    totals = emit(builder, weights, offset, quads, sums)
    following = builder.add(place, _I64(_QUAD))
    place.add_incoming(following, loop)
    for one, total in zip(sums, totals, strict=True):
        one.add_incoming(total, loop)
    builder.cbranch(builder.icmp_signed("<", following, width), loop, end)
    builder.position_at_end(end)
    return totals if uses_bytes else [_add_pairs(builder, low, high) for low, high in _rows_of(totals, 2)]


_tile_1, _tile_2, _tile_4, _tile_8 = _tile(1), _tile(2), _tile(4), _tile(8)


@cached(njit, nogil=True)
def quantize(rows: Array, max_code: int, codes: Array, scales: Array) -> None:
    """Quantize each row: write its integers to `codes`, offset by 128 if these are bytes, and its scale to `scales`."""
    # The conversion truncates, so values are made positive first, and 0.5 makes it round.
    shift = _ZERO_POINT if codes.itemsize == 1 else _MAX_SHORT
    offset = 0 if codes.itemsize == 1 else _MAX_SHORT
    half = np.float32(shift) + np.float32(0.5)
    for row in range(rows.shape[0]):
        # LLVM makes vectors of the maximum of integers, and the bits of a positive float32 are in the order of floats.
        bits = np.int32(np.float32(1e-8).view(np.int32))
        for place in range(rows.shape[1]):
            bits = max(bits, np.float32(abs(rows[row, place])).view(np.int32))
        peak = np.int32(bits).view(np.float32)
        scales[row] = peak / np.float32(max_code)
        factor = np.float32(max_code) / peak
        for place in range(rows.shape[1]):
            codes[row, place] = np.int32(rows[row, place] * factor + half) - offset


@cached(njit, nogil=True)
def normalize_and_quantize(
    rows: Array, weight: Array, epsilon: float, max_code: int, codes: Array, scales: Array
) -> None:
    """Quantize each row after an RMS norm, whose factor for the whole row is applied to the row's scale alone."""
    num_inputs = rows.shape[1]
    weighted = np.empty((1, num_inputs), np.float32)
    for row in range(rows.shape[0]):
        square = np.float32(0)
        for place in range(num_inputs):
            value = rows[row, place]
            square += value * value
            weighted[0, place] = value * weight[place]
        quantize(weighted, max_code, codes[row : row + 1], scales[row : row + 1])
        scales[row] /= np.sqrt(square / np.float32(num_inputs) + np.float32(epsilon))


@cached(njit, nogil=True)
def _multiply_blocks(
    codes: Array, scales: Array, packed: Array, weight_scales: Array, zeros: Array, bias: Array, base: Array | None,
    out: Array, first: int, last: int,
) -> None:  # fmt: skip
    """Compute the outputs of the blocks `first` to `last` - 1 for all rows, each block's rows in tiles."""
    num_rows = codes.shape[0]
    for block in range(first, last):
        row = 0
        # Eight rows of 16-bit integers need more registers than there are.
        while codes.itemsize == 1 and num_rows - row >= 8:
            _tile_8(codes, row, packed, block, scales, weight_scales, zeros, bias, base, out)
            row += 8
        while num_rows - row >= 4:
            _tile_4(codes, row, packed, block, scales, weight_scales, zeros, bias, base, out)
            row += 4
        if num_rows - row >= 2:
            _tile_2(codes, row, packed, block, scales, weight_scales, zeros, bias, base, out)
            row += 2
        if num_rows > row:
            _tile_1(codes, row, packed, block, scales, weight_scales, zeros, bias, base, out)


@cached(njit, nogil=True)
def _multiply(
    codes: Array, scales: Array, packed: Array, weight_scales: Array, zeros: Array, bias: Array, base: Array | None,
    out: Array,
) -> None:  # fmt: skip
    """Compute all outputs of all rows, on this thread."""
    last = packed.shape[0]
    _multiply_blocks(codes, scales, packed, weight_scales, zeros, bias, base, out, 0, last)


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_: Any, __: Any) -> tuple[Any, Callable[..., Any]]:
    """Return a function for Numba that turns an address into a pointer."""

    def emit(context: Any, builder: Any, ___: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def _take(_: Any, numbers: Any, __: Any) -> tuple[Any, Callable[..., Any]]:
    """Return a function for Numba that atomically adds one to an element of an array and returns its old value."""

    def emit(context: Any, builder: Any, given: Any, values: Any) -> Any:
        array = context.make_array(given.args[0])(context, builder, values[0])
        return builder.atomic_rmw("add", builder.gep(array.data, [values[1]]), _I64(1), "monotonic")

    return types.int64(numbers, types.int64), emit


@cached(njit)
def _task_of(
    codes: Array, scales: Array, packed: Array, weight_scales: Array, zeros: Array, bias: Array, base: Array | None,
    out: Array, num_shares: int,
) -> tuple[Array, int]:  # fmt: skip
    """Return the task that several threads share, as an array of addresses and sizes, and the address of this array."""
    task = np.zeros(_NUM_NUMBERS, np.int64)
    task[1], task[2], task[3] = codes.ctypes.data, scales.ctypes.data, packed.ctypes.data
    task[4], task[5], task[6] = weight_scales.ctypes.data, zeros.ctypes.data, bias.ctypes.data
    task[7] = out.ctypes.data
    if base is not None:
        task[8] = base.ctypes.data
    task[9], task[10], task[11] = codes.shape[0], codes.shape[1], packed.shape[0]
    task[12] = min(packed.shape[0], num_shares)
    return task, task.ctypes.data


def _share_function(code_type: Any, has_base: bool) -> Any:
    """Compile the function that each thread of a team runs: it takes shares of the blocks until none is left.

    Its argument is the address of the task, the array that `_task_of` returns.
    """

    def run(data: Any) -> None:
        task = carray(data, (_NUM_NUMBERS,), np.int64)
        num_rows, width, num_blocks, num_shares = task[9], task[10], task[11], task[12]
        num_outputs = num_blocks * _BLOCK
        codes = carray(_pointer(task[1]), (num_rows, width), code_type)
        scales = carray(_pointer(task[2]), (num_rows,), np.float32)
        packed = carray(_pointer(task[3]), (num_blocks, width // _QUAD, _BLOCK, _QUAD), np.int8)
        weight_scales = carray(_pointer(task[4]), (num_outputs,), np.float32)
        zeros = carray(_pointer(task[5]), (num_outputs,), np.int32)
        bias = carray(_pointer(task[6]), (num_outputs,), np.float32)
        out = carray(_pointer(task[7]), (num_rows, num_outputs), np.float32)
        base = carray(_pointer(task[8]), (num_rows, num_outputs), np.float32) if has_base else None
        share = _take(task, 0)
        while share < num_shares:
            first, last = share * num_blocks // num_shares, (share + 1) * num_blocks // num_shares
            _multiply_blocks(codes, scales, packed, weight_scales, zeros, bias, base, out, first, last)
            share = _take(task, 0)

    return cfunc(types.void(types.voidptr), **_FAST)(run)


class ThreadTeam:
    """The threads of torch's OpenMP library, on which our product runs too.

    A second pool of threads would compete with torch's for the same cores: the threads of both spin while they wait.
    """

    def __init__(self, start: Any) -> None:
        """`start` is the library's function `GOMP_parallel`."""
        start.argtypes, start.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        self._start = start
        self._functions: dict[tuple[int, bool], Any] = {}  # by the size of codes, and whether there is a base

    def multiply(self, arrays: Sequence[Array | None], num_threads: int) -> None:
        """Compute all outputs of all rows; `arrays` are the arguments of `_multiply`, in its order."""
        codes, base = arrays[0], arrays[6]
        assert codes is not None
        kind = codes.itemsize, base is not None
        if kind not in self._functions:
            self._functions[kind] = _share_function(codes.dtype.type, base is not None)
        task = _task_of(*arrays, _NUM_SHARES * num_threads)
        self._start(self._functions[kind].address, task[1], num_threads, 0)


@cache
def thread_team() -> ThreadTeam | None:
    """Return the threads of torch's OpenMP library; None if torch was built without one, or with one of another kind.

    Call it after torch was imported.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    found = {path for path in (line.split()[-1] for line in lines if "/" in line) if _OPENMP.match(Path(path).name)}
    for path in sorted(found, key=lambda one: "torch" not in one):  # torch brings its own
        with contextlib.suppress(OSError, AttributeError):
            return ThreadTeam(ctypes.CDLL(path).GOMP_parallel)
    return None
