"""A draft service: place it, start it as a child process and restart it when it ends, or use one that runs already."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from specbranch.errors import SpecBranchError, UsageError
from specbranch.launch.child import PIPE, Child, Idleness, join_cores
from specbranch.launch.placement import divide_cores, is_bound_by_user, place_draft
from specbranch.plugins.vllm.settings import ParallelLayout
from specbranch.service.client.client import DraftClient
from specbranch.service.client.discovery import MAX_SERVICES, AddressWatch
from specbranch.service.client.interface import ClientOptions, client_keys
from specbranch.service.wire.addresses import check_address
from specbranch.service.wire.messages import Welcome

OnProgress = Callable[[str], None]

IDLE_S = 60.0  # give up a start during which the process does nothing for this long

_ERROR = "error: "  # begins the last line of a command that has failed
_TURN_MS = 1000.0  # the longest turn of the draft, in which the target waits
_STOP_S = 10.0
_PROBE_S = 0.5
_LOOK_S = 0.2
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0
_STEADY_S = 60.0  # a service that ran this long is not in a crash loop
_ANSWER_S = 2.0
_CONNECT_S = 1.0
_GREETING = b"\xff"  # the first byte that ZeroMQ sends


class StartError(SpecBranchError, RuntimeError):
    """The draft service did not start; the message names the cause, or where to read it."""


@dataclass(frozen=True, slots=True)
class DraftServiceOptions:
    """The options of `specbranch draft`.

    Without `address` the service listens on a new socket that only this user can reach.
    `timeline` and `record` are files that the service writes.
    `extra` is added to its command line as it is.
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
        """Return the arguments of the command `specbranch` that start the service at this address."""
        chosen = {
            "--device": self.device,
            "--listen": address,
            "--engine": self.engine,
            "--dtype": None if self.dtype == "auto" else self.dtype,
            "--threads": self.threads,
            "--cores": join_cores(self.cores) if self.cores else None,
            "--timeline": Path(self.timeline).absolute() if self.timeline is not None else None,
            "--record": Path(self.record).absolute() if self.record is not None else None,
        }
        pairs = [part for name, value in chosen.items() if value is not None for part in (name, str(value))]
        return ["draft", self.model, *pairs, "--until-eof", *self.extra]


