"""A start in a terminal: something moves all the time, also while vLLM is silent."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import socket
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from tests.root import ROOT
from tests.vllm.test_serve import DRAFT, TARGET

MAX_S = 5.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_in_terminal(command: list[str], environment: dict[str, str], timeout_s: float) -> list[tuple[float, str]]:
    """What a command writes to a terminal, and when; it gets a Ctrl-C as soon as it is ready."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm", "COLUMNS": "120", **environment})
    written: list[tuple[float, str]] = []
    end_s, is_ready = time.monotonic() + timeout_s, False
    while time.monotonic() < end_s:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            data = os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # it has ended
            break
        written.append((time.monotonic(), data))
        if not is_ready and "ready in" in data:
            is_ready = True
            os.kill(pid, signal.SIGINT)
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    os.waitpid(pid, 0)
    return written


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("words", [["--enforce-eager"], []], ids=["eager", "compiled"])
def test_no_stretch_of_five_seconds_passes_without_a_sign_of_life(tmp_path: Path, words: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "specbranch", "serve", TARGET, "--draft", DRAFT, "--dtype", "float32"]
    command += ["--max-model-len", "256", "--port", port, *words]
    fresh = {"VLLM_CACHE_ROOT": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    begin_s = time.monotonic()
    written = run_in_terminal(command, {"VLLM_CPU_KVCACHE_SPACE": "1", **fresh}, 1500)
    text = _ESCAPES.sub("", "".join(data for _, data in written))
    ready = next((number for number, (_, data) in enumerate(written) if "ready in" in data), len(written))
    times = [begin_s, *(at_s for at_s, _ in written[: ready + 1])]

    assert "ready in" in text, text[-4000:]
    for stage in ("draft: ", r"vLLM: starting \(", "vLLM: (setting|loading|warming|starting the)"):  # some are short
        assert re.search(stage, text)
    assert max(later - sooner for sooner, later in pairwise(times)) < MAX_S
