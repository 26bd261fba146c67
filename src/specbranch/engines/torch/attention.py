"""Attention over several arenas: the tokens of each share attend to the cells of their own paths.

Registered with Transformers under `NAME`, so that every model that lets its attention be replaced can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbranch.engines.extras import extra
from specbranch.engines.torch.cache import Share
from specbranch.engines.torch.support import unsupported

with extra("torch"):
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from transformers import AttentionInterface, AttentionMaskInterface

NAME = "specbranch"  # of this attention, in the registries of Transformers
_FEW = 16  # new tokens of a share, up to which query heads of one key-value head are computed together
_UNKNOWN_FEATURES = ("softcap", "s_aux", "position_bias")  # what some models ask of attention and this one cannot do


def attend(
    layer: int,
    shares: Sequence[Share],
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    value: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Store a layer's new keys and values and attend, each share in its own arena [1, tokens, heads, head_dim]."""
    parts = []
    for share in shares:
        tokens = slice(share.start, share.stop)
        keys, values = share.arena.write(layer, share, (key[:, :, tokens], value[:, :, tokens]))
        parts.append(_attend_share(share, query[:, :, tokens], keys, values, scaling).transpose(1, 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend_share(
    share: Share, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    num_heads, num_tokens = query.shape[1:3]
    group_len = num_heads // keys.shape[1]  # query heads of one key-value head
    if share.mask is None or group_len == 1 or num_tokens > _FEW:
        mask, is_grouped = share.mask, group_len > 1
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
        )
    # The query heads of a group become further queries of one head: keys are read once, not once per query head.
    queries = query.reshape(1, keys.shape[1], group_len * num_tokens, -1)
    mask = share.mask_of(group_len)
    out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(query.shape)


def _attend_layer(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    specbranch_shares: Sequence[Share] = (),
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """`attend` as Transformers calls it, in every layer of an engine's model."""
    is_plain = all(features.get(name) is None for name in _UNKNOWN_FEATURES)
    if not specbranch_shares or attention_mask is not None or not is_plain:
        raise unsupported(module, "its attention is not plain")
    return attend(module.layer_idx, specbranch_shares, query, key, value, scaling).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The mask that Transformers makes for this attention: none, as the shares have the right ones."""


AttentionInterface.register(NAME, _attend_layer)
AttentionMaskInterface.register(NAME, _no_mask)
