"""What a draft engine is opened with, and where models are found. Knows no engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from specbranch.engines.protocol import EngineError


def _silent(_: str) -> None:
    pass


DTYPES = ("auto", "int8", "w8a16", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which model to load, on which device, and the limits of the engine.

    `model` is a path, a name below $SPECBRANCH_MODELS, or a name on the Hugging Face hub (`repo` for torch,
    `repo:file.gguf` for llama.cpp). `threads` None leaves the choice to the engine. `dtype` is one of `DTYPES`, for
    torch: int8 quantizes weights and activations, w8a16 only weights, and auto takes the fastest on a CPU and the
    model's own dtype on other devices. llama.cpp leaves weights as they are; float32 gives it a cache of 32 bits.
    `max_tokens` None leaves the size of the cache to the engine, which has `EngineInfo.max_tokens` tell it.
    """

    model: str
    device: str = "cpu"
    threads: int | None = None
    dtype: str = "auto"
    max_tokens: int | None = None  # in the cache, shared ones counted once; by memory if None
    max_handles: int = 128  # open at once
    row_limit: int = 64  # rows in one step
    top_k: int = 32  # tokens of a distribution
    tell: Callable[[str], None] = field(default=_silent, compare=False, repr=False)  # hears what loading does

    def __post_init__(self) -> None:
        for name in ("threads", "max_tokens", "max_handles", "row_limit", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineError(f"{name} is {value}; give at least 1")


def found_model(model: str) -> str:
    """The path of a model on this machine, or else its name, for callers that download from the hub themselves."""
    return str(local_model(model) or model)


def local_model(model: str) -> Path | None:
    """The path of a model on this machine: as given, or below $SPECBRANCH_MODELS; None if it is not here."""
    given = Path(model).expanduser()
    if given.exists():
        return given
    store = os.environ.get("SPECBRANCH_MODELS")
    if store and (Path(store) / model).exists():
        return Path(store) / model
    return None
