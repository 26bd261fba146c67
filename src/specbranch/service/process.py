"""The draft service as a child process: started, waited for, stopped. It ends by itself when its parent dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from specbranch.service.client import ClientOptions, DraftClient
from specbranch.service.wire import Welcome

_STOP_S = 10.0


class StartError(RuntimeError):
    """The service did not come up; the message says what it said."""


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """What `specbranch draft` shall run. `address` None means a new socket that only this user can reach."""

    model: str
    engine: str | None = None
    device: str = "cpu"
    cores: Sequence[int] | None = None
    threads: int | None = None
    address: str | None = None
    extra: Sequence[str] = ()

    def arguments(self, address: str) -> list[str]:
        """The command's arguments."""
        chosen = {
            "--device": self.device,
            "--listen": address,
            "--engine": self.engine,
            "--threads": self.threads,
            "--cores": ",".join(str(core) for core in self.cores) if self.cores else None,
        }
        pairs = [part for name, value in chosen.items() if value is not None for part in (name, str(value))]
        return ["draft", self.model, *pairs, "--until-eof", *self.extra]


class DraftProcess:
    """A running `specbranch draft`; a context manager that starts it, waits until it answers, and stops it."""

    def __init__(self, options: DraftOptions, log_file: Path | None = None) -> None:
        self._options = options
        self._log_file = log_file
        self._exit = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self.address = options.address or self._new_address()
        self.welcome: Welcome | None = None

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None, "start it first"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        code = self._returncode()
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with code {code}"

    def start(self) -> None:
        """Start the process; it is not waited for."""
        command = [sys.executable, "-m", "specbranch", *self._options.arguments(self.address)]
        log = self._exit.enter_context(self._log_file.open("ab")) if self._log_file else None
        # A session of its own: Ctrl-C in the terminal reaches the parent, which stops the service in its own time.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._environment(), start_new_session=True
        )

    def wait_until_up(self, timeout_s: float = 120.0) -> Welcome:
        """What the service says of itself, as soon as it answers."""
        end_s = time.monotonic() + timeout_s
        with contextlib.closing(DraftClient(ClientOptions(self.address))) as client:
            while time.monotonic() < end_s and self.is_running:
                self.welcome = client.hello(0.5)
                if self.welcome is not None:
                    return self.welcome
        state = "did not answer in time" if self.is_running else self.ending
        where = f"; see {self._log_file}" if self._log_file else "; its own message is above"
        raise StartError(f"the draft service for {self._options.model} {state}{where}")

    def stop(self) -> None:
        """Ask it to end; make it end if it does not."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._exit.close()

    def kill(self) -> None:
        """End it at once; `stop` then cleans up."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

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

    def _returncode(self) -> int | None:
        return self._process.returncode if self._process else None

    def _new_address(self) -> str:
        directory = self._exit.enter_context(tempfile.TemporaryDirectory(prefix="specbranch-"))
        return f"ipc://{directory}/draft.sock"

    def _environment(self) -> dict[str, str]:
        threads = self._options.threads or (len(self._options.cores) if self._options.cores else None)
        return {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
