"""A running `specbranch serve` for the tests, and a look at what it and its children do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.root import ROOT


@dataclass
class Served:
    """The process, where it answers, and what it said."""

    process: subprocess.Popen[bytes]
    port: int
    out: Path
    err: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str) -> float:
        """The sum of a counter or gauge on vLLM's endpoint."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(float(value) for value in values)

    def version(self) -> str:
        """The version that vLLM says it has."""
        with urllib.request.urlopen(f"{self.url}/version", timeout=60) as answer:
            return str(json.loads(answer.read())["version"])

    def descendants(self) -> dict[int, str]:
        """Every process below this one, by id, with its command line."""
        found: dict[int, str] = {}
        waiting = [self.process.pid]
        while waiting:
            for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    waiting += [int(child) for child in task.read_text().split()]
            for pid in waiting:
                with contextlib.suppress(OSError):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def draft_pid(self) -> int:
        (pid,) = (pid for pid, command in self.descendants().items() if " specbranch draft " in command)
        return pid

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(180)


@contextlib.contextmanager
def started(directory: Path, *words: str) -> Iterator[Served]:
    """`specbranch serve` with these words and a free port; killed at the end if it still runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out, err = directory / "out.txt", directory / "err.txt"
    command = [sys.executable, "-m", "specbranch", "serve", *words, "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "COLUMNS": "200"}
    # A shell that runs tests in the background has them ignore Ctrl-C, and what they start would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, stderr=stderr)
    served = Served(process, port, out, err)
    try:
        yield served
    finally:
        if process.poll() is None:
            left = served.descendants()
            process.kill()
            process.wait()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def serving(directory: Path, *words: str) -> Iterator[Served]:
    """The same, once it said that it is ready; asked to stop at the end."""
    with started(directory, *words) as served:
        wait_for(lambda: "ready in" in served.out.read_text() or served.process.poll() is not None, 900)
        assert served.process.poll() is None, served.err.read_text()[-4000:]
        yield served
        if served.process.poll() is None:
            served.stop()


def wait_for(condition: Callable[[], bool], timeout_s: float = 400.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.1)
