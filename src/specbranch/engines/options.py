"""What a draft engine is opened with, and where models are found. Knows no engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from specbranch.engines.protocol import EngineError

DTYPES = ("auto", "int8", "w8a16", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What to load, where, and how much of it at once.

    `model` is a path, a name below $SPECBRANCH_MODELS, or a name on the Hugging Face hub (`repo` for torch,
    `repo:file.gguf` for llama.cpp). `threads` None means the engine's own choice. `dtype` is one
    of `DTYPES`, for torch: int8 has weights and activations in 8 bits, w8a16 only weights, and auto takes what is
    fastest on this CPU, and the model's own type on other devices. llama.cpp takes weights as they are and, with
    float32, keeps its cache in 32 bits.
    """

    model: str
    device: str = "cpu"
    threads: int | None = None
    dtype: str = "auto"
    max_tokens: int = 16384
    max_handles: int = 128
    row_limit: int = 64
    top_k: int = 32

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_handles", "row_limit", "top_k"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.threads is not None and self.threads < 1:
            raise EngineError(f"threads is {self.threads}; give at least 1")


def found_model(model: str) -> str:
    """Where a model lies on this machine, or else its name, for whoever fetches models from the hub by itself."""
    return str(local_model(model) or model)


def local_model(model: str) -> Path | None:
    """Where a model lies on this machine: as given, or below $SPECBRANCH_MODELS; None if it must come from the hub."""
    given = Path(model).expanduser()
    if given.exists():
        return given
    store = os.environ.get("SPECBRANCH_MODELS")
    if store and (Path(store) / model).exists():
        return Path(store) / model
    return None
