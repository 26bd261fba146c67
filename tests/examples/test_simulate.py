"""The examples that need no engine: a simulation, and a planner in a package of its own."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specbranch.core.planners.predictors import CONSTANTS
from specbranch.core.session import StopCondition
from specbranch.simulation.presets import PAIRS, make_trace
from tests.core.test_exactness import emitted_distribution, target_distribution
from tests.root import ROOT
from tests.toys import three_token_pair, two_token_pair

EXAMPLES = ROOT / "examples"
EXTENSION = EXAMPLES / "extension"


def run(*words: str, python: str = sys.executable, timeout_s: float = 280, bind: str = "auto") -> str:
    """Run an example, or any command of Python, and return what it prints; `bind` are the cores of vLLM's threads."""
    # No room for both models would be left otherwise, and a machine with few cores has no use for more threads.
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "COLUMNS": "200", "VLLM_CPU_OMP_THREADS_BIND": bind}
    done = subprocess.run(
        [python, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl.gz"
    make_trace(PAIRS["llama3-8b-70b"], 4, 60, random.Random(0)).write(path)
    return str(path)


def new_environment(directory: Path, package: Path) -> str:
    """Make an environment with a package above what is installed here; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    python = str(directory / "bin" / "python")
    found = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    here = next(path for path in sys.path if path.endswith("site-packages"))
    # Packages that were installed for editing are found only where such directories are treated as sites.
    Path(found.stdout.strip(), "below.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(package)], check=True)
    return python


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make an environment with the example's package; return its Python."""
    return new_environment(tmp_path_factory.mktemp("environment"), EXTENSION)


def test_planners_are_compared_on_a_recorded_trace(trace: str) -> None:
    printed = run("examples/simulate.py", trace, "--c", "5")

    assert "240 tokens" in printed
    speeds = dict(re.findall(r"^(\w+) +([\d.]+)x", printed, re.MULTILINE))
    assert list(speeds) == ["sps", "pearl", "specbranch", "budget"]
    assert all(float(speed) > 1 for speed in speeds.values())


def test_a_planner_of_another_package_is_simulated_by_its_name(trace: str, python: str) -> None:
    printed = run("examples/simulate.py", trace, "--planners", "cautious", python=python)

    assert re.search(r"^cautious +[1-9]\.\d\dx", printed, re.MULTILINE)


def test_the_command_line_knows_it_and_its_settings(python: str) -> None:
    words = ("simulate", "--c", "6", "--acceptance", "0.8", "--tokens", "500", "--planners", "pearl,cautious", "--json")
    printed = run("-m", "specbranch", *words, python=python)
    wrong = subprocess.run(
        [python, "-m", "specbranch", "simulate", "--c", "6", "--acceptance", "0.8", "--planners", "cautiuos"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert json.loads(printed.splitlines()[-1])["planners"]["cautious"]["speedup"] > 1
    assert "did you mean 'cautious'?" in wrong.stderr


def test_a_predictor_of_another_package_is_simulated_by_its_name(python: str) -> None:
    words = ("simulate", "--tokens", "500", "--planners", "specbranch", "--correlation", "0.4", "--predictor")
    printed = run("-m", "specbranch", *words, "stretch", "--json", python=python)
    other = run("-m", "specbranch", *words, "confidence", "--json", python=python)

    stretch, confidence = (json.loads(text.splitlines()[-1])["planners"]["specbranch"] for text in (printed, other))
    assert stretch["speedup"] > 1
    assert stretch["rolled_back"] != confidence["rolled_back"]


def test_the_example_classes_have_under_thirty_lines_each() -> None:
    for name in ("planner", "predictor"):
        source = (EXTENSION / "src" / "own_ideas" / f"{name}.py").read_text()
        code = re.sub(r'"""(?s:.*?)"""', "", source)
        assert len([line for line in code.splitlines() if line.strip()]) < 30


def test_a_package_that_cannot_be_loaded_costs_a_warning_and_nothing_else(trace: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken-1.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (broken / "entry_points.txt").write_text(
        "[specbranch.planners]\nbroken = nowhere:Planner\npearl = builtins:int\n"
        "[specbranch.predictors]\noracle = builtins:int\n"
    )
    damaged = tmp_path / "damaged-1.dist-info"
    damaged.mkdir()
    (damaged / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1\n")
    (damaged / "entry_points.txt").write_text("[specbranch.planners]\nno value\n")
    code = f"""
import logging, sys
sys.path.insert(0, {str(tmp_path)!r})
logging.basicConfig()
from specbranch import Trace, simulate
print(simulate(Trace.read({trace!r}), "pearl", c=5).speedup > 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stdout == "True\n", done.stderr
    assert "planner 'broken' of package broken cannot be used" in done.stderr
    assert "ignoring the package 'damaged'" in done.stderr
    assert "planner 'pearl' of package broken cannot be used" in done.stderr
    assert "predictor 'oracle' of package broken cannot be used" in done.stderr


def test_the_example_leaves_the_distribution_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enumeration in rational numbers, as for our own planners, with verification by match as in vLLM."""
    monkeypatch.syspath_prepend(str(EXTENSION / "src"))
    example = importlib.import_module("own_ideas.planner")

    for waits, pair, ending in (
        (False, two_token_pair(), StopCondition(max_new_tokens=3)),
        (True, two_token_pair(), StopCondition(max_new_tokens=3)),
        (False, three_token_pair(), StopCondition(max_new_tokens=5, eos_ids=frozenset({2}))),
    ):
        chosen = example.CautiousSettings(gamma=2, wait_for_draft=waits)
        make = lambda chance, chosen=chosen: example.CautiousPlanner(chosen, CONSTANTS["confidence"])  # noqa: E731

        assert emitted_distribution(pair, make, "match", ending) == target_distribution(pair, ending)
