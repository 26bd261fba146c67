"""The process of `vllm serve`: started on the target's cores, listened to, stopped with all that it has started."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from specbranch import machine
from specbranch.child import PIPE, Child
from specbranch.plugins.vllm.failure import FailureLog
from specbranch.plugins.vllm.serving import ServeOptions
from specbranch.plugins.vllm.stages import Stages

_STOP_S = 30.0
_LAST_LINES_S = 2.0


class VllmServer:
    """A running `vllm serve`, in a process group of its own: a Ctrl-C in the terminal does not reach it.

    `show` gets every line of its output, from another thread.
    """

    def __init__(self, options: ServeOptions, show: Callable[[str], None]) -> None:
        self._options = options
        self._arguments = options.arguments()
        self._environment = options.environment()
        self._cores = options.cores if options.cores and options.in_one_process else None
        self._show = show
        self._stages = Stages()
        self._failure = FailureLog()
        self._child: Child | None = None
        self._listener: threading.Thread | None = None

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs."""
        assert self._child is not None, "start it first"
        return self._child.returncode

    @property
    def stage(self) -> str:
        """What it does until it is ready."""
        return self._stages.now

    @property
    def is_up(self) -> bool:
        """Whether it has said that it is ready."""
        return self._stages.is_up

    def forget_failures(self) -> None:
        """It runs: errors of single requests do not say why it ends one day."""
        self._failure = FailureLog()

    def cause(self) -> str:
        """Why it has ended, in one sentence."""
        if self._listener is not None:
            self._listener.join(_LAST_LINES_S)
        return self._failure.cause(self.returncode)

    def start(self) -> None:
        """Start the process."""
        arguments = [*self._arguments, *self._options.memory_flags(_free_share())]
        # vLLM has colours where it writes to a terminal; now it writes to us.
        colours = {"VLLM_LOGGING_COLOR": "1"} if sys.stderr.isatty() and "VLLM_LOGGING_COLOR" not in os.environ else {}
        self._child = Child(
            [sys.executable, "-m", "specbranch.plugins.vllm.launch", *arguments],
            environment={"PYTHONUNBUFFERED": "1", **colours, **self._environment},
            cores=self._cores,
            stdout=PIPE,
            has_one_output=True,
            has_group=True,
        )
        # Without a listener vLLM would come to a halt when the pipe is full.
        self._listener = self._child.listen(self._hear)

    def free_frontend(self) -> None:
        """Let the HTTP server use all of our cores; the engine's process keeps the target's."""
        assert self._child is not None, "start it first"
        if self._cores is None:
            return
        for task in Path(f"/proc/{self._child.pid}/task").iterdir():
            try:
                os.sched_setaffinity(int(task.name), os.sched_getaffinity(0))
            except ProcessLookupError:  # a thread that just ended
                continue

    def stop(self) -> None:
        """Ask it to end; kill what is left of it."""
        if self._child is not None:
            self._child.stop(_STOP_S)

    def kill(self) -> None:
        """End it at once, with all processes that it has started."""
        if self._child is not None:
            self._child.kill()

    def _hear(self, line: str) -> None:
        self._stages.hear(line)
        self._failure.hear(line)
        self._show(line)


def _free_share() -> float | None:
    """The share of this host's memory that is free; None where the system does not tell."""
    free, total = machine.free_host_memory(), machine.host_memory()
    return None if free is None or not total else free / total
