"""The pair of models that the tests of this directory decode with.

By default SmolLM2 without its middle layers, which `scripts/setup --all` makes: real weights, small enough for a slow
machine. `SPECBRANCH_TEST_PAIR=smollm2-135m` takes the whole model, as `scripts/nightly` does.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.engines.models import model_path

DRAFT = os.environ.get("SPECBRANCH_TEST_PAIR", "smollm2-short")  # packed, so that it errs at times
TARGET = f"{DRAFT}-dense"


def require_pair(*modules: str) -> tuple[Path, Path]:
    """Target and draft; skips the test if one of them, or a library, is not there."""
    for module in ("vllm", "llama_cpp", *modules):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    return model_path(TARGET), model_path(DRAFT)
