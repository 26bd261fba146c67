"""The examples with real vLLM, real weights and real processes."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.test_simulate import python, run
from tests.models import PAIR, SHORT, require_pair
from tests.root import ROOT
from tests.vllm.serving import serving

__all__ = ["python"]  # the fixture

pytestmark = pytest.mark.timeout(600)

# A draft as large as its target does not pay, and `budget` then submits nothing: `pearl` always does. On the same core
# as vLLM's threads, which spin, its answers come too late.
WORDS = ("--planner", "pearl", "--memory", "0.3", "--eager")


@pytest.fixture(scope="module")
def pair() -> tuple[str, str]:
    target, draft = require_pair(name=SHORT)
    return str(target), str(draft)


def num_accepted(printed: str) -> int:
    (found,) = re.findall(r"^accepted draft tokens: (\d+)$", printed, re.MULTILINE)
    return int(found)


def test_vllm_with_a_draft_server(pair: tuple[str, str]) -> None:
    printed = run("examples/offline.py", *pair, "--cores", "1", *WORDS, bind="0")

    assert "def fibonacci(n):" in printed
    assert num_accepted(printed) > 0


@pytest.fixture
def draft_elsewhere(pair: tuple[str, str], tmp_path: Path) -> Iterator[str]:
    """A draft service that listens at TCP, with keys in `tmp_path / "keys"`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    run("-m", "specbranch", "keys", str(tmp_path / "keys"))
    command = [sys.executable, "-m", "specbranch", "draft", pair[1], "--listen", address, "--cores", "1"]
    with (tmp_path / "draft.log").open("wb") as log:
        process = subprocess.Popen([*command, "--keys", str(tmp_path / "keys")], cwd=ROOT, stdout=log, stderr=log)
    try:
        end_s = time.monotonic() + 120
        while "listening at" not in (tmp_path / "draft.log").read_text():
            assert process.poll() is None and time.monotonic() < end_s, (tmp_path / "draft.log").read_text()
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def test_a_target_with_its_draft_on_another_machine(
    pair: tuple[str, str], draft_elsewhere: str, tmp_path: Path
) -> None:
    words = (pair[0], draft_elsewhere, "--keys", str(tmp_path / "keys"), *WORDS)

    assert num_accepted(run("examples/two_machines.py", *words, bind="0")) > 0


@pytest.mark.parametrize(
    ("planner", "words"),
    [("cautious", ["--set", "least=0"]), ("specbranch", ["--predictor", "stretch"])],
    ids=["planner", "predictor"],
)
def test_a_planner_and_a_predictor_of_another_package_draft_for_vllm(
    pair: tuple[str, str], python: str, planner: str, words: list[str]
) -> None:
    own = ("--planner", planner, "--set", "wait_for_draft=true", *words)
    given = ("generate", pair[0], "--draft", pair[1], *own, "--dtype", "float32", "--max-tokens", "24", "--compare")
    printed = run("-m", "specbranch", *given, "--prompt", "Count to ten.", "--json", python=python)
    document = json.loads(printed.splitlines()[-1])

    assert document["planner"] == planner
    assert document["accepted"] > 0
    assert document["is_equal"], "in float32 the output is bare vLLM's"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_kit_finds_the_output_exact_with_a_planner_of_another_package(python: str) -> None:
    target, draft = require_pair(name=PAIR)
    words = ("check", str(target), "--draft", str(draft), "--planner", "cautious", "--dtype", "float32", "--quick")
    printed = run("-m", "specbranch", *words, python=python, timeout_s=1700)

    assert "greedy in float32: cautious" in printed
    assert "all checks hold" in printed


def test_the_openai_client_in_front_of_serve(pair: tuple[str, str], tmp_path: Path) -> None:
    require_pair("openai", name=SHORT)
    words = ["--draft", pair[1], "--planner", "budget", "--dtype", "float32", "--max-model-len", "512"]
    words += ["--enforce-eager", "--served-model-name", "short"]
    with serving(tmp_path, pair[0], *words) as served:
        printed = run("examples/client.py", "--model", "short", "--url", f"{served.url}/v1")

    assert printed.strip()
