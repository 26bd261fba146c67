"""Real processes for measurements under load: `specbranch serve`, `specbranch draft`, their metrics and their memory."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbranch.launch.child import Child
from specbranch.launch.draft_process import DraftServiceOptions
from specbranch.launch.vllm_server import HttpEndpoint
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, client_keys
from specbranch.service.client.stats import parse_metrics_text

ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
SUBMITTED = "vllm:spec_decode_num_draft_tokens_total"
_START_S, _STOP_S = 600.0, 60.0
_SCRAPE_S = 20.0


@dataclass(frozen=True, slots=True)
class Served:
    """A running `specbranch serve`."""

    child: Child
    url: str

    def metrics(self) -> dict[str, float]:
        """Every number of its endpoint by name, summed over labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=_SCRAPE_S) as answer:
            page = answer.read().decode()
        found: dict[str, float] = {}
        for sample in parse_metrics_text(page):
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(words: Sequence[str], log_file: Path, cache_gb: int = 1) -> Iterator[Served]:
    """`specbranch serve` with these words, once it answers; stopped with all that it has started."""
    endpoint = HttpEndpoint("127.0.0.1", free_port())
    command = [
        sys.executable,
        "-m",
        "specbranch",
        "serve",
        *words,
        "--host",
        endpoint.host,
        "--port",
        str(endpoint.port),
    ]
    child = Child(command, environment={"VLLM_CPU_KVCACHE_SPACE": str(cache_gb)}, log_file=log_file)
    try:
        if not child.wait_until(lambda: endpoint.is_healthy() or None, _START_S, 0.5):
            raise SystemExit(f"the server {child.exit_summary}; the end of its log:\n{child.log_tail()}")
        yield Served(child, str(endpoint))
    finally:
        child.stop(_STOP_S)


class Service:
    """A `specbranch draft` that can be ended and started again at the same address."""

    def __init__(self, options: DraftServiceOptions, address: str, log_file: Path, keys: Path | None = None) -> None:
        arguments = [word for word in options.arguments(address) if word != "--until-eof"]
        self._command = [sys.executable, "-m", "specbranch", *arguments]
        self._threads = {"OMP_NUM_THREADS": str(len(options.cores or [0]))}
        self._keys = client_keys(str(keys) if keys else None)
        self.address = address
        self.log_file = log_file
        self.child = self.start()

    def start(self) -> Child:
        """Start a process; it is the one that is meant from now on."""
        self.child = self.another()
        return self.child

    def another(self) -> Child:
        """One more process with the same command."""
        return Child(self._command, environment=self._threads, log_file=self.log_file)

    def await_up(self) -> None:
        """Wait until it answers."""
        with contextlib.closing(DraftClient(ClientOptions(self.address, keys=self._keys))) as client:
            if self.child.wait_until(lambda: client.hello(0.5), 120.0) is None:
                raise SystemExit(f"the draft service {self.child.exit_summary}:\n{self.child.log_tail()}")

    def stop(self) -> None:
        """Ask it to end, and wait."""
        self.child.stop(_STOP_S)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def memory_of(pid: int) -> dict[str, float]:
    """Megabytes of every process of a server by its part in it; shared pages count by their share (PSS)."""
    found: dict[str, float] = {}
    for one in family(pid):
        with contextlib.suppress(OSError):
            role = _role(one, pid)
            found[role] = found.get(role, 0.0) + _pss_mb(one)
    return found


def _role(pid: int, first: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    if pid == first:
        return "serve"
    if " specbranch draft " in command:
        return "draft"
    if name.startswith("VLLM::Eng"):
        return "engine"
    return "frontend" if "vllm_server" in command else "other"


def _pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def own_cores() -> tuple[int, int]:
    """One core for the target and one for the draft."""
    target, draft = sorted(os.sched_getaffinity(0))[:2]
    return target, draft
