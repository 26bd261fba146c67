"""The pairs of models that the tests of this directory decode with: a dense target, and itself, packed, as its draft.

The draft errs at times, because llama.cpp rounds activations. Where many tokens are decoded and their sense does not
matter, a pair without its middle layers, which `scripts/setup --all` makes, takes a third of the time.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.engines.models import model_path

PAIR = "smollm2-135m"
SHORT = "smollm2-short"


def require_pair(*modules: str, name: str = PAIR) -> tuple[Path, Path]:
    """Target and draft; skips the test if one of them, or a library, is not there."""
    for module in ("vllm", "llama_cpp", *modules):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    return model_path(f"{name}-dense"), model_path(name)
