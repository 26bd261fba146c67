"""The benchmark on real engines, from names of models to a report: what a person with other models runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specbranch.bench.results import read_results, summarize
from specbranch.trace import read_trace
from tests.models import PAIR, require_pair

DRAFT, TARGET = PAIR, f"{PAIR}-dense"

SCENARIO = """
name = "tiny"
target = "{target}"
draft = "{draft}"
max_tokens = 24
{more}
[[prompts]]
task = "own"
file = "own.jsonl"
field = "text"
count = 2
[[methods]]
name = "bare"
{peers}
[[methods]]
name = "specbranch"
planner = "specbranch"
is_gated = false
"""
PEER = """
[[methods]]
name = "ngram"
speculative_config = { method = "ngram", num_speculative_tokens = 4, prompt_lookup_max = 3, prompt_lookup_min = 1 }
"""
TEXTS = ("Say this again, word for word: one two three four five six seven eight nine ten.", "Count from 1 to 20.")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    target, _ = require_pair()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    # Models are found by name, as on the hub.
    monkeypatch.setenv("SPECBRANCH_MODELS", str(target.parent))
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return tmp_path


def specbranch(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "specbranch", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def run(directory: Path, more: str = "", peers: str = "") -> Path:
    scenario, out = directory / "tiny.toml", directory / "tiny.jsonl"
    scenario.write_text(SCENARIO.format(target=TARGET, draft=DRAFT, more=more, peers=peers))
    specbranch("bench", "run", str(scenario), "--data", str(directory), "--out", str(out))
    return out


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_methods_and_peers_are_measured_and_reported(directory: Path) -> None:
    """Memory for two engines only, so that they take turns as large ones must."""
    out = run(directory, "engines_at_once = 2\nblock = 2", PEER)
    lines = {line.method: line for line in summarize(read_results(out))}

    assert {name: line.trials for name, line in lines.items()} == {"bare": 2, "ngram": 2, "specbranch": 2}
    assert lines["bare"].emitted_per_round == 1.0
    assert lines["bare"].accepted_share is None
    assert (lines["ngram"].accepted_share or 0) > 0
    assert (lines["specbranch"].step_ms or 0) > 0
    told = [record["draft_us"] for record in read_results(out).records if record["method"] == "specbranch"]
    assert all(first_us > 0 for first_us, _ in told)
    said = specbranch("bench", "report", str(out), "--out", str(directory / "report"), "--method", "specbranch")
    assert "where specbranch loses" in said
    assert "<svg" in (directory / "report" / "report.html").read_text()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_servers_are_measured_under_load(directory: Path) -> None:
    out = run(directory, "[served]\nrates = [4.0]\nrequests = 4")
    records = read_results(out).records

    assert {record["method"] for record in records} == {"bare", "specbranch"}
    for record in records:
        assert record["completed"] == 4
        assert record["times_ms"]["ttft"]["p50"] > 0
        assert record["times_ms"]["tpot"]["p99"] >= record["times_ms"]["tpot"]["p50"] > 0


@pytest.mark.timeout(1200)
def test_a_plan_is_made_from_what_is_measured(directory: Path) -> None:
    trace = directory / "own.jsonl.gz"
    words = ["--prompts", str(directory / "own.jsonl"), "--field", "text", "--num-prompts", "2", "--max-tokens", "24"]
    said = specbranch(
        "plan",
        TARGET,
        "--draft",
        DRAFT,
        *words,
        "--concurrency",
        "1,4",
        "--dtype",
        "float32",
        "--record",
        str(trace),
        "--json",
    )
    document = json.loads(said.splitlines()[-1])

    assert 0.7 < document["survey"]["agreement"] <= 1
    assert document["c"] > 0
    planners = {(one["planner"], one["concurrency"]) for one in document["forecasts"]}
    assert {("none", 1), ("pearl", 1), ("specbranch", 4)} <= planners
    assert read_trace(trace).num_tokens == document["survey"]["tokens"]
