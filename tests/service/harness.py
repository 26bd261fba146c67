"""A target to decode with, and services to start and stop, for the tests of service and client."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from specbranch.core.verify import match
from specbranch.engines.scripted import ScriptedEngine, TextScript
from specbranch.service.client import ClientOptions, Committed, DraftClient, Drafts
from specbranch.service.endpoint import ServiceKeys
from specbranch.service.server import Server, ServiceOptions
from tests.toys import random_script

ROOT = Path(__file__).parents[2]
VOCAB = 50
STALL_S = 0.15  # beyond its deadline a call counts as long; under one of 0.2 s a second wait is, and so is a stall
PATIENCE_S = 60.0  # for what must happen in the end, on a machine that may stand still for a while
RECENT = 6  # the scripts look at so many tokens only, which keeps them fast on long texts


def _recent(script: TextScript) -> TextScript:
    distribution = lru_cache(maxsize=100_000)(script.distribution)
    return TextScript(VOCAB, lambda text: distribution(text[-RECENT:]))


_BASE = random_script(11, VOCAB, sharpness=80)
TARGET = _recent(_BASE)
DRAFT = _recent(random_script(12, VOCAB, like=_BASE, share=0.9, sharpness=80))


@dataclass
class Service:
    """A service in a process of its own."""

    command: list[str]
    address: str
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """As the kernel would: without a word."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(PATIENCE_S)

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def wait_until_up(self, timeout_s: float = PATIENCE_S) -> None:
        with contextlib.closing(DraftClient(ClientOptions(self.address))) as client:
            assert client.hello(timeout_s) is not None, "the service did not come up"


@contextlib.contextmanager
def scripted_service(directory: Path, *arguments: str) -> Iterator[Service]:
    """A running service with a scripted draft."""
    address = f"ipc://{directory}/draft.sock"
    command = [sys.executable, "-m", "tests.service.scripted_service", "--listen", address, *arguments]
    with running(Service(command, address)) as service:
        yield service


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
        for line in page.read().decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
    raise AssertionError(f"{name} is not among the metrics")


@contextlib.contextmanager
def tcp_service(keys: ServiceKeys) -> Iterator[str]:
    """The address of a service in this process, over TCP."""
    address = f"tcp://127.0.0.1:{free_port()}"
    server = Server(ScriptedEngine(DRAFT), ServiceOptions(address, keys))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield address
    finally:
        server.stop()
        thread.join(PATIENCE_S)


@contextlib.contextmanager
def running(service: Service) -> Iterator[Service]:
    service.start()
    try:
        service.wait_until_up()
        yield service
    finally:
        service.stop()


@dataclass
class Walk:
    """One sequence decoded greedily by the target, with drafts from a client."""

    client: Drafts
    prompt: Sequence[int]
    target: TextScript = TARGET
    tokens: list[int] = field(init=False)
    calls_s: list[float] = field(default_factory=list)
    num_accepted: int = 0
    longest: int | None = None
    proposal: list[int] = field(default_factory=list)
    _num_new: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self._verify()

    def step(self) -> None:
        """Tell what was committed, take a proposal, verify it."""
        start_s = time.monotonic()
        committed = Committed(self.tokens, self._num_new, len(self.proposal), longest=self.longest)
        (self.proposal,) = self.client.propose([committed])
        self.calls_s.append(time.monotonic() - start_s)
        self._verify()

    def num_calls_beyond(self, seconds: float) -> int:
        """Calls that took longer: a few on a machine that stands still, many if a client waits twice."""
        return sum(call_s > seconds for call_s in self.calls_s)

    def assert_text_is_the_targets(self) -> None:
        text = list(self.prompt)
        while len(text) < len(self.tokens):
            text.append(self.target.distribution(tuple(text)).ids[0])
        assert self.tokens == text

    def _verify(self) -> None:
        base = tuple(self.tokens)
        proposal = self.proposal
        verdict = match(proposal, lambda index: self.target.distribution((*base, *proposal[:index])).ids[0])
        committed = verdict.committed(proposal)
        self.num_accepted += verdict.accepted
        self._num_new = len(committed)
        self.tokens += committed


def wait_for(is_so: Callable[[], bool], why: object = "") -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, why
        time.sleep(0.01)