@dataclass(frozen=True, slots=True)
class PairPlacement:
    """Where a draft and its target run: the result of `place_pair`.

    `draft` has the draft's device and cores (None: no draft); `target_cores` is None if the target is not pinned. With
    `takes_turns` both have the same cores, and the planner `budget` lets only one of them compute at a time.
    """

    draft: DraftServiceOptions | None
    target_cores: tuple[int, ...] | None
    warning: str | None = None  # what is wrong with the draft's device; None if nothing is
    takes_turns: bool = False

    def with_turns(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return the proposer's settings `section` with what turns need, if target and draft take turns.

        That is the planner's setting `takes_turns`, and unless `section` has them a deadline for several draft steps
        and no gate. In turns the planner weighs every wait against its gain, while a gate compares stretches of
        different text, which on one request at a time differ more by the text than by the drafts.
        """
        if not self.takes_turns:
            return dict(section)
        defaults = {"deadline_ms": _TURN_MS, "is_gated": False}
        return {**defaults, **section, "settings": {**section["settings"], "takes_turns": True}}


def place_pair(
    draft: DraftServiceOptions | None,
    layout: ParallelLayout,
    target_cores: str | None = None,
    draft_cores: str | None = None,
    *,
    may_take_turns: bool = False,
) -> PairPlacement:
    """Choose the draft's device, and divide the cores of this process between target and draft.

    `draft.device` is the value that the user gave, such as `auto`; `target_cores` and `draft_cores` are the values of
    `--target-cores` and `--draft-cores`. With `may_take_turns`, a draft on the CPU and a target that runs there in one
    process both get all cores and take turns, unless the user named cores: on two cores that is faster than one each.
    """
    if draft is None:
        return PairPlacement(None, divide_cores("none", target_cores, draft_cores).target)
    place = place_draft(draft.device, draft.model, draft.engine, layout)
    cores = divide_cores(place.device, target_cores, draft_cores)
    is_named = target_cores is not None or draft_cores is not None or is_bound_by_user()
    if may_take_turns and layout.in_one_process and not is_named and place.device == "cpu" and cores.target:
        shared = tuple(sorted({*cores.target, *(cores.draft or ())}))
        return PairPlacement(replace(draft, device="cpu", cores=shared), shared, place.warning, takes_turns=True)
    return PairPlacement(replace(draft, device=place.device, cores=cores.draft), cores.target, place.warning)


class DraftProcess:
    """A draft service that this process starts, waits for and stops.

    While the service loads, `on_progress` is called repeatedly with a phrase that says what the service is doing. With
    `on_event`, a service that ends is restarted, and `on_event` is called with one line for each end and each restart,
    from another thread. Checks and benchmarks leave `on_event` out: after a restart their figures would be partly of
    decoding without drafts. As a context manager, it starts the service and stops it at the end.
    """

    def __init__(
        self,
        options: DraftServiceOptions,
        log_file: Path | None = None,
        on_progress: OnProgress = lambda stage: None,
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        self._options = options
        self._log_file = log_file
        self._on_progress = on_progress
        self._on_event = on_event
        self._child: Child | None = None
        self._stage = "starting"
        self._stopping = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._exit = contextlib.ExitStack()
        self.address = options.address or self._new_address()  # stays the same after a restart
        self.welcome: Welcome | None = None

    @property
    def pid(self) -> int:
        """The id of the service's process, which changes with each restart."""
        return self._launched.pid

    @property
    def is_running(self) -> bool:
        """Whether the service's process is alive."""
        return self._child is not None and self._child.is_running

    def start(self) -> Welcome:
        """Start the service, wait until it answers, and return its answer; raise `StartError` if it does not."""
        self.launch()
        return self.wait_until_up()

    def launch(self) -> None:
        """Start the service's process without waiting for it, so that the caller can load a target meanwhile."""
        threads = self._options.threads or (len(self._options.cores) if self._options.cores else None)
        self._child = Child(
            [sys.executable, "-m", "specbranch", *self._options.arguments(self.address)],
            environment={"OMP_NUM_THREADS": str(threads)} if threads else None,
            log_file=self._log_file,
            stdin=PIPE,  # the service ends when it closes, also when this process is killed
            stdout=PIPE,  # the service prints its stages there while it loads
        )
        self._child.listen(self._on_line)

    def wait_until_up(self) -> Welcome:
        """Wait until the service answers, and return its answer.

        If the object was created with `on_event`, it also begins to watch the process, and restarts it whenever it
        ends. Raise `StartError` if the process ends before it answers, or does nothing for `IDLE_S`. While it works,
        the wait has no limit: a model may take minutes to be fetched, loaded and packed.
        """
        self.welcome = self._await_answer()
        if self._on_event is not None:
            self._supervisor.start()
        return self.welcome

    def stop(self) -> None:
        """Send SIGTERM to the service, kill it after 10 seconds if it still runs, and do not restart it.

        Also remove the temporary directory that has the service's socket, unless the options gave an address.
        """
        self._stopping.set()
        self._stop_child()
        while self._supervisor.is_alive():  # it may be restarting the service just now
            self._stop_child()
            self._supervisor.join(_LOOK_S)
        self._stop_child()
        self._exit.close()

    def kill(self) -> None:
        """Kill the service and do not restart it; remove the temporary directory of its socket, as `stop` does."""
        self._stopping.set()
        if self._child is not None:
            self._child.kill()
        self.stop()

    def __enter__(self) -> DraftProcess:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _launched(self) -> Child:
        assert self._child is not None, "launch it first"
        return self._child

    def _new_address(self) -> str:
        directory = self._exit.enter_context(tempfile.TemporaryDirectory(prefix="specbranch-"))
        return f"ipc://{directory}/draft.sock"

    def _on_line(self, line: str) -> None:
        """Store a line that the service has printed as the stage of its start, unless the line is blank."""
        self._stage = line.strip() or self._stage

    def _await_answer(self) -> Welcome:
        """Wait for the service's answer and return it; meanwhile call `on_progress` with the stage of its start.

        Raises `StartError` if the process ends or does nothing for `IDLE_S`.
        """
        idleness = Idleness(self._launched)
        with contextlib.closing(DraftClient(ClientOptions(self.address))) as client:
            while self.is_running and (idle_s := idleness.seconds()) < IDLE_S:
                welcome = client.hello(_PROBE_S)
                if welcome is not None:
                    return welcome
                self._on_progress(f"draft: {self._stage}")
        state = f"has done nothing for {idle_s:.0f} s while {self._stage}" if self.is_running else self._exit_summary
        raise StartError(f"the draft service for {self._options.model} {state}{self._cause()}")

    @property
    def _exit_summary(self) -> str:
        return self._launched.exit_summary

    def _cause(self) -> str:
        """Return the end of an error message: the last error in the service's log, or where to read it."""
        if self._log_file is None:
            return "; its own message is above"
        lines = [line for line in self._launched.log_tail().splitlines() if line.strip()]
        error = next((line for line in reversed(lines) if line.startswith(_ERROR)), None)
        return f": {error.removeprefix(_ERROR)}" if error else f"; see {self._log_file}"

    def _stop_child(self) -> None:
        if self._child is not None:
            self._child.stop(_STOP_S)

    def _supervise(self) -> None:
        """Restart the service each time it ends, until `stop` is called, and report each end and restart to `on_event`.

        The pause before a restart is 1 second and doubles each time, up to 30 seconds. It is 1 second again after the
        service has run for 60 seconds.
        """
        assert self._on_event is not None, "a service without it is not restarted"
        pause_s, up_at_s = _FIRST_PAUSE_S, time.monotonic()
        while not self._stopping.wait(_LOOK_S):
            if self.is_running:
                continue
            if time.monotonic() - up_at_s > _STEADY_S:
                pause_s = _FIRST_PAUSE_S
            self._on_event(f"the draft service {self._exit_summary}; restarting it in {pause_s:g} s")
            if self._stopping.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            self._launched.kill()  # close the pipes to the old process
            self.launch()
            try:
                self.welcome = self._await_answer()
                self._on_event("the draft service is back")
            except StartError as error:
                self._launched.kill()
                if not self._stopping.is_set():
                    self._on_event(str(error))
            up_at_s = time.monotonic()


@dataclass(frozen=True, slots=True)
class RemoteDraft:
    """The addresses of draft services that run already, and the directory of the keys, which TCP needs."""

    addresses: tuple[str, ...]
    keys: Path | None = None

    @property
    def section(self) -> dict[str, Any]:
        """The proposer's settings `address` and, if there are keys, `keys`, which connect it to these services."""
        keys = {"keys": str(self.keys.absolute())} if self.keys else {}
        address = self.addresses[0] if len(self.addresses) == 1 else list(self.addresses)
        return {"address": address, **keys}

    def check(self) -> list[Welcome]:
        """Send `Hello` to all services, and return the replies of those that run.

        Of services that a DNS name or a file names, a few are asked; without any, log a warning. Raises `UsageError` if
        a ZeroMQ socket at one of the addresses does not answer this client.
        """
        welcomes = [_fetch_welcome(address, self.keys) for address in self._services()]
        return [welcome for welcome in welcomes if welcome is not None]

    def _services(self) -> tuple[str, ...]:
        watch = AddressWatch(self.addresses, b"", client_keys(str(self.keys) if self.keys else None))
        for source in watch.sources:
            watch.refresh(source)
        return watch.known[:MAX_SERVICES] if watch.sources else self.addresses


@cache
def _fetch_welcome(address: str, directory: Path | None) -> Welcome | None:
    """Send `Hello` to the service at `address` and return its reply; None if there is no ZeroMQ socket.

    `directory` has the client's keys. Raises `UsageError` if a ZeroMQ socket at this address does not answer.
    """
    keys = client_keys(str(directory) if directory else None)
    check_address(address, keys)
    with contextlib.closing(DraftClient(ClientOptions(address, keys=keys))) as client:
        welcome = client.hello(_ANSWER_S)
    cause = explain_no_reply(address, directory) if welcome is None else None
    if cause is not None:
        raise UsageError(cause)
    return welcome


def explain_no_reply(address: str, keys: Path | None) -> str | None:
    """Return a message that says why the process at `address` does not answer; None if no ZeroMQ socket is there.

    `keys` is the directory of the client's keys, or None.
    """
    if not _is_zeromq(address):
        return None
    cause = "or it does not know these keys" if keys else "or it is not a draft service"
    return (
        f"a process listens at {address} and does not answer this client: either it is a draft service of another "
        f"version, {cause}; `specbranch keys` says which file goes where"
    )


def _is_zeromq(address: str) -> bool:
    """Connect to an address and return whether a ZeroMQ socket sends its greeting.

    A proxy whose service is gone accepts the connection, but sends none.
    """
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
