"""The model's pass over a step, from tokens to what is copied to the host."""

from __future__ import annotations

from typing import Any

from specbranch.engines.extras import extra
from specbranch.engines.torch.answer import pack
from specbranch.engines.torch.arena import Arena
from specbranch.engines.torch.paged import Attention
from specbranch.engines.torch.step import Step

with extra("torch"):
    import torch


class Forward:
    """A model with the arena that it reads and writes. Its tensors are on the model's device."""

    def __init__(self, model: Any, arena: Arena, top_k: int, *, by_blocks: bool) -> None:
        self.model = model
        self.arena = arena
        self.top_k = top_k
        self.by_blocks = by_blocks  # see `pack`

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: Attention,
        outputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The words of some of the tokens, or of all; tokens, positions and slots to write to are [tokens]."""
        logits = self.logits(tokens, positions, slots, attention, outputs)
        return pack(logits, self.top_k, by_blocks=self.by_blocks)

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: Attention,
        outputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The logits of the same tokens [outputs, vocabulary]."""
        found: torch.Tensor = self.model(tokens, positions, outputs, Step(self.arena, slots, attention))
        return found
