"""The whole of `specbranch check` on real vLLM: a right pair holds, and a wrong distribution is caught."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specbranch.exactness.vllm_findings import FAILED, HOLDS
from tests.models import require_pair
from tests.results import record


def run_check(*options: str) -> tuple[int, dict[str, Any]]:
    target, draft = require_pair()
    command = [sys.executable, "-m", "specbranch", "check", str(target), "--draft", str(draft), "--quick", "--json"]
    # Served in float32 as well: CPUs without AMX emulate bfloat16, and then everything takes three times as long.
    words = ["--dtype", "float32", *options]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(1800)
def test_a_right_pair_holds(tmp_path: Path) -> None:
    """False alarms: at most one in ten thousand runs, by --alpha. Every check had accepted drafts, or it would fail."""
    report = tmp_path / "report.md"
    size = ["--num-prompts", "4", "--num-tokens", "16", "--num-samples", "16"]
    code, document = run_check("--alpha", "1e-4", *size, "--report", str(report))

    results = Counter(finding["result"] for finding in document["findings"])
    drafts = [finding["figures"] for finding in document["findings"] if finding["name"].startswith("distribution: ")]
    record(
        "check",
        holds=results[HOLDS],
        failed=results[FAILED],
        submitted=sum(figures["submitted"] for figures in drafts),
        accepted=sum(figures["accepted"] for figures in drafts),
        vllm=document["versions"]["vllm"],
    )
    assert code == 0, json.dumps([one for one in document["findings"] if one["result"] == "FAILED"], indent=1)
    assert document["holds"] is True
    names = [finding["name"] for finding in document["findings"]]
    assert sum(name.startswith("distribution: ") for name in names) == 9
    assert {"greedy in float32: budget", "logprobs agree", "JSON parses", "stop string absent"} <= set(names)
    assert "all checks hold" in report.read_text()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_wrong_distribution_is_caught() -> None:
    """The second engine samples at temperature 2, not 1; greedy decoding is as it should be and still holds."""
    code, document = run_check(
        "--num-prompts", "2", "--num-tokens", "8", "--num-samples", "32", "--wrong-temperature", "2"
    )
    failed = [finding["name"] for finding in document["findings"] if finding["result"] == "FAILED"]

    assert code == 1
    assert "distribution: logprobs: surprise" in failed
    assert not any(name.startswith("greedy") for name in failed)
