"""One step of an engine, as the layers of its model see it."""

from __future__ import annotations

from dataclasses import dataclass

from specbranch.engines.extras import extra
from specbranch.engines.torch.arena import Arena
from specbranch.engines.torch.paged import Attention

with extra("torch"):
    import torch


@dataclass(frozen=True, slots=True)
class Step:
    """Where a step's keys and values go, and how its tokens attend."""

    arena: Arena
    slots: torch.Tensor  # [tokens]
    attention: Attention

    def attend(self, layer: int, query: torch.Tensor, fresh: torch.Tensor, scaling: float) -> torch.Tensor:
        """Store a layer's new keys and values [tokens, 2 * kv_heads, head_dim] and attend to all of each path.

        Queries are [tokens, heads, head_dim], the result is [tokens, kv_heads, heads of each, head_dim].
        """
        return self.attention(self.arena.write(layer, self.slots, fresh), query, scaling)
