"""Running servers for the tests: `specbranch serve` with a look at its children, and stock `vllm serve`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.root import ROOT


@dataclass
class Served:
    """A running `specbranch serve`, with its port and its output."""

    process: subprocess.Popen[bytes]
    port: int
    out: Path
    err: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str) -> float:
        """Return the sum of a counter or gauge on vLLM's endpoint."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(float(value) for value in values)

    def version(self) -> str:
        """Return the version that vLLM says it has."""
        with urllib.request.urlopen(f"{self.url}/version", timeout=60) as answer:
            return str(json.loads(answer.read())["version"])

    def descendants(self) -> dict[int, str]:
        """Find every process below this one; return their command lines by id."""
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
    """Start `specbranch serve` with these words and a free port; kill it at the end if it still runs."""
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
    """Start `specbranch serve`, wait until it says that it is ready, and stop it at the end."""
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


@dataclass(frozen=True)
class StockServer:
    """A running `vllm serve`."""

    url: str

    def complete(self, prompt: str, max_tokens: int) -> str:
        body = {"model": "target", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=400) as reply:
            return str(json.load(reply)["choices"][0]["text"])

    def scrape(self) -> tuple[str, float]:
        """Return the page of metrics, and how long it took."""
        start_s = time.monotonic()
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            return reply.read().decode(), time.monotonic() - start_s


def install_entry_points(directory: Path) -> Path:
    """Make a directory for PYTHONPATH in which the package looks installed, with its entry points; return it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = directory / f"{project['name']}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    _name_vllm(directory)
    return directory


def _name_vllm(directory: Path) -> None:
    """Add the metadata by which the command `vllm` finds its version; builds for the CPU lack that name."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        info = directory / "vllm-0.dist-info"
        info.mkdir()
        version = importlib.metadata.version("vllm-cpu")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


@contextlib.contextmanager
def stock_serving(model: Path, directory: Path, *arguments: str, **environment: str) -> Iterator[StockServer]:
    """Run stock `vllm serve` with our entry points in force; its log is `vllm.log` in the directory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = [install_entry_points(directory), ROOT / "src", ROOT]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--served-model-name", "target"]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    with (directory / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), **environment},
        )
    try:
        _wait_until_up(f"http://127.0.0.1:{port}", process, directory / "vllm.log")
        yield StockServer(f"http://127.0.0.1:{port}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _wait_until_up(url: str, process: subprocess.Popen[Any], log: Path, timeout_s: float = 900.0) -> None:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=30):
            return
        time.sleep(0.5)
    raise AssertionError(f"vLLM did not come up:\n{log.read_text()[-4000:]}")
