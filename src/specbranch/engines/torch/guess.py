"""What the draft's heads guess, computed beside its output layer in the same step."""

from __future__ import annotations

from typing import Any

from specbranch.engines.extras import extra
from specbranch.engines.heads import Heads
from specbranch.engines.torch.int8 import PackedLinear
from specbranch.engines.torch.joined import linear_of

with extra("torch"):
    import torch
    from torch import nn
    from torch.nn.functional import silu


def narrowed(model: Any, heads: Heads) -> nn.Linear:
    """The part of the model's output layer, not packed yet, that heads use; refuses heads of another model."""
    full = model.get_output_embeddings()
    heads.require_fit(full.in_features, full.out_features)
    chosen = torch.from_numpy(heads.tokens).long().to(full.weight.device)
    return linear_of(full.weight[chosen], None if full.bias is None else full.bias[chosen])


class GuessHead:
    """The heads of one model. It keeps the hidden states that the output layer was given last."""

    def __init__(self, heads: Heads, model: Any, narrow: nn.Linear, kind: type[PackedLinear] | None) -> None:
        """`kind` packs weights as the model's are packed, if they are."""
        self._embedding = model.get_input_embeddings()
        plain = (
            linear_of(torch.from_numpy(heads.w_in), torch.from_numpy(heads.b_in)),
            linear_of(torch.from_numpy(heads.w_out)),
            narrow,
        )
        weight = self._embedding.weight
        self._tokens = torch.from_numpy(heads.tokens).long().to(weight.device)
        self._in, self._out, self._narrow = (kind(one.float()) if kind else one.to(weight) for one in plain)
        self._hidden: torch.Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._keep)

    def __call__(self, firsts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows the first choices [outputs] of the last step, and how sure the heads are."""
        assert self._hidden is not None
        hidden, self._hidden = self._hidden, None
        inputs = torch.cat([hidden, self._embedding(firsts).to(hidden.dtype)], dim=-1)
        logits = self._narrow(hidden + self._out(silu(self._in(inputs)))).float()  # [outputs, tokens]
        best = logits.max(dim=-1)
        return self._tokens[best.indices], (best.values - logits.logsumexp(dim=-1)).exp()

    def _keep(self, _: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        self._hidden = given[0].reshape(-1, given[0].shape[-1])
