"""The supported releases, the tests of `tests/vllm` to run on each, and the file that keeps the results.

Tests run in a process of their own that finds this release first. The file has one line for each release, the oldest
first, with its provenance and what was run on it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.root import ROOT

RESULTS = ROOT / "benchmarks" / "matrix.jsonl"
RELEASES = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")


@dataclass(frozen=True)
class Run:
    """Tests, and the name under which they keep their figures (see `tests.measuring`)."""

    name: str
    tests: Sequence[str]
    timeout_s: float


# What matters most comes first; the last two are about what differs between releases.
RUNS = (
    Run("equality", ["tests/vllm/test_equality.py::test_greedy_output_equals_bare_vllm_for_every_planner"], 1800),
    Run("server", ["tests/vllm/test_serve.py", "-k", "sixteen or json or sigterm"], 1800),
    Run("check", ["tests/vllm/test_check.py::test_a_right_pair_holds"], 1800),
    Run("sampler", ["tests/vllm/test_cpu_sampler.py"], 600),
    Run("features", ["tests/vllm/test_features.py"], 1800),
)


def carry_out(run: Run, overlay: Path, log: Path) -> dict[str, Any]:
    """Run the tests; return their figures, whether they passed and their time. A skipped test has not passed."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as results:
        paths = os.pathsep.join(map(str, (overlay, ROOT / "src")))
        environment = {**os.environ, "PYTHONPATH": paths, "SPECBRANCH_RESULTS": results}
        code = _run_tests(run, environment, log)
        file = Path(results) / f"{run.name}.jsonl"
        figures = json.loads(file.read_text().splitlines()[-1]) if file.exists() else {}
    return {"passed": code == 0 and bool(figures), "took_s": round(time.monotonic() - begin_s, 1), **figures}


def _run_tests(run: Run, environment: dict[str, str], log: Path) -> int:
    """Run pytest, end whatever it started, and return its exit code, or -1 when time is up."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *run.tests]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(run.timeout_s)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def read_results(file: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Read what is known of each release, the oldest first."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {line["release"]: line for line in map(json.loads, lines)}


def write_results(results: Mapping[str, dict[str, Any]], file: Path = RESULTS) -> None:
    """Replace the file at once, so that a run that is interrupted loses nothing."""
    ordered = sorted(results.values(), key=lambda line: _numbers(line["release"]))
    draft = file.with_suffix(".new")
    draft.write_text("".join(json.dumps(line) + "\n" for line in ordered))
    draft.replace(file)


def has_passed(line: Mapping[str, Any]) -> bool:
    """Return whether everything that was run on a release passed."""
    return all(run["passed"] for run in line["runs"].values())


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
