"""Llama-like models with fewer, larger operations, and in 8 bits an output layer that reads little.

A step of one row is hundreds of small operations beside the reading of the weights. Here the projections of one input
are one product, queries and keys are rotated together where they are, and a norm is one call. Models of other families
are run as Transformers has them.
"""

from __future__ import annotations

from typing import Any

from specbranch.engines.extras import extra
from specbranch.engines.torch.head import CandidateHead, is_worth_narrowing
from specbranch.engines.torch.int8 import PackedLinear
from specbranch.engines.torch.joined import JoinedLinear
from specbranch.engines.torch.step import Step

with extra("torch"):
    import torch
    from torch import nn
    from torch.nn.functional import rms_norm, silu

# Families whose attention, MLP and norm differ in nothing but names.
_FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")
_CHANGING = ("dynamic", "longrope")  # rotary embeddings whose frequencies depend on the length of a sequence

Kind = type[PackedLinear] | type[JoinedLinear]  # of linear layers
Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and signed sines of the positions, each [tokens, 1, head_dim]


class _Norm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._epsilon = norm.variance_epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, self._epsilon)


class _MLP(nn.Module):
    def __init__(self, mlp: Any, kind: Kind) -> None:
        super().__init__()
        self._gate_up = kind(mlp.gate_proj, mlp.up_proj)
        self._down = kind(mlp.down_proj)

    def forward(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(rows).chunk(2, dim=-1)
        out: torch.Tensor = self._down(silu(gate).mul_(up), residual)
        return out


class _Attention(nn.Module):
    def __init__(self, attention: Any, kind: Kind) -> None:
        super().__init__()
        self._layer = attention.layer_idx
        self.scaling = attention.scaling
        self._head_dim = attention.head_dim
        self.num_queries = attention.q_proj.out_features // self._head_dim
        self._num_rotated = self.num_queries + attention.k_proj.out_features // self._head_dim
        self._qkv = kind(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = kind(attention.o_proj)
        self._norms = None
        if hasattr(attention, "q_norm"):
            self._norms = nn.ModuleList([_Norm(attention.q_norm), _Norm(attention.k_norm)])

    def forward(self, rows: torch.Tensor, residual: torch.Tensor, rotary: Rotary, step: Step) -> torch.Tensor:
        heads = self._qkv(rows).view(len(rows), -1, self._head_dim)  # [tokens, heads, head_dim]
        rotated = heads[:, : self._num_rotated]
        if self._norms is not None:
            for norm, part in zip(self._norms, self._split(rotated), strict=True):
                part.copy_(norm(part))
        cos, sin = rotary
        turned = rotated.roll(self._head_dim // 2, dims=-1)
        rotated.mul_(cos).addcmul_(turned, sin)
        found = step.attend(self._layer, *self._split(heads), self.scaling)
        out: torch.Tensor = self._out(found.flatten(1), residual)
        return out

    def _split(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, and what comes behind them."""
        return heads[:, : self.num_queries], heads[:, self.num_queries :]


class _Layer(nn.Module):
    def __init__(self, layer: Any, kind: Kind) -> None:
        super().__init__()
        self._attention_norm, self._mlp_norm = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.attention = _Attention(layer.self_attn, kind)
        self._mlp = _MLP(layer.mlp, kind)

    def forward(self, rows: torch.Tensor, rotary: Rotary, step: Step) -> torch.Tensor:
        rows = self.attention(self._attention_norm(rows), rows, rotary, step)
        out: torch.Tensor = self._mlp(self._mlp_norm(rows), rows)
        return out


class FusedModel(nn.Module):
    """A model of a known family. Its weights are those of the given one, which is not to be used any more."""

    def __init__(self, model: Any, kind: Kind) -> None:
        super().__init__()
        base = model.base_model
        self.embed_tokens = base.embed_tokens
        for index, layer in enumerate(base.layers):  # one by one: joined weights are copies
            base.layers[index] = _Layer(layer, kind)
        self.layers = base.layers
        self.norm = _Norm(base.norm)
        self.lm_head = model.lm_head
        if issubclass(kind, PackedLinear) and is_worth_narrowing(model.lm_head):
            self.lm_head = CandidateHead(model.lm_head, kind)
        # Cosines are the same for the negative angles, and sines have the signs that turned halves need.
        frequencies = base.rotary_emb.inv_freq
        self.register_buffer("angles", torch.cat((-frequencies, frequencies)), persistent=False)
        self._rotary_scale = float(base.rotary_emb.attention_scaling)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, outputs: torch.Tensor | None, step: Step
    ) -> torch.Tensor:
        """Logits [outputs, vocabulary] behind some of the tokens [tokens], or behind all if `outputs` is None."""
        rows = self.embed_tokens(tokens)
        rotary = self._rotary(positions, rows.dtype)
        for layer in self.layers:
            rows = layer(rows, rotary, step)
        rows = self.norm(rows)
        if isinstance(self.lm_head, CandidateHead):
            self.lm_head.learn(rows)
        logits: torch.Tensor = self.lm_head(rows if outputs is None else rows[outputs])
        return logits

    @property
    def num_heads(self) -> int:
        """Heads of queries in a layer."""
        return int(self.layers[0].attention.num_queries)

    @property
    def scaling(self) -> float:
        """What the scores of attention are multiplied with."""
        return float(self.layers[0].attention.scaling)

    def get_input_embeddings(self) -> Any:
        """The input embedding, by the name that Transformers has for it."""
        return self.embed_tokens

    def get_output_embeddings(self) -> Any:
        """The output layer, by the name that Transformers has for it."""
        return self.lm_head

    def _rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        angles = positions[:, None, None] * self.angles
        cos, sin = angles.cos(), angles.sin()
        if self._rotary_scale != 1:
            cos, sin = cos * self._rotary_scale, sin * self._rotary_scale
        return cos.to(dtype), sin.to(dtype)


def can_fuse(model: Any) -> bool:
    """Whether a model of Transformers is of a known family, with nothing that `FusedModel` does not do."""
    if type(model).__name__.removesuffix("ForCausalLM") not in _FAMILIES:
        return False
    base = model.base_model
    rotary, attention = base.rotary_emb, base.layers[0].self_attn
    is_known = all(layer.mlp.act_fn(torch.ones(1)) == silu(torch.ones(1)) for layer in base.layers)
    return is_known and rotary.rope_type not in _CHANGING and 2 * len(rotary.inv_freq) == attention.head_dim
