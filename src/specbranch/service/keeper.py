"""A draft service that is started again, on the same socket, whenever it dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from specbranch.service.process import DraftOptions, DraftProcess, StartError, Tell
from specbranch.service.wire.messages import Welcome

_LOOK_S = 0.2
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_STEADY_S = 60.0  # a service that ran this long is not in a crash loop


class DraftKeeper:
    """Keeps one draft service alive. `say` gets one line for each event, from another thread.

    At the start, `tell` hears again and again what the service does.
    """

    def __init__(self, options: DraftOptions, say: Callable[[str], None], tell: Tell = lambda stage: None) -> None:
        self._first = DraftProcess(options, tell=tell)
        self._options = replace(options, address=self._first.address)
        self._process = self._first
        self._say = say
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="keeper", daemon=True)

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
            self._say(f"the draft service {self._process.ending}; restarting it in {pause_s:g} s")
            if self._stopping.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
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
                self._say(str(error))
            self._process.kill()
        else:
            self._say("the draft service is back")
