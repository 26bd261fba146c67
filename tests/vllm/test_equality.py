"""Stock vLLM with the proposer, on real weights: the output is bare vLLM's, token by token, for every planner."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from specbranch.core.planners import PLANNERS
from tests.models import SHORT, require_pair
from tests.results import record
from tests.root import ROOT


@pytest.mark.timeout(900)
def test_greedy_output_equals_bare_vllm_for_every_planner() -> None:
    """16 prompts, float32, a model (dense) and itself as draft (packed, so that it errs at times)."""
    target, draft = require_pair(name=SHORT)
    command = [sys.executable, "-m", "tests.vllm.run_equality", "--target", str(target), "--draft", str(draft)]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    equal = {f"equal_{name}": num for name, num in result["equal"].items()}
    record("equality", prompts=result["prompts"], accepted=result["accepted"], **equal, **result["versions"])
    assert result["prompts"] == 16
    assert result["equal"] == dict.fromkeys(["bare", *PLANNERS], 16)
    assert result["accepted"] > 150
    # A service that proposes what the target does not have: no draft of it reaches vLLM.
    assert result["wrong"]["equal"] == 4
    assert result["wrong"]["foreign"] > 0
    assert all(counts["faults"] == 0 and counts["answered"] > 0 for counts in result["counts"].values())
