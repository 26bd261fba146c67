"""A child process: start it, wait until it is up, read the end of its log, stop it.

This module knows nothing of the program in the child: the caller gives the command and the probe for readiness.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

_Found = TypeVar("_Found")

PIPE = subprocess.PIPE
_TAIL_LEN = 2000  # characters
_WORK_S, _WORK_BYTES = 0.2, 1 << 20  # a process that uses less than this is idle


class Child:
    """A running process; the constructor starts it.

    `environment` is added to the environment of this process. Without `cores` the child inherits the cores of this
    process. The child's output goes to `log_file`, else to the output of this process; `stdout` redirects its standard
    output, and `has_one_output` sends its standard error to the same place. With `has_group`, `kill` also kills the
    child's children.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        cores: Collection[int] | None = None,
        log_file: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[str] | None = None,
        has_one_output: bool = False,
        has_group: bool = False,
    ) -> None:
        self._log_file = log_file
        self._has_group = has_group
        self._is_swept = False
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(log_file.open("ab")) if log_file else None
            stack.enter_context(pinned(cores))
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=log if stdout is None else stdout,
                stderr=subprocess.STDOUT if has_one_output else log,
                env={**os.environ, **(environment or {})},
                # Ctrl-C in the terminal reaches the parent only, which stops the child in its own time.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The child's exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def is_running(self) -> bool:
        """Whether the child has not ended."""
        return self.returncode is None

    @property
    def exit_summary(self) -> str:
        """A phrase that says how the child ended, or that it is still running."""
        code = self.returncode
        if code is None:
            return "is still running"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    @property
    def input(self) -> IO[bytes]:
        """The child's standard input; it must have been started with `stdin=PIPE`."""
        assert self._process.stdin is not None, "started without a pipe"
        return self._process.stdin

    @property
    def output(self) -> IO[bytes]:
        """The child's standard output; it must have been started with `stdout=PIPE`."""
        assert self._process.stdout is not None, "started without a pipe"
        return self._process.stdout

    def listen(self, on_line: Callable[[str], None]) -> threading.Thread:
        """Start a thread that calls `on_line` with every line of the child's standard output, and return the thread.

        Errors of `on_line` are ignored: a child blocks as soon as the pipe is full, so the thread must keep reading.
        """
        # A duplicate: `close` of the child's own file would block while the thread reads from it.
        copy = os.dup(self.output.fileno())

        def read_lines() -> None:
            with os.fdopen(copy, errors="replace") as lines:
                for line in lines:
                    with contextlib.suppress(Exception):  # such as a terminal that is gone
                        on_line(line.rstrip("\n"))

        thread = threading.Thread(target=read_lines, name=f"output-{self.pid}", daemon=True)
        thread.start()
        return thread

    def close_input(self) -> None:
        """Close the child's standard input, so that the child reads the end of the file."""
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self.input.close()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the child ends, for at most `timeout_s` seconds, and return whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return not self.is_running

    def wait_until(self, probe: Callable[[], _Found | None], timeout_s: float, pause_s: float = 0.0) -> _Found | None:
        """Call `probe`, with pauses of `pause_s` seconds, until it returns a value other than None; return that value.

        Returns None if the child ends or `timeout_s` seconds pass before.
        """
        end_s = time.monotonic() + timeout_s
        while self.is_running and time.monotonic() < end_s:
            found = probe()
            if found is not None:
                return found
            time.sleep(pause_s)
        return None

    def work(self) -> tuple[float, int] | None:
        """Return the processor seconds that the child has used, and the bytes that it has read and written.

        Returns None if the system does not report them.
        """
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        except OSError:
            return None
        ticks = int(fields[11]) + int(fields[12])  # in user and in system mode
        # A download counts as it is written to a file, and weights that are mapped into memory as they are read.
        counts = {name: int(value) for name, _, value in (line.partition(":") for line in lines)}
        return ticks / os.sysconf("SC_CLK_TCK"), counts["rchar"] + counts["wchar"] + counts["read_bytes"]

    def log_tail(self) -> str:
        """Return the last 2000 characters of the child's log file; an empty string if it has none."""
        return self._log_file.read_text(errors="replace")[-_TAIL_LEN:].strip() if self._log_file else ""

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM to the child, wait up to `grace_s` seconds until it ends, then call `kill`."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)  # a suspended process cannot end
            self.wait(grace_s)
        self.kill()

    def kill(self) -> None:
        """Kill the child, or with `has_group` its whole process group, and close the pipes to it."""
        if self._has_group and not self._is_swept:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._is_swept = True  # the system may now give the group's number to other processes
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # unread data is lost
                    pipe.close()


class Idleness:
    """Measures for how long a child has used at most 0.2 s of processor time and transferred at most 1 MiB."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._mark = child.work()
        self._since_s = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds for which the child has been idle; 0 if the system does not report its work.

        Only this method checks for work, so the time counts from the call that last found some.
        """
        now = self._child.work()
        if now is None or self._mark is None:
            return 0.0
        if now[0] - self._mark[0] > _WORK_S or now[1] - self._mark[1] > _WORK_BYTES:
            self._mark, self._since_s = now, time.monotonic()
        return time.monotonic() - self._since_s


@contextlib.contextmanager
def pinned(cores: Collection[int] | None) -> Iterator[None]:
    """Pin this thread to `cores` inside `with`; do nothing if `cores` is None.

    A child inherits the cores of the thread that starts it.
    """
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise OSError(
            f"cannot start a process on cores {join_cores(sorted(cores))}; "
            f"this process may use {join_cores(sorted(before))}"
        ) from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def join_cores(cores: Iterable[int]) -> str:
    """Return cores as text in the form that `--cores` takes, such as "0,1"."""
    return ",".join(str(core) for core in cores)


def name_cores(cores: Collection[int] | None) -> str:
    """Return a phrase for a set of cores, such as "core 0" or "cores 0,1"; "not pinned" for None."""
    if cores is None:
        return "not pinned"
    return f"{'core' if len(cores) == 1 else 'cores'} {join_cores(sorted(cores))}"
