"""A draft service as a child process: start it, restart it when it dies, or use one that runs already."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from specbranch.errors import SpecBranchError, UsageError
from specbranch.launch.child import PIPE, Child, Idleness
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, client_keys
from specbranch.service.wire.addresses import check_address
from specbranch.service.wire.messages import Welcome

IDLE_S = 60.0  # a start that does nothing for so long is given up

_STOP_S = 10.0
_PROBE_S = 0.5
_ERROR = "error: "  # how a command's last line begins

OnProgress = Callable[[str], None]
_LOOK_S = 0.2
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0
_STEADY_S = 60.0  # a service that ran this long is not in a crash loop
_ANSWER_S = 2.0
_CONNECT_S = 1.0
_GREETING = b"\xff"  # the first byte that ZeroMQ sends


def _silent(_: str) -> None:
    pass


class StartError(SpecBranchError, RuntimeError):
    """The draft service did not start; the message says why, or where to read it."""


@dataclass(frozen=True, slots=True)
class DraftServiceOptions:
    """The options of `specbranch draft`. `address` None means a new socket that only this user can reach.

    `timeline` and `record` are files that the service writes. `extra` are more words for its command line.
    """

    model: str
    _: KW_ONLY
    engine: str | None = None
    device: str = "cpu"
    dtype: str = "auto"
    cores: Sequence[int] | None = None
    threads: int | None = None
    address: str | None = None
    timeline: str | Path | None = None
    record: str | Path | None = None
    extra: Sequence[str] = ()

    def arguments(self, address: str) -> list[str]:
        """The arguments of the command line."""
        chosen = {
            "--device": self.device,
            "--listen": address,
            "--engine": self.engine,
            "--dtype": None if self.dtype == "auto" else self.dtype,
            "--threads": self.threads,
            "--cores": ",".join(str(core) for core in self.cores) if self.cores else None,
            "--timeline": _absolute(self.timeline),
            "--record": _absolute(self.record),
        }
        pairs = [part for name, value in chosen.items() if value is not None for part in (name, str(value))]
        return ["draft", self.model, *pairs, "--until-eof", *self.extra]


class DraftProcess:
    """A running `specbranch draft`; a context manager that starts it, waits until it answers, and stops it.

    While it is waited for, `on_progress` hears again and again what it does.
    """

    def __init__(
        self, options: DraftServiceOptions, log_file: Path | None = None, on_progress: OnProgress = _silent
    ) -> None:
        self._options = options
        self._log_file = log_file
        self._on_progress = on_progress
        self._exit = contextlib.ExitStack()
        self._child: Child | None = None
        self._stage = "starting"
        self.address = options.address or self._new_address()
        self.welcome: Welcome | None = None

    @property
    def pid(self) -> int:
        """The id of the running process."""
        return self._started.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self._child is not None and self._child.is_running

    @property
    def exit_summary(self) -> str:
        """How the process ended, in words."""
        return self._started.exit_summary

    def start(self) -> None:
        """Start the process; `wait_until_up` waits for it."""
        threads = self._options.threads or (len(self._options.cores) if self._options.cores else None)
        self._child = Child(
            [sys.executable, "-m", "specbranch", *self._options.arguments(self.address)],
            environment={"OMP_NUM_THREADS": str(threads)} if threads else None,
            log_file=self._log_file,
            stdin=PIPE,  # the service ends when it closes, also when this process is killed
            stdout=PIPE,  # it says there what it does until it is up
        )
        self._child.listen(self._on_line)

    def wait_until_up(self) -> Welcome:
        """What the service says of itself, as soon as it answers.

        A model may take minutes to be fetched, loaded and packed: it is waited for as long as the process works.
        """
        idleness = Idleness(self._started)
        with contextlib.closing(DraftClient(ClientOptions(self.address))) as client:
            while self.is_running and (idle_s := idleness.seconds()) < IDLE_S:
                self.welcome = client.hello(_PROBE_S)
                if self.welcome is not None:
                    return self.welcome
                self._on_progress(f"draft: {self._stage}")
        state = f"has done nothing for {idle_s:.0f} s while {self._stage}" if self.is_running else self.exit_summary
        raise StartError(f"the draft service for {self._options.model} {state}{self._cause()}")

    def _cause(self) -> str:
        """What the service said last, or where to read it."""
        if self._log_file is None:
            return "; its own message is above"
        lines = [line for line in self._started.log_tail().splitlines() if line.strip()]
        words = next((line for line in reversed(lines) if line.startswith(_ERROR)), None)
        return f": {words.removeprefix(_ERROR)}" if words else f"; see {self._log_file}"

    def _on_line(self, line: str) -> None:
        """Remember what the service does until it is up."""
        self._stage = line.strip() or self._stage

    def stop(self) -> None:
        """Ask it to end; kill it if it does not."""
        if self._child is not None:
            self._child.stop(_STOP_S)
        self._exit.close()

    def kill(self) -> None:
        """End it at once; `stop` then cleans up."""
        if self._child is not None:
            self._child.kill()

    def __enter__(self) -> DraftProcess:
        self.start()
        try:
            self.wait_until_up()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _started(self) -> Child:
        assert self._child is not None, "start it first"
        return self._child

    def _new_address(self) -> str:
        directory = self._exit.enter_context(tempfile.TemporaryDirectory(prefix="specbranch-"))
        return f"ipc://{directory}/draft.sock"


def _absolute(file: str | Path | None) -> Path | None:
    return None if file is None else Path(file).absolute()


class DraftSupervisor:
    """Keeps one draft service alive. `on_event` gets one line for each event, from another thread.

    At the start, `on_progress` hears again and again what the service does.
    """

    def __init__(
        self,
        options: DraftServiceOptions,
        on_event: Callable[[str], None],
        on_progress: OnProgress = lambda stage: None,
    ) -> None:
        self._first = DraftProcess(options, on_progress=on_progress)
        self._options = replace(options, address=self._first.address)
        self._process = self._first
        self._on_event = on_event
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="supervisor", daemon=True)

    @property
    def address(self) -> str:
        """Where the service listens, before and after every restart."""
        return self._first.address

    @property
    def pid(self) -> int:
        """The id of the process that runs now."""
        return self._process.pid

    def start(self) -> Welcome:
        """Start the service and wait for it. A failure raises, this first time only."""
        self._first.start()
        welcome = self._first.wait_until_up()
        self._thread.start()
        return welcome

    def stop(self) -> None:
        """Stop the service for good."""
        self._stopping.set()
        self._process.stop()
        while self._thread.is_alive():  # it may be starting another one just now
            self._process.stop()
            self._thread.join(_LOOK_S)
        self._process.stop()
        self._first.stop()

    def kill(self) -> None:
        """Kill the service; it is not started again."""
        self._stopping.set()
        self._process.kill()
        self.stop()

    def _keep(self) -> None:
        pause_s, up_at_s = _FIRST_PAUSE_S, time.monotonic()
        while not self._stopping.wait(_LOOK_S):
            if self._process.is_running:
                continue
            if time.monotonic() - up_at_s > _STEADY_S:
                pause_s = _FIRST_PAUSE_S
            self._on_event(f"the draft service {self._process.exit_summary}; restarting it in {pause_s:g} s")
            if self._stopping.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            self._restart()
            up_at_s = time.monotonic()

    def _restart(self) -> None:
        """A new process instead of the old one."""
        if self._process is not self._first:  # the first one owns the socket's directory
            self._process.stop()
        self._process = DraftProcess(self._options)
        self._process.start()
        try:
            self._process.wait_until_up()
        except StartError as error:
            if not self._stopping.is_set():
                self._on_event(str(error))
            self._process.kill()
        else:
            self._on_event("the draft service is back")


@dataclass(frozen=True, slots=True)
class RemoteDraft:
    """Where they listen, and the directory of the keys, which TCP needs."""

    addresses: tuple[str, ...]
    keys: Path | None = None

    @property
    def section(self) -> dict[str, Any]:
        """The proposer's settings that lead to them."""
        keys = {"keys": str(self.keys.absolute())} if self.keys else {}
        address = self.addresses[0] if len(self.addresses) == 1 else list(self.addresses)
        return {"address": address, **keys}

    def check(self) -> list[Welcome]:
        """What those that run now say of themselves. Raises if one does not let us in."""
        welcomes = [_ask(address, self.keys) for address in self.addresses]
        return [welcome for welcome in welcomes if welcome is not None]


