"""A target divided among two workers: one of them drafts, and the output is the same."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.models import model_path
from tests.root import ROOT


@pytest.mark.timeout(1500)
def test_two_tensor_parallel_workers_say_the_same_with_and_without_drafts() -> None:
    """Float32; Qwen2.5-Coder-0.5B as target (dense) and as its own draft (packed)."""
    for module in ("vllm", "llama_cpp"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    if not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip("cores 0 and 1 are needed")
    target, draft = model_path("qwen-coder-0.5b-dense"), model_path("qwen-coder-0.5b")
    program = [sys.executable, "-m", "tests.vllm.run_tensor_parallel"]
    command = [*program, "--target", str(target), "--draft", str(draft)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["prompts"], result["equal"]) == (4, 4)
    assert result["accepted"] > 20
