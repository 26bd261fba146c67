"""Examples run as users run them: in a process of their own, with their own words."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.root import ROOT

EXAMPLES = ROOT / "examples"


def run(*words: str, python: str = sys.executable, timeout_s: float = 280, bind: str = "auto") -> str:
    """What an example, or any command of Python, prints; it must end well. `bind` are the cores of vLLM's threads."""
    # No room for both models would be left otherwise, and a machine with few cores has no use for more threads.
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "COLUMNS": "200", "VLLM_CPU_OMP_THREADS_BIND": bind}
    done = subprocess.run(
        [python, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout
