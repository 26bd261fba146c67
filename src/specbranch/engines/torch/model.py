"""The fused model, for Llama-like families.

A step of one row consists of hundreds of small operations in addition to reading the weights. The fused model merges
projections of the same input into one product, rotates queries and keys together in place, and computes a norm in one
call.
"""

from __future__ import annotations

from typing import Any

from specbranch.engines.torch.attention import AttentionContext
from specbranch.engines.torch.linear import Int8Linear, MergedLinear, QuantizedLinear
from specbranch.engines.torch.lm_head import LowRankOutputLayer, is_worth_narrowing
from specbranch.engines.torch.plain import sliding_window
from specbranch.errors import EngineError
from specbranch.extensions import optional_import

with optional_import("torch"):
    import torch
    from torch import nn
    from torch.nn.functional import rms_norm, silu
try:
    from specbranch.engines.torch.cpu_layers import CompiledLayers
except EngineError:  # without Numba
    CompiledLayers = None  # type: ignore[assignment,misc]

# Families whose attention, MLP and norm differ only in names.
_FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")

LinearType = type[QuantizedLinear] | type[MergedLinear]
Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and signed sines of the positions, each [tokens, 1, head_dim]


class _Norm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.epsilon = norm.variance_epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows, self.weight.shape, self.weight, self.epsilon)

    def then(self, linear: QuantizedLinear | MergedLinear, rows: torch.Tensor) -> torch.Tensor:
        """Return the output of a linear layer for `rows` after this norm was applied to them."""
        return linear.after_norm(rows, self.weight, self.epsilon)


class _MLP(nn.Module):
    def __init__(self, mlp: Any, norm: Any, kind: LinearType) -> None:
        super().__init__()
        self.norm = _Norm(norm)
        self.gate_up = kind(mlp.gate_proj, mlp.up_proj)
        self.down = kind(mlp.down_proj)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = self.norm.then(self.gate_up, rows).chunk(2, dim=-1)
        out: torch.Tensor = self.down(silu(gate).mul_(up), rows)
        return out


class _Attention(nn.Module):
    def __init__(self, attention: Any, norm: Any, kind: LinearType) -> None:
        super().__init__()
        self.norm = _Norm(norm)
        self._layer = attention.layer_idx
        self.scaling = attention.scaling
        self.head_dim = attention.head_dim
        self.num_queries = attention.q_proj.out_features // self.head_dim
        self._num_rotated = self.num_queries + attention.k_proj.out_features // self.head_dim
        self.qkv = kind(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = kind(attention.o_proj)
        self.norms = None
        if hasattr(attention, "q_norm"):
            self.norms = nn.ModuleList([_Norm(attention.q_norm), _Norm(attention.k_norm)])

    def forward(self, rows: torch.Tensor, rotary: Rotary, step: AttentionContext) -> torch.Tensor:
        heads = self.norm.then(self.qkv, rows).view(len(rows), -1, self.head_dim)  # [tokens, heads, head_dim]
        rotated = heads[:, : self._num_rotated]
        if self.norms is not None:
            for norm, part in zip(self.norms, self._split(rotated), strict=True):
                part.copy_(norm(part))
        cos, sin = rotary
        turned = rotated.roll(self.head_dim // 2, dims=-1)
        rotated.mul_(cos).addcmul_(turned, sin)
        found = step.attend(self._layer, *self._split(heads), self.scaling)
        out: torch.Tensor = self.out(found.flatten(1), rows)
        return out

    def _split(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the query heads, and the heads after them: keys, or keys and values."""
        return heads[:, : self.num_queries], heads[:, self.num_queries :]


class _Layer(nn.Module):
    def __init__(self, layer: Any, kind: LinearType) -> None:
        super().__init__()
        self.attention = _Attention(layer.self_attn, layer.input_layernorm, kind)
        self.mlp = _MLP(layer.mlp, layer.post_attention_layernorm, kind)

    def forward(self, rows: torch.Tensor, rotary: Rotary, step: AttentionContext) -> torch.Tensor:
        out: torch.Tensor = self.mlp(self.attention(rows, rotary, step))
        return out


class FusedModel(nn.Module):
    """A model of a Llama-like family with fused operations and linear layers of the class `kind`.

    It takes over the weights of `model`, a model of Transformers, which must not be used any more.
    """

    def __init__(self, model: Any, kind: LinearType) -> None:
        super().__init__()
        self.states = None  # no layer is recurrent
        base = model.base_model
        self.embed_tokens = base.embed_tokens
        for index, layer in enumerate(base.layers):  # one at a time: merged weights are copies
            base.layers[index] = _Layer(layer, kind)
        self.layers = base.layers
        self._compiled = None
        if kind is Int8Linear and CompiledLayers is not None:
            self._compiled = CompiledLayers(self.layers)
        self.norm = _Norm(base.norm)
        self.lm_head = model.lm_head
        if issubclass(kind, QuantizedLinear) and is_worth_narrowing(model.lm_head):
            self.lm_head = LowRankOutputLayer(model.lm_head, kind)
        # Cosines are the same for negative angles; sines get the signs that the swapped halves need.
        frequencies = base.rotary_emb.inv_freq
        self.register_buffer("angles", torch.cat((-frequencies, frequencies)), persistent=False)
        self._rotary_scale = float(base.rotary_emb.attention_scaling)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, outputs: torch.Tensor | None, step: AttentionContext
    ) -> torch.Tensor:
        """Run the model and write keys and values to the step's KV store; return the logits [outputs, vocabulary].

        `outputs` has the indices of the tokens whose logits are returned; None means all.
        """
        rows = self.embed_tokens(tokens).to(self.norm.weight.dtype)
        rotary = self._rotary(positions, rows.dtype)
        rows = self.norm(self._run_layers(rows, rotary, step))
        if isinstance(self.lm_head, LowRankOutputLayer):
            self.lm_head.observe(rows)
        logits: torch.Tensor = self.lm_head(rows if outputs is None else rows[outputs])
        return logits

    def _run_layers(self, rows: torch.Tensor, rotary: Rotary, step: AttentionContext) -> torch.Tensor:
        """Run all layers: for few rows on a CPU in int8 by functions that Numba compiled, else by torch."""
        if self._compiled is not None and self._compiled.can_run(len(rows), step):
            return self._compiled(rows, rotary, step)
        for layer in self.layers:
            rows = layer(rows, rotary, step)
        return rows

    def store_embedding(self, dtype: torch.dtype) -> None:
        """Store the input embedding, and the exact weights that a low-rank output layer approximates, in `dtype`.

        If the two are equal (tied), they are stored once. A step reads only a few rows of each, and converts these rows
        back to the type that it computes in.
        """
        stored = self.embed_tokens.weight.detach().to(dtype)
        self.embed_tokens.weight = nn.Parameter(stored, requires_grad=False)
        if isinstance(self.lm_head, LowRankOutputLayer):
            exact = self.lm_head.exact.to(dtype)
            self.lm_head.exact = stored if torch.equal(exact, stored) else exact

    @property
    def num_heads(self) -> int:
        """The number of query heads per layer."""
        return int(self.layers[0].attention.num_queries)

    @property
    def scaling(self) -> float:
        """The factor that attention scores are multiplied by."""
        return float(self.layers[0].attention.scaling)

    def get_input_embeddings(self) -> Any:
        """Return the input embedding, under the name that Transformers uses."""
        return self.embed_tokens

    def get_output_embeddings(self) -> Any:
        """Return the output layer, under the name that Transformers uses."""
        return self.lm_head

    def _rotary(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        angles = positions[:, None, None] * self.angles
        cos, sin = angles.cos(), angles.sin()
        if self._rotary_scale != 1:
            cos, sin = cos * self._rotary_scale, sin * self._rotary_scale
        return cos.to(dtype), sin.to(dtype)


def can_fuse(model: Any, max_tokens: int | None) -> bool:
    """Return whether `FusedModel` can run a model of Transformers on a cache of `max_tokens`, if this is known.

    It must be of a family in `_FAMILIES`, with SiLU, with attention to the whole sequence, and with rotary frequencies
    for the whole head.
    """
    if type(model).__name__.removesuffix("ForCausalLM") not in _FAMILIES:
        return False
    base = model.base_model
    rotary, attention = base.rotary_emb, base.layers[0].self_attn
    is_known = all(layer.mlp.act_fn(torch.ones(1)) == silu(torch.ones(1)) for layer in base.layers)
    window = sliding_window(model.config)
    sees_all = window is None or (max_tokens is not None and window >= max_tokens)
    return is_known and sees_all and 2 * len(rotary.inv_freq) == attention.head_dim
