"""`specbranch check` on real vLLM and on real servers: a right pair holds, and a wrong distribution is caught."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specbranch.exactness.vllm_findings import FAILED, HOLDS
from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions
from specbranch.plugins.vllm.settings import PROPOSER
from tests.measuring import record
from tests.models import SHORT, require_pair
from tests.vllm.programs import run_with_sampler
from tests.vllm.serving import stock_serving

ARGUMENTS = ("--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--max-num-seqs", "8")
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
FAULTS = """
import json
from specbranch.plugins.vllm import compat

print(json.dumps([current_platform.is_cpu(), *compat.patch_cpu_sampler()]))
"""


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


def compare(
    tmp_path: Path, target: Path, num_samples: int, *speculation: str, **environment: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """The code and the findings of a server with speculation against one without."""
    places = [tmp_path / name for name in ("reference", "endpoint")]
    for place in places:
        place.mkdir()
    with (
        stock_serving(target, places[0], *ARGUMENTS, **ENVIRONMENT) as reference,
        stock_serving(target, places[1], *ARGUMENTS, *speculation, **ENVIRONMENT, **environment) as endpoint,
    ):
        words = ["check", "--endpoint", endpoint.url, "--reference", reference.url, "--quick", "--json"]
        words += ["--num-prompts", "4", "--num-samples", str(num_samples), "--tie", "1e-5"]
        command = [sys.executable, "-m", "specbranch", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    document = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, {finding["name"]: finding for finding in document["findings"]}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_our_proposer_behind_a_server_holds(tmp_path: Path) -> None:
    """False alarms: one in a thousand runs."""
    target, draft = require_pair(name=SHORT)
    drafting = json.dumps({"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 4})
    with DraftProcess(DraftServiceOptions(str(draft), threads=1), tmp_path / "draft.log") as service:
        section = {"address": service.address, "deadline_ms": 2000, "is_gated": False}
        config = json.dumps({"specbranch": section})
        code, found = compare(tmp_path, target, 40, "--speculative-config", drafting, "--additional-config", config)

    record("servers", **found["drafts"]["figures"])
    assert code == 0, [finding for finding in found.values() if finding["result"] == "FAILED"]
    assert found["greedy"]["figures"]["equal"] == 4
    assert found["drafts"]["figures"]["accepted"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_faults_of_stock_vllm_on_the_cpu_are_found(tmp_path: Path) -> None:
    """With the whole model: the answers of one with eight layers are too alike."""
    target, _ = require_pair()
    if not run_with_sampler(FAULTS):
        pytest.skip("this vLLM does not have them")
    code, found = compare(tmp_path, target, 100, "--speculative-config", json.dumps(NGRAM), VLLM_PLUGINS="")

    assert code == 1
    assert found["greedy"]["result"] == "holds"
    assert found["distribution: all together"]["result"] == "FAILED"
    assert found["distribution: top-k 5"]["says"] == "the endpoint broke down"