@cache
def _ask(address: str, directory: Path | None) -> Welcome | None:
    keys = client_keys(str(directory) if directory else None)
    check_address(address, keys)
    with contextlib.closing(DraftClient(ClientOptions(address, keys=keys))) as client:
        welcome = client.hello(_ANSWER_S)
    cause = explain_no_reply(address, directory) if welcome is None else None
    if cause is not None:
        raise UsageError(cause)
    return welcome


def explain_no_reply(address: str, keys: Path | None) -> str | None:
    """Why somebody who listens does not answer; None if nobody listens."""
    if not _speaks(address):
        return None
    cause = "or it does not know these keys" if keys else "or it is none"
    return (
        f"somebody listens at {address} and does not answer us. Either it is a draft service of another version, "
        f"{cause}; `specbranch keys` says which file goes where"
    )


def _speaks(address: str) -> bool:
    """Whether a live service of ZeroMQ is there: it greets whoever connects. A proxy without a service does not."""
    parts = urlsplit(address)
    try:
        if parts.scheme == "tcp":
            with socket.create_connection((parts.hostname, parts.port), _CONNECT_S) as probe:
                return probe.recv(1) == _GREETING
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_CONNECT_S)
            probe.connect(address.removeprefix("ipc://"))
            return probe.recv(1) == _GREETING
    except (OSError, ValueError):
        return False
