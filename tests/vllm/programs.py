"""Runs the programs of this directory, which need real vLLM and real weights, in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.models import PAIR, require_pair
from tests.root import ROOT

# How sure the statistical tests of sampled runs are.
FALSE_ALARM = 1e-3  # of all tests of a run together
MAX_TESTS = 20  # of a run: the smallest p-value that can be found must lie below the level of each
# The beginning of a snippet that calls vLLM's sampler on the CPU.
WITH_SAMPLER = """
from vllm.platforms import current_platform
current_platform.import_kernels()
if current_platform.register_triton_kernel_overrides:  # None if there is no such method
    current_platform.register_triton_kernel_overrides()
else:  # before 0.31 the runner does it
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    CPUModelRunner._postprocess_triton(None)
from vllm.v1.sample import rejection_sampler
"""


def run_with_sampler(snippet: str) -> Any:
    """Run a snippet after `WITH_SAMPLER` and return the JSON list that it prints, without its first entry.

    That entry says whether this is a CPU; elsewhere the test is skipped.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    command = [sys.executable, "-c", WITH_SAMPLER + snippet]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    is_cpu, *found = json.loads(done.stdout.splitlines()[-1])
    if not is_cpu:
        pytest.skip("this vLLM does not run on the CPU")
    return found


def run_program(name: str, pair: str = PAIR) -> Any:
    """Run a program on a pair of models and return the JSON document that it prints."""
    target, draft = require_pair(name=pair)
    command = [sys.executable, "-m", f"tests.vllm.run_{name}", "--target", str(target), "--draft", str(draft)]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def judge_sampled(result: Any, least_kept: float) -> None:
    """Assert that drawn tokens left every distribution alone, enough were kept, and a wrong one was noticed."""
    tests = [p_value for one in result["found"].values() for p_value in one["p_values"]]
    assert len(tests) <= MAX_TESTS
    for name, one in result["found"].items():
        assert least_kept * one["submitted"] < one["accepted"] < 0.95 * one["submitted"], name
        assert one["sampled"] > 100, name
        assert min(one["p_values"]) > FALSE_ALARM / len(tests), name
    assert min(result["wrong"]["p_values"]) < FALSE_ALARM / len(tests)
