"""The real models that tests decode with. A test that needs an absent one skips, and says so.

A pair is a dense target, and itself, packed, as its draft. The draft errs at times, because llama.cpp rounds
activations. Where a test decodes many tokens and their sense does not matter, a pair without its middle layers, which
`scripts/setup --all` makes, takes a third of the time.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

PAIR = "smollm2-135m"
SHORT = "smollm2-short"


def model_path(name: str) -> Path:
    """Return the path of a model below $SPECBRANCH_MODELS; skip the test if there is none."""
    store = os.environ.get("SPECBRANCH_MODELS")
    if not store:
        pytest.skip("SPECBRANCH_MODELS is not set; it names the directory of test models")
    path = Path(store) / name
    if not path.exists():
        pytest.skip(f"{name} is not in SPECBRANCH_MODELS")
    return path


def require_pair(*modules: str, name: str = PAIR) -> tuple[Path, Path]:
    """Return target and draft; skip the test if one of them, or a library, is absent."""
    for module in ("vllm", "llama_cpp", *modules):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    return model_path(f"{name}-dense"), model_path(name)
