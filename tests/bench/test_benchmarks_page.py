"""The page of benchmarks says what the committed results say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_its_script_makes_of_the_committed_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "make_page.py"), "--text"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)

    assert made.stdout == (ROOT / "docs" / "benchmarks.md").read_text(), "run benchmarks/make_page.py"
