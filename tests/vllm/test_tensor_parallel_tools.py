"""`generate`, `bench`, `plan` and `check` with a target that is divided among two workers: flags of vLLM go through.

The target is its own draft, so nearly every draft token is accepted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from specbranch.bench.results import read_results, summarize
from specbranch.exactness.vllm_findings import FAILED
from tests.models import SHORT, require_pair
from tests.vllm.made_models import write_even

TWO = ["--tensor-parallel-size", "2"]
DRAFT = ["--draft-dtype", "float32", "--draft-cores", "1"]
CORES = ["--target-cores", "0,1"]
SCENARIO = """
name = "two"
target = "{model}"
draft = "{model}"
dtype = "float32"
max_tokens = 16
deadline_ms = 30000.0
target_cores = [0, 1]
draft_cores = [1]
draft_arguments = ["--dtype", "float32"]
arguments = {{ tensor_parallel_size = 2 }}
engines_at_once = 1
[[prompts]]
task = "own"
file = "own.jsonl"
field = "text"
count = 1
[[methods]]
name = "bare"
[[methods]]
name = "sps"
planner = "sps"
is_gated = false
[[methods]]
name = "ngram"
speculative_config = {{ method = "ngram", num_speculative_tokens = 4, prompt_lookup_max = 3, prompt_lookup_min = 1 }}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    target, _ = require_pair(name=SHORT)
    if not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip("cores 0 and 1 are needed")
    return str(write_even(target, tmp_path_factory.mktemp("models") / "even"))


def specbranch(*words: str, codes: tuple[int, ...] = (0,)) -> str:
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-m", "specbranch", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in codes, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def document(said: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_generate_drafts_for_two_workers_and_the_answer_is_that_of_one(model: str) -> None:
    """With and without drafts in one engine, so other settings reach all workers while it runs."""
    question = [model, "--raw", "--prompt", "A story about", "--max-tokens", "24", "--dtype", "float32", "--json"]
    waiting = ["--planner", "sps", "--deadline-ms", "30000"]
    two = document(specbranch("generate", *question, "--draft", model, "--compare", *waiting, *DRAFT, *CORES, *TWO))
    one = document(specbranch("generate", *question, "--bare"))

    assert two["tokens"] == two["plain"]["tokens"] == one["tokens"]
    assert two["accepted"] > 5 and two["wait_s"] > 0
    assert two["plain"]["accepted"] == 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_bench_measures_two_workers(model: str, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(json.dumps({"text": "Say this again: one two three four five six."}))
    scenario, out = tmp_path / "two.toml", tmp_path / "two.jsonl"
    scenario.write_text(SCENARIO.format(model=model))
    specbranch("bench", "run", str(scenario), "--data", str(tmp_path), "--out", str(out))
    results = read_results(out)
    lines = {line.method: line for line in summarize(results)}

    assert {name: line.trials for name, line in lines.items()} == {"bare": 1, "sps": 1, "ngram": 1}
    assert lines["bare"].emitted_per_round == 1.0
    assert (lines["sps"].accepted_share or 0) > 0.5
    counts = next(record["counts"] for record in results.records if record["method"] == "sps")
    assert counts["answered"] > 0 and counts["faults"] == 0
    assert {line.same_as_bare for line in lines.values()} == {1.0}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_plan_is_made_for_two_workers_and_its_command_serves_them(model: str, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(json.dumps({"text": "Count from 1 to 20."}))
    words = ["--prompts", str(tmp_path / "own.jsonl"), "--field", "text", "--max-tokens", "16", "--concurrency", "1"]
    said = specbranch("plan", model, "--draft", model, *words, "--dtype", "float32", *DRAFT, *CORES, *TWO)

    assert "c (target step / draft step) is" in said
    assert said.splitlines()[-1].strip().endswith("--dtype float32 --tensor-parallel-size 2")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_check_compares_two_workers_with_two_workers(model: str) -> None:
    size = ["--quick", "--num-prompts", "4", "--num-tokens", "16", "--num-samples", "16", "--alpha", "1e-4"]
    pair = [model, "--draft", model, "--dtype", "float32", "--planner", "sps", "--deadline-ms", "30000"]
    found = document(specbranch("check", *pair, *size, *DRAFT, *CORES, *TWO, "--json", codes=(0, 1)))
    greedy = [one for one in found["findings"] if one["name"].startswith("greedy in float32: ")]

    # This model, with heads added, never ends its JSON: no such output can be looked at.
    failed = [
        one for one in found["findings"] if one["result"] == FAILED and (one["n"] or one["name"] != "JSON parses")
    ]
    assert failed == [], json.dumps(failed, indent=1)
    assert [one["name"] for one in greedy] == ["greedy in float32: sps"]
    assert greedy[0]["figures"]["equal"] == 4 and greedy[0]["figures"]["accepted"] > 0
