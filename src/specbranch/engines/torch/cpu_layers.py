"""The layers of a fused model as a few functions that Numba compiles: for steps of few rows on a CPU, in int8.

Such a step spends a quarter of its time on starting torch's small operations. Here a layer has four products
(`int8_kernel`), with one function before each: it computes what lies between two products, and quantizes. Attention
reads only the slots of each token's own sequence. A token's result does not depend on the other tokens of a step,
unless their number decides between these functions and torch's operations, which differ in rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from specbranch.engines.torch.attention import AttentionContext, SpanAttention
from specbranch.engines.torch.int8_kernel import Array, Int8Product, broadcast, cached, has_byte_product, quantize
from specbranch.errors import first_line
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch
    from llvmlite import ir
    from numba import njit, types
    from numba.extending import intrinsic

log = logging.getLogger(__name__)

Attend = Callable[[Array, Array], Array]  # from heads and a layer's store, as `_attend_compiled`
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_LANES = ir.VectorType(ir.FloatType(), 16)

_MAX_TOKENS = 16  # of a step; for more, the start of an operation costs little, and torch's attention is faster
_MAX_SCORES = 1024  # of a head; for more, torch's attention is faster, which reads keys once for all tokens
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
_LEAST, _MOST = np.float32(-87), np.float32(88)  # exponents whose exponential is a normal float32
_ROUNDED_BIAS, _BIAS, _MANTISSA = np.float32(127.5), 127, 23  # of the exponent of a float32
_SIGN_BIT, _ALL_BUT_SIGN = np.int32(31), np.int32(0x7FFFFFFF)
_NUM_LANES = 16
_PART = 64  # elements of a head that are computed together: head_dim must be a multiple
_TAYLOR = tuple(np.float32(1 / divisor) for divisor in (1, 1, 2, 6, 24, 120, 720))


class CompiledLayers:
    """Runs all transformer layers of a fused model on the CPU in functions that Numba has compiled.

    `layers` are that model's layers; every linear layer in them must be an `Int8Linear`.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = [_Layer(layer) for layer in layers]

    def can_run(self, num_tokens: int, step: AttentionContext) -> bool:
        """Return whether these layers serve a step: of at most 16 tokens, with heads of 64 numbers or a multiple."""
        first = self._layers[0]
        is_few = num_tokens <= _MAX_TOKENS and first.serves(num_tokens) and first.head_dim % _PART == 0
        return (
            is_few and isinstance(step.attention, SpanAttention) and step.arena.heads(0) is not None and can_compile()
        )

    def __call__(
        self, rows: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], step: AttentionContext
    ) -> torch.Tensor:
        """Return the output of the last layer for `rows` [tokens, hidden], and write the step's keys and values."""
        assert isinstance(step.attention, SpanAttention)
        cos, sin = (part.flatten(1).numpy() for part in rotary)
        arrays = cos, sin, step.slots.numpy()
        is_short = step.attention.paths[2].sum() <= _MAX_SCORES
        attend = partial(_attend_compiled if is_short else _attend_by_torch, step.attention)
        hidden, threads = rows.contiguous().numpy(), torch.get_num_threads()
        for index, layer in enumerate(self._layers):
            store = step.arena.heads(index)
            assert store is not None
            hidden = layer(hidden, store, arrays, attend, threads)
        return torch.from_numpy(hidden)


def _attend_compiled(attention: SpanAttention, heads: Array, store: Array) -> Array:
    """Return the attention of the scaled queries in `heads` [tokens, heads, head_dim], for all heads of a token."""
    found = np.empty((len(heads), heads.shape[1] - len(store), heads.shape[2]), np.float32)
    _attend(heads, store, *attention.paths, found)
    return found.reshape(len(heads), -1)


