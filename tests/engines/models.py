"""Where the tests find real models. A test that needs one skips, and says so, when it is absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def model_path(name: str) -> Path:
    """The path of a model below $SPECBRANCH_MODELS; skips the test if there is none."""
    store = os.environ.get("SPECBRANCH_MODELS")
    if not store:
        pytest.skip("SPECBRANCH_MODELS is not set; it names the directory of test models")
    path = Path(store) / name
    if not path.exists():
        pytest.skip(f"{name} is not in SPECBRANCH_MODELS")
    return path
