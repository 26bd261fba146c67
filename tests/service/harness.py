"""A target to decode with, and services to start and stop, for the tests of service and client."""

from __future__ import annotations

import contextlib
import importlib
import math
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

import pytest

from specbranch.core.round import Draft
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, DraftSource, SequenceUpdate
from specbranch.service.client.transport import ZmqTransport
from specbranch.service.server.server import Server, ServiceOptions
from specbranch.service.wire.addresses import ServiceKeys, normalize_addresses
from specbranch.simulation.scripted import ScriptedEngine, TextScript, match
from tests.root import ROOT
from tests.service.nursery import MODULES, Forked
from tests.toys import random_script

VOCAB = 50
PATIENCE_S = 60.0  # for what must happen in the end; as a deadline, the longest that the wire takes
START_S = 200.0  # for a process to start, on a machine that has other things to do
MAX_AFTERWARDS = 8  # what a call may still send and look for when its time is up; none of it waits
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
    process: subprocess.Popen[bytes] | Forked | None = None

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        match self.command:
            case [sys.executable, "-m", module, *arguments] if module in MODULES:
                self.process = Forked(module, arguments, environment)
            case _:
                self.process = subprocess.Popen(self.command, cwd=ROOT, env=environment)

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

    def wait_until_up(self, timeout_s: float = START_S) -> None:
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


class IdleTransport:
    """A transport over which nothing comes, and that may be derived from."""

    def send(self, frame: bytes) -> bool:
        return True

    def receive(self, max_messages: int) -> list[list[bytes]]:
        return []

    def await_readable(self, timeout_s: float) -> bool:
        return False

    def await_writable(self, timeout_s: float) -> None:
        pass

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        pass


class WatchedLink(ZmqTransport):
    """A socket that counts what a call does on it, and lists what it should not have done.

    It is also the clock of whoever uses it. A call is judged by the time that it last read there, not by how long it
    took: it must ask for no wait that ends after its deadline, and do little more once it could know that its time is
    up. That holds on a machine that stands still as well as on a fast one.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(address)
        self._clock = clock
        self._now_s, self._end_s = 0.0, math.inf
        self._timeout_s: float | None = None  # of a call that has not read the clock yet
        self._num_afterwards = 0
        self.num_uses = 0  # of the socket, in all calls
        self.waits_s: list[float] = []  # how long each wait might have taken
        self.overstays: list[str] = []

    @contextlib.contextmanager
    def call(self, timeout_s: float) -> Iterator[None]:
        """Watch one call that has so much time from its first look at the clock."""
        self._timeout_s, self._num_afterwards = timeout_s, 0
        yield
        self._timeout_s, self._end_s = None, math.inf
        if self._num_afterwards > MAX_AFTERWARDS:
            self.overstays.append(f"{self._num_afterwards} uses of the socket after the deadline")

    def now(self) -> float:
        """The time, for who uses this link."""
        self._now_s = self._clock()
        if self._timeout_s is not None:
            self._end_s, self._timeout_s = self._now_s + self._timeout_s, None
        return self._now_s

    def send(self, frame: bytes) -> bool:
        self._note_use()
        return super().send(frame)

    def receive(self, max_messages: int) -> list[list[bytes]]:
        self._note_use()
        return super().receive(max_messages)

    def await_readable(self, timeout_s: float) -> bool:
        self._note_use()
        self.waits_s.append(timeout_s)
        if timeout_s > self._end_s - self._now_s + 1e-6:
            self.overstays.append(f"a wait of {timeout_s} s with {self._end_s - self._now_s} s left")
        return super().await_readable(timeout_s)

    def _note_use(self) -> None:
        self.num_uses += 1
        self._num_afterwards += self._now_s >= self._end_s


class WatchedClient(DraftClient):
    """A client whose calls are watched."""

    def __init__(self, options: ClientOptions) -> None:
        (address,) = normalize_addresses(options.address)
        self.watched = WatchedLink(address)
        super().__init__(options, transport=self.watched, clock=self.watched.now)

    def propose(self, rows: Sequence[SequenceUpdate], step_s: float | None = None) -> list[Draft]:
        with self.watched.call(self._options.deadline_s):
            return super().propose(rows, step_s)


def proposed(client: DraftSource, *rows: SequenceUpdate) -> list[list[int]]:
    """The tokens of the drafts that a client has for these rows."""
    return [draft.tokens for draft in client.propose(rows)]


class LeapingClock:
    """The time of the machine, which can be made to leap forward."""

    def __init__(self) -> None:
        self._leapt_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._leapt_s

    def leap(self, seconds: float) -> None:
        self._leapt_s += seconds


@dataclass
class Walk:
    """One sequence decoded greedily by the target, with drafts from a client."""

    client: DraftSource
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
        committed = SequenceUpdate(self.tokens, self._num_new, len(self.proposal), max_draft_tokens=self.longest)
        self.proposal = self.client.propose([committed])[0].tokens
        self.calls_s.append(time.monotonic() - start_s)
        self._verify()

    def step_until(self, is_so: Callable[[], bool]) -> None:
        """Go on until this is so."""

        def is_so_after_a_step() -> bool:
            self.step()
            return is_so()

        wait_for(is_so_after_a_step, self.client.counts)

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


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands wait for the answer of a service as long as tests do, for services that do answer."""
    for module in ("cli.commands.inspect", "launch.draft_process", "cli.readings"):
        monkeypatch.setattr(importlib.import_module(f"specbranch.{module}"), "_ANSWER_S", PATIENCE_S)
    monkeypatch.setattr("specbranch.launch.draft_process._CONNECT_S", PATIENCE_S)


def wait_for(is_so: Callable[[], bool], why: object = "") -> None:
    end_s = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < end_s, why
        time.sleep(0.01)