def _attend_by_torch(attention: SpanAttention, heads: Array, store: Array) -> Array:
    """Return what `_attend_compiled` returns."""
    queries = torch.from_numpy(heads[:, : heads.shape[1] - len(store)])
    found = attention(torch.from_numpy(store).transpose(0, 1), queries, 1.0)
    return np.ascontiguousarray(found.flatten(1).numpy())


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.attention, layer.mlp
        self._scaling = np.float32(attention.scaling)
        self.head_dim = attention.head_dim
        self._norms, self._mlp_norms = _norm(attention.norm), _norm(mlp.norm)
        self._head_norms: tuple[Array | None, Array | None, float] = (None, None, 0.0)
        if attention.norms is not None:
            (query, epsilon), (key, _) = (_norm(norm) for norm in attention.norms)
            self._head_norms = query, key, epsilon
        linears = attention.qkv, attention.out, mlp.gate_up, mlp.down
        self._products: list[Int8Product] = [linear.kernel for linear in linears]
        self.serves = attention.qkv.serves

    def __call__(
        self, rows: Array, store: Array, step: tuple[Array, Array, Array], attend: Attend, threads: int
    ) -> Array:
        """Return the output for `rows` [tokens, hidden]; `store` has the layer's keys and values.

        `step` has the cosines and sines of the new tokens, and their slots.
        """
        qkv, out, gate_up, down = self._products
        heads = qkv.after_norm(rows, *self._norms, threads).reshape(len(rows), -1, self.head_dim)
        _rotate_and_write(heads, *self._head_norms, *step[:2], self._scaling, store, step[2])
        rows = out(attend(heads, store), rows, threads)
        gates = gate_up.after_norm(rows, *self._mlp_norms, threads)
        codes, scales = down.new_codes(len(rows))
        _gate_and_quantize(gates, down.max_code, codes, scales)
        return down.multiply(codes, scales, rows, threads)


def _norm(norm: Any) -> tuple[Array, float]:
    """Return the weight and the epsilon of a norm."""
    return norm.weight.detach().numpy(), norm.epsilon


@cached(njit, nogil=True, inline="always")
def _exp(value: Any) -> Any:
    """Return the exponential of a float32, in operations that LLVM turns into vectors."""
    value = min(max(value, _LEAST), _MOST)
    exponent = np.int32(value * _LOG2_E + _ROUNDED_BIAS)  # positive, so the conversion rounds
    rest = value - np.float32(exponent - _BIAS) * _LN_2
    total = _TAYLOR[6]
    total = total * rest + _TAYLOR[5]
    total = total * rest + _TAYLOR[4]
    total = total * rest + _TAYLOR[3]
    total = total * rest + _TAYLOR[2]
    total = total * rest + _TAYLOR[1]
    total = total * rest + _TAYLOR[0]
    return total * np.int32(exponent << _MANTISSA).view(np.float32)


@cached(njit, nogil=True)
def _gate_and_quantize(gates: Array, max_code: int, codes: Array, scales: Array) -> None:
    """Multiply the second half of each row by the SiLU of the first half, and quantize the products."""
    width = gates.shape[1] // 2
    gated = np.empty((1, width), np.float32)
    for row in range(len(gates)):
        for place in range(width):
            gate = gates[row, place]
            gated[0, place] = gate * gates[row, width + place] / (np.float32(1) + _exp(-gate))
        quantize(gated, max_code, codes[row : row + 1], scales[row : row + 1])


@cached(njit, nogil=True)
def sum_softmax(logits: Array, peaks: Array, sums: Array) -> None:
    """Write two numbers for each row of logits [rows, vocabulary] to `sums` [rows, 2].

    The first is what all logits need to be log probabilities, the second is minus the entropy. `peaks` has the largest
    logit of each row.
    """
    for row in range(len(logits)):
        total, mean = np.float32(0), np.float32(0)
        for place in range(logits.shape[1]):
            shifted = max(logits[row, place] - peaks[row], _LEAST)
            weight = _exp(shifted)
            total += weight
            mean += weight * shifted
        sums[row, 0] = -peaks[row] - np.log(total)
        sums[row, 1] = mean / total - np.log(total)


