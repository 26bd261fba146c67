"""Llama-like models with fewer, larger operations, and an output layer that reads little.

A step of one row is hundreds of small operations beside the reading of the weights. Here the projections of one input
are one product, queries and keys are rotated together, and a norm is one call. Models of other families are left as
they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbranch.engines.extras import extra
from specbranch.engines.torch.head import CandidateHead, is_worth_narrowing
from specbranch.engines.torch.int8 import PackedLinear

with extra("torch"):
    import torch
    from torch import nn
    from torch.nn.functional import rms_norm, silu

# Families whose attention, MLP and norm differ in nothing but names.
_FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")

# Takes a layer's index, the shares of a step, queries, keys and values [1, heads, tokens, head_dim] and the scale of
# the scores; returns the attention's output [1, tokens, heads, head_dim].
Attend = Callable[[int, Any, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of the positions, each [1, tokens, head_dim]


class _Norm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._epsilon = norm.variance_epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, self._epsilon)


class _MLP(nn.Module):
    def __init__(self, mlp: Any, kind: type[PackedLinear]) -> None:
        super().__init__()
        self._gate_up = kind(mlp.gate_proj, mlp.up_proj)
        self._down = kind(mlp.down_proj)

    def forward(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(rows).chunk(2, dim=-1)
        out: torch.Tensor = self._down(silu(gate).mul_(up), residual)
        return out


class _Attention(nn.Module):
    def __init__(self, attention: Any, attend: Attend, kind: type[PackedLinear]) -> None:
        super().__init__()
        self._attend = attend
        self._layer = attention.layer_idx
        self._scaling = attention.scaling
        self._head_dim = attention.head_dim
        self._num_queries = attention.q_proj.out_features // self._head_dim
        self._num_keys = attention.k_proj.out_features // self._head_dim
        self._qkv = kind(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = kind(attention.o_proj)
        self._norms = None
        if hasattr(attention, "q_norm"):
            self._norms = nn.ModuleList([_Norm(attention.q_norm), _Norm(attention.k_norm)])

    def forward(self, rows: torch.Tensor, residual: torch.Tensor, rotary: Rotary, shares: Any) -> torch.Tensor:
        heads = self._qkv(rows).view(1, rows.shape[1], -1, self._head_dim)  # [1, tokens, heads, head_dim]
        num_rotated = self._num_queries + self._num_keys
        rotated, values = heads[:, :, :num_rotated], heads[:, :, num_rotated:]
        if self._norms is not None:
            queries, keys = rotated[:, :, : self._num_queries], rotated[:, :, self._num_queries :]
            rotated = torch.cat((self._norms[0](queries), self._norms[1](keys)), dim=2)
        rotated = _rotate(rotated, rotary).transpose(1, 2)
        queries, keys = rotated[:, : self._num_queries], rotated[:, self._num_queries :]
        found = self._attend(self._layer, shares, queries, keys, values.transpose(1, 2), self._scaling)
        out: torch.Tensor = self._out(found.flatten(2), residual)
        return out


def _rotate(heads: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Queries and keys [1, tokens, heads, head_dim] with their rotary position embedding applied."""
    cos, sin = (part[:, :, None] for part in rotary)
    low, high = heads.chunk(2, dim=-1)
    return torch.addcmul(heads * cos, torch.cat((-high, low), dim=-1), sin)


class _Layer(nn.Module):
    """Replaces a layer of Transformers, which passes on a dozen arguments that nobody here reads."""

    def __init__(self, layer: Any, attend: Attend, kind: type[PackedLinear]) -> None:
        super().__init__()
        self._attention_norm, self._mlp_norm = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._attention = _Attention(layer.self_attn, attend, kind)
        self._mlp = _MLP(layer.mlp, kind)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, tokens, hidden]
        position_embeddings: Rotary,
        specbranch_shares: Any,
        **_: Any,
    ) -> torch.Tensor:
        normed = self._attention_norm(hidden_states)
        rows = self._attention(normed, hidden_states, position_embeddings, specbranch_shares)
        out: torch.Tensor = self._mlp(self._mlp_norm(rows), rows)
        return out


def fuse(model: Any, attend: Attend, kind: type[PackedLinear]) -> Any:
    """The model, given in float32, with fused layers of 8-bit weights if its family is known."""
    family = type(model).__name__.removesuffix("ForCausalLM")
    if family not in _FAMILIES:
        return model
    base = model.base_model
    if not all(layer.mlp.act_fn(torch.ones(1)) == silu(torch.ones(1)) for layer in base.layers):
        return model
    base.layers = nn.ModuleList(_Layer(layer, attend, kind) for layer in base.layers)
    base.norm = _Norm(base.norm)
    if is_worth_narrowing(model.lm_head):
        head = model.lm_head = CandidateHead(model.lm_head, kind)
        base.register_forward_hook(lambda _, __, out: head.learn(out.last_hidden_state[0]))
    return model
