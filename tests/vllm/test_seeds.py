"""Requests with a seed, sent twice to real vLLM: the second answer follows the distribution as the first does."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.root import ROOT

LIMIT = 61.1  # chi-square with 31 degrees of freedom exceeds it once in 1,000 times
NUM_PAIRS = 512


@pytest.mark.timeout(900)
def test_a_seed_gives_the_same_answer_again_and_its_answers_follow_the_distribution() -> None:
    """With the first answer as a draft of the second, the latter is far from it: 173 for 512 pairs, 570 for 2,000."""
    for module in ("vllm", "torch"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    command = [sys.executable, "-m", "tests.vllm.run_seeds", "--pairs", str(NUM_PAIRS)]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])

    assert result["second"]["chi_square"] < LIMIT
    assert result["equal"] == NUM_PAIRS
    assert result["seeded_drafts"] == 0
    assert result["unseeded_accepted"] > 20, "others are drafted for, from past answers"
