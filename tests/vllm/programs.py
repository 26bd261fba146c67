"""Runs a program of this directory that needs real vLLM and real weights, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.models import model_path

ROOT = Path(__file__).parents[2]


def run_program(name: str) -> Any:
    """The JSON document that it prints; SmolLM2 is the target (dense) and the draft (packed, so that it errs)."""
    for module in ("vllm", "llama_cpp"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    target, draft = model_path("smollm2-135m-dense"), model_path("smollm2-135m")
    command = [sys.executable, "-m", f"tests.vllm.run_{name}", "--target", str(target), "--draft", str(draft)]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
