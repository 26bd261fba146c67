"""`specbranch check --endpoint` on real servers: our proposer holds, and stock vLLM's faults on the CPU are found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specbranch.launch.draft_process import DraftProcess, DraftServiceOptions
from specbranch.plugins.vllm.settings import PROPOSER
from tests.models import SHORT, require_pair
from tests.results import record
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
