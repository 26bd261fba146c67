"""`specbranch generate` as a person would call it: real processes, real vLLM, real weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models import require_pair

QUESTION = ["--prompt", "Name three colours and say where they are found.", "--max-tokens", "40"]
WAITING = [
    "--planner",
    "specbranch",
    "--set",
    "wait_for_draft=true",
    "--deadline-ms",
    "30000",
]  # so that there are drafts on a machine that stands still

pytestmark = pytest.mark.timeout(1500)


def generate(*arguments: str, said: str = "", with_draft: bool = True) -> subprocess.CompletedProcess[str]:
    target, draft = require_pair()
    pair = [str(target), *(["--draft", str(draft)] if with_draft else ["--bare"])]
    command = [sys.executable, "-m", "specbranch", "generate", *pair, "--dtype", "float32", "--max-model-len", "256"]
    done = subprocess.run(
        [*command, *arguments], input=said, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_answer_is_that_of_bare_vllm(tmp_path: Path) -> None:
    """Greedy, in 32 bits: the same tokens, fewer steps than vLLM alone on all cores; the run leaves a timeline."""
    timeline = tmp_path / "run.json"
    drafted = document(
        generate(*QUESTION, "--json", "--compare", "--gamma", "4", *WAITING, "--timeline", str(timeline))
    )
    bare = drafted["plain"]

    assert drafted["tokens"] == bare["tokens"] and drafted["plain_cores"] == sorted(os.sched_getaffinity(0))
    assert drafted["text"] == bare["text"] != ""
    assert drafted["is_equal"] and drafted["num_equal_tokens"] == len(bare["tokens"])
    assert drafted["accepted"] > 0 and drafted["rounds"] + drafted["accepted"] + 1 == len(drafted["tokens"])
    assert (bare["accepted"], bare["rounds"]) == (0, len(bare["tokens"]) - 1)
    assert "".join(text for piece in bare["pieces"] for text, _ in piece["runs"]) == bare["text"]
    assert drafted["tokens_per_s"] > 0 and drafted["speedup"] > 0
    assert any(event.get("cat") == "step" for event in json.loads(timeline.read_text())["traceEvents"])


def test_a_chat_through_a_pipe_holds_the_answers_alone() -> None:
    done = generate("--chat", "--max-tokens", "12", said="hello\n/quit\nnever asked\n")

    assert done.stdout.strip() != ""
    assert "\x1b" not in done.stdout
    assert done.stderr.count("tokens/s") == 1
    assert "WARNING" not in done.stderr and "Traceback" not in done.stderr