@cached(njit, nogil=True)
def _rotate_and_write(
    heads: Array, query_norm: Array | None, key_norm: Array | None, epsilon: float, cos: Array, sin: Array,
    scaling: float, store: Array, slots: Array,
) -> None:  # fmt: skip
    """Rotate queries and keys in place, after their norms if any; scale queries, and write keys and values.

    `heads` [tokens, heads, head_dim] has queries, keys and values.
    """
    num_queries, half = heads.shape[1] - len(store), heads.shape[2] // 2
    num_rotated = num_queries + len(store) // 2
    for token in range(len(heads)):
        for head in range(num_rotated):
            row = heads[token, head]
            if query_norm is not None and key_norm is not None:
                weight = query_norm if head < num_queries else key_norm
                factor = np.float32(1) / np.sqrt(np.mean(row * row) + np.float32(epsilon))
                row[:] = row * factor * weight
            scale = scaling if head < num_queries else np.float32(1)
            for low in range(half):
                first, second = row[low] * scale, row[low + half] * scale
                row[low] = first * cos[token, low] + second * sin[token, low]
                row[low + half] = second * cos[token, low + half] + first * sin[token, low + half]
        for head in range(len(store)):
            store[head, slots[token]] = heads[token, num_queries + head]


def _vectors(builder: Any, array: Any, row: Any, start: Any) -> list[Any]:
    """Emit the addresses of the vectors of a part of a head: of a row of `array`, from `start`."""
    offset = builder.add(builder.mul(row, builder.extract_value(array.shape, 1)), start)
    places = [builder.add(offset, _I64(lane)) for lane in range(0, _PART, _NUM_LANES)]
    return [builder.bitcast(builder.gep(array.data, [place]), _LANES.as_pointer()) for place in places]


def _loaded(builder: Any, addresses: Sequence[Any]) -> list[Any]:
    """Emit the loads of vectors of float32 at `addresses`, which need no more than the alignment of a float32."""
    found = [builder.load(address, typ=_LANES) for address in addresses]
    for one in found:
        one.align = 4
    return found


def _multiply_add(builder: Any, total: Any, left: Any, right: Any) -> Any:
    return builder.fadd(total, builder.fmul(left, right, flags=["fast"]), flags=["fast"])


