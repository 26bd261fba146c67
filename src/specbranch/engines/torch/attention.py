"""Our attention inside a model of Transformers, for families that are not fused.

Registered with Transformers under `NAME`, so that every model that lets its attention be replaced can use it.
"""

from __future__ import annotations

from typing import Any

from specbranch.engines.extras import extra
from specbranch.engines.torch.step import Step
from specbranch.engines.torch.support import unsupported

with extra("torch"):
    import torch
    from torch import nn
    from transformers import AttentionInterface, AttentionMaskInterface

NAME = "specbranch"  # of this attention, in the registries of Transformers
_UNKNOWN_FEATURES = ("softcap", "s_aux", "position_bias")  # what some models ask of attention and this one cannot do


class PlainModel(nn.Module):
    """A model of Transformers as it is, called as `FusedModel` is."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        model.set_attn_implementation(NAME)
        self.model = model

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, outputs: torch.Tensor | None, step: Step
    ) -> torch.Tensor:
        """Logits [outputs, vocabulary] behind some of the tokens [tokens], or behind all if `outputs` is None."""
        output = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            logits_to_keep=0 if outputs is None else outputs,
            use_cache=False,
            specbranch_step=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def get_input_embeddings(self) -> Any:
        """The input embedding."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """The output layer."""
        return self.model.get_output_embeddings()


def _attend_layer(
    module: Any,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    specbranch_step: Step | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """`Step.attend` as Transformers calls it, in every layer of an engine's model."""
    is_plain = all(features.get(name) is None for name in _UNKNOWN_FEATURES)
    if specbranch_step is None or attention_mask is not None or not is_plain:
        raise unsupported(type(module).__name__, "its attention is not plain")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    fresh = torch.cat((key, value), dim=1)[0].transpose(0, 1)
    found = specbranch_step.attend(module.layer_idx, query[0].transpose(0, 1), fresh, scale)
    return found.flatten(1, 2)[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """The mask that Transformers makes for this attention: none, as the step knows what each token sees."""


AttentionInterface.register(NAME, _attend_layer)
AttentionMaskInterface.register(NAME, _no_mask)
