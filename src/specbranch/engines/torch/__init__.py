"""Run any causal model of Transformers as a draft engine, on any torch device.

Importing this package imports neither torch nor Transformers; accessing `TorchEngine` or calling `open_torch` does.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from specbranch.engines.base import DraftEngine, EngineOptions
from specbranch.errors import EngineError

if TYPE_CHECKING:
    from specbranch.engines.torch.engine import TorchEngine

__all__ = ["TorchEngine", "open_torch"]
log = logging.getLogger(__name__)


def open_torch(options: EngineOptions) -> DraftEngine:
    """Open the engine that batches rows, or the generic one for a model that this cannot run.

    Raise `EngineError` if neither gives the distributions of the model's own forward pass.
    """
    from specbranch.engines.torch.engine import TorchEngine
    from specbranch.engines.torch.generic import GenericEngine
    from specbranch.engines.torch.plain import UnsupportedModel

    try:
        return TorchEngine(options)
    except UnsupportedModel as error:
        cause = str(error)
    try:
        engine = GenericEngine(options)
    except UnsupportedModel as error:
        raise EngineError(
            f"this model cannot be a draft on the torch engine. {cause}; on the generic path: {error}; choose another "
            "draft, such as one of Llama, Qwen2, Qwen3 or SmolLM2"
        ) from error
    log.warning("the draft runs row by row on the generic path, which is correct and slower: %s", cause)
    return engine


def __getattr__(name: str) -> Any:
    if name != "TorchEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specbranch.engines.torch.engine import TorchEngine

    return TorchEngine
