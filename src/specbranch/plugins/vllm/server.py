"""The process of `vllm serve`: started on the target's cores, stopped with all that it has started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from specbranch.child import Child
from specbranch.plugins.vllm.serving import ServeOptions

_STOP_S = 30.0


class VllmServer:
    """A running `vllm serve`, in a process group of its own: a Ctrl-C in the terminal does not reach it."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._arguments = options.arguments()
        self._environment = options.environment()
        self._cores = options.cores if options.cores and options.in_one_process else None
        self._child: Child | None = None

    @property
    def returncode(self) -> int | None:
        """Its exit code; None while it runs."""
        assert self._child is not None, "start it first"
        return self._child.returncode

    def start(self) -> None:
        """Start the process; all its output goes to standard error."""
        arguments = [*self._arguments, *self._options.memory_flags(_free_memory())]
        self._child = Child(
            [sys.executable, "-m", "specbranch.plugins.vllm.launch", *arguments],
            environment=self._environment,
            cores=self._cores,
            stdout=sys.stderr,
            has_group=True,
        )

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


def _free_memory() -> float | None:
    """The share of this host's memory that is free; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: float(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["MemAvailable"] / sizes["MemTotal"]
