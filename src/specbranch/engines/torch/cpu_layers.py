"""The layers of a fused model as a few functions that Numba compiles: for steps of few rows on a CPU, in int8.

Such a step spends a quarter of its time on starting torch's small operations. Here a layer has four products
(`int8_kernel`), with one function before each: it computes what lies between two products, and quantizes. Attention
reads only the slots of each token's own sequence, so no token's result depends on the other tokens of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from specbranch.engines.torch.attention import SpanAttention
from specbranch.engines.torch.int8_kernel import Array, cached, normalize_and_quantize, quantize
from specbranch.engines.torch.linear import Int8Linear
from specbranch.engines.torch.step import AttentionContext
from specbranch.errors import first_line
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch
    from numba import njit

log = logging.getLogger(__name__)

_MAX_TOKENS = 16  # of a step; for more, the start of an operation costs little, and torch's attention is faster
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
_LEAST, _MOST = np.float32(-87), np.float32(88)  # exponents whose exponential is a normal float32
_ROUNDED_BIAS, _BIAS, _MANTISSA = np.float32(127.5), 127, 23  # of the exponent of a float32
_TAYLOR = tuple(np.float32(1 / divisor) for divisor in (1, 1, 2, 6, 24, 120, 720))


class CompiledLayers:
    """Runs all layers of a fused model; `layers` are its layers, all with linear layers of the class `Int8Linear`."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = [_Layer(layer) for layer in layers]

    def can_run(self, num_tokens: int, step: AttentionContext) -> bool:
        """Return whether these layers serve a step: of at most 16 tokens, with span attention over float32 keys."""
        is_few = num_tokens <= _MAX_TOKENS and self._layers[0].serves(num_tokens)
        return is_few and isinstance(step.attention, SpanAttention) and step.arena.heads(0) is not None and _works()

    def __call__(
        self, rows: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], step: AttentionContext
    ) -> torch.Tensor:
        """Return the output of the last layer for `rows` [tokens, hidden], and write the step's keys and values."""
        assert isinstance(step.attention, SpanAttention)
        cos, sin = (part.flatten(1).numpy() for part in rotary)
        arrays = (cos, sin, step.slots.numpy(), *step.attention.paths)
        hidden, threads = rows.contiguous().numpy(), torch.get_num_threads()
        for index, layer in enumerate(self._layers):
            hidden = layer(hidden, step.arena.heads(index), arrays, threads)
        return torch.from_numpy(hidden)


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.attention, layer.mlp
        self._scaling = np.float32(attention.scaling)
        self._head_dim = attention.head_dim
        self._norms, self._mlp_norms = _norm(attention.norm), _norm(mlp.norm)
        self._head_norms = (None, None, 0.0)
        if attention.norms is not None:
            (query, epsilon), (key, _) = (_norm(norm) for norm in attention.norms)
            self._head_norms = query, key, epsilon
        linears = attention.qkv, attention.out, mlp.gate_up, mlp.down
        self._products = [linear.kernel for linear in linears]
        self.serves = attention.qkv.serves

    def __call__(self, rows: Array, store: Array, step: Sequence[Array], threads: int) -> Array:
        """Return the output for `rows` [tokens, hidden]; `store` has the layer's keys and values.

        `step` has what all layers share: cosines, sines, slots of the new tokens, and the paths of `SpanAttention`.
        """
        qkv, out, gate_up, down = self._products
        cos, sin, slots, *paths = step
        heads = qkv.after_norm(rows, *self._norms, threads).reshape(len(rows), -1, self._head_dim)
        _rotate_and_write(heads, *self._head_norms, cos, sin, self._scaling, store, slots)
        found = np.empty((len(rows), (heads.shape[1] - len(store)) * self._head_dim), np.float32)
        _attend(heads, store, *paths, found.reshape(len(rows), -1, self._head_dim))
        rows = out(found, rows, threads)
        gates = gate_up.after_norm(rows, *self._mlp_norms, threads)
        codes, scales = down.new_codes(len(rows))
        _gate_and_quantize(gates, down.max_code, codes, scales)
        return down.multiply(codes, scales, rows, threads)


def _norm(norm: Any) -> tuple[Array, float]:
    """Return the weight and the epsilon of a norm."""
    return norm.weight.detach().numpy(), norm.epsilon


@cached(njit, nogil=True, inline="always")
def _exp(value: float) -> float:
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


@cached(njit, nogil=True)
def _attend(heads: Array, store: Array, places: Array, starts: Array, lengths: Array, found: Array) -> None:
    """Write the attention of each token's queries over its sequence to `found` [tokens, queries, head_dim].

    The slots of token t's sequence are `lengths[t]` elements of `places` from `starts[t]`.
    """
    num_keys, num_tokens, head_dim = len(store) // 2, len(heads), heads.shape[2]
    group_len = (heads.shape[1] - len(store)) // num_keys
    weights = np.empty(lengths.max(), np.float32)
    for token in range(num_tokens):
        path = places[starts[token] : starts[token] + lengths[token]]
        for head in range(num_keys * group_len):
            _attend_head(heads[token, head], store[head // group_len], store[num_keys + head // group_len], path,
                         weights, found[token, head])


@cached(njit, nogil=True)
def _attend_head(query: Array, keys: Array, values: Array, path: Array, weights: Array, found: Array) -> None:
    peak = np.float32(-np.inf)
    for index in range(len(path)):
        slot = path[index]
        total = np.float32(0)
        for place in range(len(query)):
            total += query[place] * keys[slot, place]
        weights[index] = total
        peak = max(peak, total)
    whole = np.float32(0)
    for index in range(len(path)):
        weight = _exp(weights[index] - peak)
        weights[index] = weight
        whole += weight
    found[:] = 0
    for index in range(len(path)):
        slot = path[index]
        weight = weights[index] / whole
        for place in range(len(query)):
            found[place] += weight * values[slot, place]


@cache
def _works() -> bool:
    """Run the functions once on small arrays; return whether Numba compiles them here."""
    try:
        heads, store = np.zeros((1, 3, 4), np.float32), np.zeros((2, 2, 4), np.float32)
        indices = np.zeros(1, np.int64)
        for norm in (None, np.ones(4, np.float32)):
            _rotate_and_write(heads, norm, norm, 0.0, heads[0], heads[0], np.float32(1), store, indices)
        _attend(heads, store, indices, indices, indices + 1, np.zeros((1, 1, 4), np.float32))
        _gate_and_quantize(heads[0], 127, np.zeros((3, 2), np.uint8), np.zeros(3, np.float32))
        _gate_and_quantize(heads[0], 127, np.zeros((3, 2), np.int16), np.zeros(3, np.float32))
    except Exception as error:  # Numba and LLVM fail in many ways, and torch's operations are there
        log.warning("layers compiled by Numba do not run here (%s); torch's operations are used", first_line(error))
        return False
    return True
