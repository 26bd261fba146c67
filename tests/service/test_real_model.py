"""`specbranch draft` as users start it, with real weights: it drafts, it is killed, it comes back."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from specbranch.core.distribution import Distribution
from specbranch.engines.base import EngineOptions, Row
from specbranch.engines.llamacpp import LlamaCppEngine
from specbranch.simulation.scripted import TextScript
from tests.models import model_path
from tests.service.harness import PATIENCE_S, Service, Walk, running
from tests.service.test_faults import client_for

PROMPT = [504, 2365, 6354, 16438, 690, 260]
ANSWER_LEN = 400


@pytest.fixture(scope="module")
def answer() -> tuple[int, ...]:
    """What SmolLM2 itself says after the prompt, greedily: the target of these tests, which is also its own draft."""
    engine = LlamaCppEngine(EngineOptions(str(model_path("smollm2-135m")), threads=1, max_tokens=1024))
    handle = engine.open()
    tokens = list(PROMPT)
    (distribution,) = engine.run([Row(handle, tuple(tokens))])
    for _ in range(ANSWER_LEN):
        tokens.append(distribution.ids[0])
        (distribution,) = engine.run([Row(handle, (tokens[-1],))])
    engine.shutdown()
    return tuple(tokens)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    program = shutil.which("specbranch", path=str(Path(sys.executable).parent))
    assert program is not None
    address = f"ipc://{tmp_path}/draft.sock"
    options = ["--threads", "1", "--cache-tokens", "2048", "--log-format", "json", "--log-level", "warning"]
    command = [program, "draft", str(model_path("smollm2-135m")), "--listen", address, *options]
    with running(Service(command, address)) as service:
        yield service


def said(answer: tuple[int, ...]) -> TextScript:
    """A target that says the recorded answer, and zeros behind its end."""
    return TextScript(
        49152, lambda text: Distribution((answer[len(text)] if len(text) < len(answer) else 0,), (1.0,), 0.0)
    )


@pytest.mark.parametrize("planner", ["pearl", "specbranch"])
def test_real_drafts_are_accepted_and_survive_kills(service: Service, answer: tuple[int, ...], planner: str) -> None:
    with contextlib.closing(client_for(service.address, planner, deadline_s=0.2)) as client:
        walk = Walk(client, PROMPT, said(answer))
        for _ in range(3):
            goal, end_s, pause_s = walk.num_accepted + 10, time.monotonic() + PATIENCE_S, 0.15
            while walk.num_accepted < goal:
                assert time.monotonic() < end_s, f"no drafts were accepted: {client.counts}"
                num_accepted = walk.num_accepted
                walk.step()
                time.sleep(pause_s)
                # A target is as slow as it must be for this machine to draft meanwhile.
                pause_s *= 1.0 if walk.num_accepted > num_accepted else 1.1
            service.kill()
            walk.step()
            service.start()
            service.wait_until_up()

        assert client.counts.faults == 0
        walk.assert_text_is_the_targets()
        assert len(walk.tokens) < len(answer)
