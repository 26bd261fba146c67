"""Runs a program of this directory that needs real vLLM and real weights, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.vllm.pair import PAIR, require_pair

ROOT = Path(__file__).parents[2]


def run_program(name: str, pair: str = PAIR) -> Any:
    """The JSON document that it prints."""
    target, draft = require_pair(name=pair)
    command = [sys.executable, "-m", f"tests.vllm.run_{name}", "--target", str(target), "--draft", str(draft)]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
