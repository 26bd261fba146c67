"""Stock vLLM with the proposer, on real weights: the output is bare vLLM's, token by token.

For every planner, under pressure, with an adapter, with a draft of another family, and with two workers.
Requests with a seed follow the distribution.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specbranch.core.planners import PLANNERS
from tests.measuring import record
from tests.models import SHORT, model_path, require_pair
from tests.root import ROOT
from tests.vllm.programs import run_program

SEEDS_LIMIT = 61.1  # chi-square with 31 degrees of freedom exceeds it once in 1,000 times
NUM_SEED_PAIRS = 512


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


@pytest.mark.timeout(900)
def test_greedy_output_equals_bare_vllm_with_drafts_from_the_text_alone() -> None:
    """Without a draft service. The prompts are decoded twice: the second time their answers are known."""
    target, _ = require_pair(name=SHORT)
    command = [sys.executable, "-m", "tests.vllm.run_equality", "--target", str(target), "--text"]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["is_alone"]
    assert result["equal"] == [result["prompts"]] * 2 == [16, 16]
    first, both = result["accepted"]
    assert both - first > 150 and both - first > first
    assert result["counts"]["text_faults"] == 0
    assert 0 < result["counts"]["text_accepted"] <= result["counts"]["text_tokens"]


@pytest.mark.timeout(900)
def test_preemption_and_chunked_prefill_leave_the_output_as_it_is() -> None:
    """Float32, greedy: every output equals that of bare vLLM with the same settings."""
    results = run_program("pressure", SHORT)

    assert {name: result["equal"] for name, result in results.items()} == {
        name: result["prompts"] for name, result in results.items()
    }
    # Beside long prompts that are still being read, a draft on one core may come too late for the short ones.
    assert sum(result["accepted"] for result in results.values()) > 50
    for name in ("preempted", "preempted, prefix cache"):
        assert results[name]["bare_preemptions"] > 0 < results[name]["drafted_preemptions"]
    assert results["chunked prefill"]["longest_prompt"] > 5 * 64


@pytest.mark.timeout(900)
def test_rows_with_an_adapter_get_no_drafts_and_the_others_do() -> None:
    result = run_program("lora")

    assert result["differing"], "the adapter must change what the model says"
    assert result["equal"] == dict.fromkeys(("bare", "told", "untold"), result["rows"])
    assert result["drafted"]["told"]["lora"] == 0 < result["drafted"]["told"]["plain"]
    assert result["asides"] > 0
    # The reason for all this: a proposer that cannot tell the rows apart drafts for both.
    assert result["drafted"]["untold"]["lora"] > 0


@pytest.mark.timeout(1200)
def test_a_draft_of_another_family_costs_vllm_nothing_and_is_told(tmp_path: Path) -> None:
    target, _ = require_pair("prometheus_client", name=SHORT)
    draft = model_path("qwen-coder-0.5b")
    command = [sys.executable, "-m", "tests.vllm.run_vocabulary", "--target", str(target), "--draft", str(draft)]
    environment = {**os.environ, "SPECBRANCH_RUN": "vocabulary", "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["equal"] == result["prompts"] == 3
    assert result["tokens"] > 20
    assert result["draft_tokens"] == 0
    found = result["metrics"]
    assert found["vocabulary"] == 1 and "on" not in found
    assert found["specbranch_other_vocabulary_total"] == found["specbranch_calls_total"] > 10
    assert "specbranch_submitted_tokens_sum" not in found and "specbranch_faults_total" not in found
    assert done.stderr.count("the draft 'qwen-coder-0.5b.gguf' is not used, because it has another vocabulary") == 1
    assert "stand for different text in the draft; choose a draft with the target's tokenizer" in done.stderr


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


@pytest.mark.timeout(900)
def test_a_seed_gives_the_same_answer_again_and_its_answers_follow_the_distribution() -> None:
    """With the first answer as a draft of the second, the latter is far from it: 173 for 512 pairs, 570 for 2,000."""
    for module in ("vllm", "torch"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    command = [sys.executable, "-m", "tests.vllm.run_seeds", "--pairs", str(NUM_SEED_PAIRS)]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])

    assert result["second"]["chi_square"] < SEEDS_LIMIT
    assert result["equal"] == NUM_SEED_PAIRS
    assert result["seeded_drafts"] == 0
    assert result["unseeded_accepted"] > 20, "others are drafted for, from past answers"
