"""Linear layers of one input joined into one, in their own dtype. `int8.PackedLinear` is the same in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.engines.extras import extra

with extra("torch"):
    import torch
    from torch import nn


class JoinedLinear(nn.Module):
    """The layers' outputs end to end: one product, which may be added to what is there."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        weights = [linear.weight.detach() for linear in linears]
        self.weight = nn.Parameter(weights[0] if len(weights) == 1 else torch.cat(weights), requires_grad=False)
        bias = joined_bias(linears)
        self.bias = None if bias is None else nn.Parameter(bias.to(self.weight), requires_grad=False)
        self._transposed = self.weight.detach().t()  # the same memory

    def forward(self, rows: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The outputs for rows [rows, inputs]; plus `residual`, if given."""
        base = self.bias if residual is None else residual
        if base is None:
            return torch.mm(rows, self._transposed)
        out = torch.addmm(base, rows, self._transposed)
        return out if residual is None or self.bias is None else out.add_(self.bias)


def joined_bias(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    """The biases end to end, in float32, with zeros for layers without; None if no layer has one."""
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            torch.zeros(len(one.weight), device=one.weight.device) if one.bias is None else one.bias.detach().float()
            for one in linears
        ]
    )


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """A plain layer of these weights."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    return linear
