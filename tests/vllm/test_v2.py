"""Model Runner V2 with our speculator: the output is bare V2's. On the CPU, by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from specbranch.core.planners import PLANNERS
from tests.root import ROOT
from tests.vllm.programs import judge_sampled

ROWS, GAMMA = 8, 4
SOME = ["budget", "sps"]
# Planners whose drafts depend on the time that a step takes, or that have none.
UNSURE = ["budget", "none"]


def run(part: str) -> Any:
    for module in ("vllm", "triton", "torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    command = [sys.executable, "-m", "tests.vllm.run_v2", part]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(result: Any, planners: list[str]) -> None:
    assert result["runner"] == "vllm.v1.worker.cpu.model_runner NoneType"
    assert result["drafting_runner"] == "vllm.v1.worker.cpu.model_runner SpecBranchSpeculator"
    assert result["chunks"]
    assert result["equal"] == dict.fromkeys(planners, ROWS)
    for planner, (submitted, accepted) in result["drafted"].items():
        assert submitted >= accepted > 20 or planner in UNSURE, planner
    assert result["aborted"]["equal"] == ROWS
    assert result["killed"]["equal"] == ROWS
    assert 0 < result["killed"]["answered"] < result["killed"]["calls"]
    assert result["faults"] == 0


@pytest.mark.timeout(1200)
def test_greedy_output_equals_bare_v2_though_requests_are_aborted_and_the_draft_is_killed() -> None:
    check(run("some"), SOME)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_same_holds_with_asynchronous_scheduling() -> None:
    result = run("async")

    assert result["is_async"]
    check(result, SOME)
    for submitted, _ in result["drafted"].values():
        assert submitted % GAMMA == 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_same_holds_with_another_number_of_places_at_each_load() -> None:
    check(run("load"), SOME)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_two_tensor_parallel_workers_have_the_same_drafts() -> None:
    if not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip("cores 0 and 1 are needed")
    result = run("ranks")

    assert result["equal"] == ROWS
    assert result["drafted"][1] > 20


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_greedy_output_equals_bare_v2_for_every_planner() -> None:
    check(run("all"), list(PLANNERS))


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_drawn_tokens_leave_v2s_distribution_alone_and_wrong_probabilities_are_noticed() -> None:
    judge_sampled(run("sampled"), least_kept=0.2)