def _lane_sums(builder: Any, vectors: Sequence[Any]) -> list[Any]:
    """Emit the sums of the lanes of each vector; the number of vectors is a power of two."""
    count, width = len(vectors), _NUM_LANES  # of the sums, and how many lanes are left of each
    while width > 1:
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else [(vectors[0],) * 2]
        num_lanes = _NUM_LANES * 2 if len(vectors) > 1 else count * width
        first = [lane for lane in range(num_lanes) if lane % width < width // 2]
        masks = [
            ir.Constant(ir.VectorType(_I32, len(first)), [lane + shift for lane in first]) for shift in (0, width // 2)
        ]
        vectors = [
            builder.fadd(*(builder.shuffle_vector(*pair, mask) for mask in masks), flags=["fast"]) for pair in pairs
        ]
        width //= 2
    return [builder.extract_element(vectors[0], _I32(index)) for index in range(count)]


def _arrays(context: Any, builder: Any, kinds: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Return the arrays among the arguments of a function, of types `kinds`; and the other arguments unchanged."""
    return [
        context.make_array(kind)(context, builder, value) if isinstance(kind, types.Array) else value
        for kind, value in zip(kinds, values, strict=True)
    ]


def _score_tile(num_heads: int) -> Any:
    """Return a function for Numba that adds the products of queries with one key to their scores.

    It is called as `score(queries, first, keys, slot, start, scores, index)`, with the first of `num_heads` queries,
    the first element of the part of the head that is multiplied, and the column of the scores.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def score(
        _: Any, queries: Any, first: Any, keys: Any, slot: Any, start: Any, scores: Any, index: Any
    ) -> tuple[Any, Callable[..., Any]]:
        kinds = queries, types.intp, keys, types.intp, types.intp, scores, types.intp

        def emit(context: Any, builder: Any, given: Any, values: Any) -> Any:
            queries, first, keys, slot, start, scores, index = _arrays(context, builder, given.args, values)
            key = _loaded(builder, _vectors(builder, keys, slot, start))
            heads = [builder.add(first, _I64(head)) for head in range(num_heads)]
            totals = []
            for head in heads:
                query = _loaded(builder, _vectors(builder, queries, head, start))
                total = builder.fmul(query[0], key[0])
                for left, right in zip(query[1:], key[1:], strict=True):
                    total = _multiply_add(builder, total, left, right)
                totals.append(total)
            width = builder.extract_value(scores.shape, 1)
            for head, total in zip(heads, _lane_sums(builder, totals), strict=True):
                address = builder.gep(scores.data, [builder.add(builder.mul(head, width), index)])
                builder.store(builder.fadd(builder.load(address), total), address)
            return context.get_dummy_value()

        return types.void(*kinds), emit

    return score


def _mix_tile(num_heads: int) -> Any:
    """Return a function for Numba that adds up the values of a path, weighted, for `num_heads` queries.

    It is called as `mix(weights, first, values, path, start, found)`, with the first of the queries, and the first
    element of the part of the head that is computed. `weights` has a row for each query.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def mix(
        _: Any, weights: Any, first: Any, values: Any, path: Any, start: Any, found: Any
    ) -> tuple[Any, Callable[..., Any]]:
        kinds = weights, types.intp, values, path, types.intp, found

        def emit(context: Any, builder: Any, given: Any, passed: Any) -> Any:
            weights, first, values, path, start, found = _arrays(context, builder, given.args, passed)
            heads = [builder.add(first, _I64(head)) for head in range(num_heads)]
            sums = _emit_sums(builder, weights, heads, values, path, start)
            for head, totals in zip(heads, sums, strict=True):
                for total, address in zip(totals, _vectors(builder, found, head, start), strict=True):
                    builder.store(total, address).align = 4
            return context.get_dummy_value()

        return types.void(*kinds), emit

    return mix


def _emit_sums(builder: Any, weights: Any, heads: Sequence[Any], values: Any, path: Any, start: Any) -> list[list[Any]]:
    """Emit the loop over a path that adds up its values; return the sums, a part of a head for each of `heads`."""
    width = builder.extract_value(weights.shape, 1)
    rows = [builder.gep(weights.data, [builder.mul(head, width)]) for head in heads]
    before, loop, end = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_I64)
    index.add_incoming(_I64(0), before)
    sums = [[builder.phi(_LANES) for _ in range(_PART // _NUM_LANES)] for _ in heads]
    vectors = _loaded(builder, _vectors(builder, values, builder.load(builder.gep(path.data, [index])), start))
    totals = []
    for row, old in zip(rows, sums, strict=True):
        weight = broadcast(builder, builder.load(builder.gep(row, [index])), _NUM_LANES)
        totals.append([_multiply_add(builder, one, weight, vector) for one, vector in zip(old, vectors, strict=True)])
    following = builder.add(index, _I64(1))
    index.add_incoming(following, loop)
    for old, new in zip(sums, totals, strict=True):
        for one, total in zip(old, new, strict=True):
            one.add_incoming(ir.Constant(_LANES, [0.0] * _NUM_LANES), before)
            one.add_incoming(total, loop)
    builder.cbranch(builder.icmp_signed("<", following, builder.extract_value(path.shape, 0)), loop, end)
    builder.position_at_end(end)
    return totals


_score_1, _score_2, _score_4 = _score_tile(1), _score_tile(2), _score_tile(4)
_mix_1, _mix_2, _mix_4 = _mix_tile(1), _mix_tile(2), _mix_tile(4)


@cached(njit, nogil=True)
def _attend(heads: Array, store: Array, places: Array, starts: Array, lengths: Array, found: Array) -> None:
    """Write the attention of each token's queries over its sequence to `found` [tokens, queries, head_dim].

    The slots of token t's sequence are `lengths[t]` elements of `places` from `starts[t]`.
    """
    num_keys = len(store) // 2
    group_len = found.shape[1] // num_keys
    for token in range(len(heads)):
        path = places[starts[token] : starts[token] + lengths[token]]
        for head in range(num_keys):
            chosen = slice(head * group_len, (head + 1) * group_len)
            _attend_group(heads[token, chosen], store[head], store[num_keys + head], path, found[token, chosen])


@cached(njit, nogil=True)
def _attend_group(queries: Array, keys: Array, values: Array, path: Array, found: Array) -> None:
    """Write the attention of the queries of one key head over the slots in `path` to `found` [queries, head_dim]."""
    num_heads, head_dim = queries.shape
    weights = np.zeros((num_heads, len(path)), np.float32)
    for index in range(len(path)):
        for start in range(0, head_dim, _PART):
            head = 0
            while num_heads - head >= 4:
                _score_4(queries, head, keys, path[index], start, weights, index)
                head += 4
            if num_heads - head >= 2:
                _score_2(queries, head, keys, path[index], start, weights, index)
                head += 2
            if num_heads > head:
                _score_1(queries, head, keys, path[index], start, weights, index)
    for head in range(num_heads):
        _softmax(weights[head])
    for start in range(0, head_dim, _PART):
        head = 0
        while num_heads - head >= 4:
            _mix_4(weights, head, values, path, start, found)
            head += 4
        if num_heads - head >= 2:
            _mix_2(weights, head, values, path, start, found)
            head += 2
        if num_heads > head:
            _mix_1(weights, head, values, path, start, found)


@cached(njit, nogil=True, inline="always")
def _ordered(bits: Any) -> Any:
    """Return the bits of a float32 as an integer that is in the order of floats; the bits themselves if given that."""
    return np.int32(bits ^ (np.int32(bits >> _SIGN_BIT) & _ALL_BUT_SIGN))


@cached(njit, nogil=True)
def _softmax(values: Array) -> None:
    """Replace values by their softmax."""
    # LLVM makes vectors of the maximum of 32-bit integers: of a float's bits, all but the sign flipped if negative.
    numbers, most = values.view(np.int32), np.int32(-(1 << 31))
    for index in range(len(numbers)):
        most = max(most, _ordered(numbers[index]))
    peak = np.int32(_ordered(most)).view(np.float32)
    total = np.float32(0)
    for index in range(len(values)):
        weight = _exp(values[index] - peak)
        values[index] = weight
        total += weight
    for index in range(len(values)):
        values[index] /= total


@cache
def can_compile() -> bool:
    """Run the functions once on small arrays; return whether Numba compiles them here."""
    try:
        heads, store = np.zeros((1, 3, _PART), np.float32), np.zeros((2, 2, _PART), np.float32)
        indices = np.zeros(1, np.int64)
        _rotate_and_write(heads, None, None, 0.0, heads[0], heads[0], np.float32(1), store, indices)
        _attend(heads, store, indices, indices, indices + 1, np.zeros((1, 1, _PART), np.float32))
        codes = np.zeros((3, _PART // 2), np.uint8 if has_byte_product() else np.int16)
        _gate_and_quantize(heads[0], 127, codes, np.zeros(3, np.float32))
        sum_softmax(heads[0], np.zeros(3, np.float32), np.zeros((3, 2), np.float32))
    except Exception as error:  # Numba and LLVM fail in many ways, and torch's operations are there
        log.warning("functions compiled by Numba do not run here (%s); torch's operations are used", first_line(error))
        return False
    return True
