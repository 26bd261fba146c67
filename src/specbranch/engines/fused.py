"""Llama-like models with fewer, larger operations, and an output layer that reads little.

A step of one row is hundreds of small operations beside the reading of its weights. Here products of one input are one
product, queries and keys turn together, a norm is one call, and a layer asks for nothing but what it needs. Models of
other families are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbranch.engines.protocol import EngineError

try:
    import torch
    from torch import nn
    from torch.nn.functional import rms_norm, silu
except ImportError as missing:
    raise EngineError(f"8 bits need torch ({missing}); pip install 'specbranch[torch]'") from missing

from specbranch.engines.int8 import PackedLinear
from specbranch.engines.screened import ScreenedHead, can_screen

# Families whose attention, perceptron and norm are the same but for names.
_FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")

# Takes a layer's number, the shares of a step, queries, keys and values [1, heads, tokens, width] and the scale of the
# scores; gives what the queries found [1, tokens, heads, width].
Attend = Callable[[int, Any, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class _Norm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._epsilon = norm.variance_epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, self._epsilon)


class _Perceptron(nn.Module):
    def __init__(self, mlp: Any, kind: type[PackedLinear]) -> None:
        super().__init__()
        self._into = kind(mlp.gate_proj, mlp.up_proj)
        self._out = kind(mlp.down_proj)

    def forward(self, rows: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
        gate, up = self._into(rows).chunk(2, dim=-1)
        out: torch.Tensor = self._out(silu(gate).mul_(up), onto)
        return out


class _Attention(nn.Module):
    def __init__(self, attention: Any, attend: Attend, kind: type[PackedLinear]) -> None:
        super().__init__()
        self._attend = attend
        self._index = attention.layer_idx
        self._scaling = attention.scaling
        self._width = attention.head_dim
        self._num_keys = attention.k_proj.out_features // self._width
        self._num_turned = attention.q_proj.out_features // self._width + self._num_keys
        self._into = kind(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = kind(attention.o_proj)
        self._norms = None
        if hasattr(attention, "q_norm"):
            self._norms = nn.ModuleList([_Norm(attention.q_norm), _Norm(attention.k_norm)])

    def forward(
        self, rows: torch.Tensor, onto: torch.Tensor, waves: tuple[torch.Tensor, torch.Tensor], shares: Any
    ) -> torch.Tensor:
        heads = self._into(rows).view(1, rows.shape[1], -1, self._width)  # [1, tokens, heads, width]
        turned, values = heads[:, :, : self._num_turned], heads[:, :, self._num_turned :]
        num_queries = self._num_turned - self._num_keys
        if self._norms is not None:
            queries, keys = self._norms[0](turned[:, :, :num_queries]), self._norms[1](turned[:, :, num_queries:])
            turned = torch.cat((queries, keys), dim=2)
        cos, sin = (wave[:, :, None] for wave in waves)
        low, high = turned.chunk(2, dim=-1)
        turned = torch.addcmul(turned * cos, torch.cat((-high, low), dim=-1), sin).transpose(1, 2)
        queries, keys = turned[:, :num_queries], turned[:, num_queries:]
        found = self._attend(self._index, shares, queries, keys, values.transpose(1, 2), self._scaling)
        out: torch.Tensor = self._out(found.flatten(2), onto)
        return out


class _Layer(nn.Module):
    """In place of a layer of Transformers, which hands on a dozen arguments that nobody here reads."""

    def __init__(self, layer: Any, attend: Attend, kind: type[PackedLinear]) -> None:
        super().__init__()
        self._before, self._between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._attention = _Attention(layer.self_attn, attend, kind)
        self._perceptron = _Perceptron(layer.mlp, kind)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, tokens, hidden]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        specbranch_shares: Any,
        **_: Any,
    ) -> torch.Tensor:
        rows = self._attention(self._before(hidden_states), hidden_states, position_embeddings, specbranch_shares)
        out: torch.Tensor = self._perceptron(self._between(rows), rows)
        return out


def fuse(model: Any, attend: Attend, kind: type[PackedLinear]) -> Any:
    """The model, in float32, with its layers fused and in 8 bits, where its family is known."""
    family = type(model).__name__.removesuffix("ForCausalLM")
    if family not in _FAMILIES:
        return model
    base = model.base_model
    if not all(layer.mlp.act_fn(torch.ones(1)) == silu(torch.ones(1)) for layer in base.layers):
        return model
    base.layers = nn.ModuleList(_Layer(layer, attend, kind) for layer in base.layers)
    base.norm = _Norm(base.norm)
    if can_screen(model.lm_head):
        head = model.lm_head = ScreenedHead(model.lm_head, kind)
        base.register_forward_hook(lambda _, __, out: head.learn(out.last_hidden_state[0]))
    return model
