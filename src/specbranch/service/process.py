"""The draft service as a child process: started, waited for, stopped. It ends by itself when its parent dies."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import TracebackType

from specbranch.child import PIPE, Child, Idleness
from specbranch.errors import SpecBranchError
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions
from specbranch.service.wire.messages import Welcome

IDLE_S = 60.0  # a start that does nothing for so long is given up

_STOP_S = 10.0
_PROBE_S = 0.5
_ERROR = "error: "  # how a command's last line begins

Tell = Callable[[str], None]


def _silent(_: str) -> None:
    pass


class StartError(SpecBranchError, RuntimeError):
    """The draft service did not start; the message says why, or where to read it."""


@dataclass(frozen=True, slots=True)
class DraftOptions:
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

    While it is waited for, `tell` hears again and again what it does.
    """

    def __init__(self, options: DraftOptions, log_file: Path | None = None, tell: Tell = _silent) -> None:
        self._options = options
        self._log_file = log_file
        self._tell = tell
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
    def ending(self) -> str:
        """How the process ended, in words."""
        return self._started.ending

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
        self._child.listen(self._hear)

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
                self._tell(f"draft: {self._stage}")
        state = f"has done nothing for {idle_s:.0f} s while {self._stage}" if self.is_running else self.ending
        raise StartError(f"the draft service for {self._options.model} {state}{self._cause()}")

    def _cause(self) -> str:
        """What the service said last, or where to read it."""
        if self._log_file is None:
            return "; its own message is above"
        lines = [line for line in self._started.last_words().splitlines() if line.strip()]
        words = next((line for line in reversed(lines) if line.startswith(_ERROR)), None)
        return f": {words.removeprefix(_ERROR)}" if words else f"; see {self._log_file}"

    def _hear(self, line: str) -> None:
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
