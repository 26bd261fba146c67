"""Linear layers in 8 bits for the CPU: weights by output channel, activations by row, products by oneDNN.

Where the CPU has instructions for it (AMX, VNNI) a step then costs what reading the weights costs, and further rows
cost little. A row has its own scale, so its result does not hang on the rows beside it.
"""

from __future__ import annotations

from typing import Any

from specbranch.engines.protocol import EngineError

try:
    import torch
    from torch import nn
except ImportError as missing:
    raise EngineError(f"8 bits need torch ({missing}); pip install 'specbranch[torch]'") from missing

_LARGEST = 127.0
_LEAST = 1e-8
_FEWEST = 4  # rows; for one or two oneDNN has no fast kernel where a layer is narrow, and takes a hundred times as long


class Int8Linear(nn.Module):
    """Linear layers of one input as one, with packed 8-bit weights; inputs and outputs are float32."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach().float() for linear in linears])
        self._scales = weight.abs().amax(dim=1).clamp(min=_LEAST) / _LARGEST
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        integers = (weight / self._scales[:, None]).round().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(integers, None)
        self._bias = _joined_bias(linears)
        self._few = torch.zeros(_FEWEST, weight.shape[1], dtype=torch.int8)  # rows beyond those asked for hold anything
        self.num_bytes = weight.numel()

    def forward(self, rows: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """As the linear layers it was made from, end to end, within the error of 8 bits; added to `onto`, if given."""
        flat = rows.reshape(-1, rows.shape[-1])
        count = len(flat)
        scales = flat.abs().amax(dim=-1, keepdim=True).clamp_(min=_LEAST).div_(_LARGEST)
        integers = self._few if count <= _FEWEST else torch.empty(flat.shape, dtype=torch.int8)
        integers[:count].copy_(torch.div(flat, scales).round_())
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            integers, 1.0, 0, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        out = out[:count].mul_(scales)
        if self._bias is not None:
            out.add_(self._bias)
        out = out.view(*rows.shape[:-1], -1)
        return out if onto is None else out.add_(onto)


def _joined_bias(linears: tuple[nn.Linear, ...]) -> torch.Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    biases = [torch.zeros(len(one.weight)) if one.bias is None else one.bias.detach().float() for one in linears]
    return torch.cat(biases)


def can_int8() -> bool:
    """Whether this torch has the products of 8 bits."""
    return hasattr(torch.ops.onednn, "qlinear_pointwise")


def to_int8(model: Any) -> Any:
    """The model with its linear layers in 8 bits; everything else is as it was."""
    if not can_int8():
        raise EngineError("this torch has no oneDNN for 8 bits; use dtype bfloat16, or the llama.cpp engine")
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child))
    return model


def packed_bytes(model: Any) -> int:
    """Bytes of the weights that are packed."""
    return sum(module.num_bytes for module in model.modules() if isinstance(module, Int8Linear))
