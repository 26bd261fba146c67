"""The README's commands, as they are printed there, in a new environment with small models under the names it uses."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.examples.test_simulate import new_environment
from tests.models import SHORT, require_pair
from tests.root import ROOT
from tests.vllm.serving import started, wait_for

pytestmark = pytest.mark.timeout(600)

README = (ROOT / "README.md").read_text()
SHELL = re.sub(r"\\\n\s+", "", "\n".join(re.findall(r"^    (.*)$", README, re.MULTILINE)))
COMMANDS = {line.split()[1]: shlex.split(line) for line in SHELL.splitlines() if line.startswith("specbranch ")}
(PROGRAM,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the README's models are there: small ones, under their names."""
    target, _ = require_pair(name=SHORT)
    directory = tmp_path_factory.mktemp("home")
    for model in set(re.findall(r"Qwen/[\w.-]+", README)):
        (directory / model).parent.mkdir(exist_ok=True)
        (directory / model).symlink_to(target)
    return directory


@pytest.fixture(scope="module")
def environment(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a shell in which `specbranch` was just installed, and the README's int8 target made."""
    python = new_environment(tmp_path_factory.mktemp("environment"), ROOT)
    path = f"{Path(python).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "SPECBRANCH_MODELS": str(home), "VLLM_CPU_KVCACHE_SPACE": "1"}
    ran(COMMANDS["quantize"], home, variables)
    return variables


def ran(command: list[str], home: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def test_the_target_that_quantize_makes_answers_with_drafts_and_without(
    home: Path, environment: dict[str, str]
) -> None:
    printed = ran(COMMANDS["generate"], home, environment)

    assert "accepted" in printed and "both answers are equal" in printed


def test_the_program_loads_vllm_with_drafts(home: Path, environment: dict[str, str]) -> None:
    program = PROGRAM.replace(
        "gpu_memory_utilization=0.8", "gpu_memory_utilization=0.3, max_model_len=512, enforce_eager=True"
    )
    (home / "program.py").write_text(program.replace("print(", 'print("said:", '))

    assert "said:" in ran(["python", "program.py"], home, environment)


def test_serve_starts(home: Path, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_MODELS", environment["SPECBRANCH_MODELS"])
    words = [*COMMANDS["serve"][2:], "--max-model-len", "512", "--enforce-eager"]
    with started(tmp_path, *words) as served:
        wait_for(lambda: "ready in" in served.out.read_text() or served.process.poll() is not None, 360)

        assert served.process.poll() is None, served.err.read_text()[-4000:]
        served.stop()


def test_plan_is_a_command(environment: dict[str, str], home: Path) -> None:
    assert "--draft" in ran(["specbranch", "plan", "--help"], home, environment)
