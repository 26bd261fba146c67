"""Run any causal model of Transformers as a draft engine, on any torch device.

Importing this package imports neither torch nor Transformers; accessing `TorchEngine` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbranch.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine"]


def __getattr__(name: str) -> Any:
    if name != "TorchEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specbranch.engines.torch.engine import TorchEngine

    return TorchEngine
