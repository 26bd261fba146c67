"""How `vllm serve` is started, with our proposer or bare: its arguments, its environment, its cores, and its process.

With one worker on the CPU the model runs inside vLLM's engine process. vLLM would rather start a worker of its own and
then wait for it by spinning on shared memory, which takes a core from whoever computes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbranch.plugins.vllm.flags import FlagError, Flags, merge
from specbranch.plugins.vllm.target import PROPOSER

_STOP_S = 30.0
_EXECUTOR = "--distributed-executor-backend"
_OWN_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_OWN_CACHE = "VLLM_CPU_KVCACHE_SPACE"
_MEMORY = "--gpu-memory-utilization"  # of the host, where vLLM runs on the CPU
_USUAL_SHARE, _SPARE_SHARE, _LEAST_SHARE = 0.92, 0.1, 0.1


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve. `model` is what vLLM loads and `name` what clients call it; `section` are the proposer's settings.

    Without a section vLLM is bare, or has the speculation that its own flags ask for. `flags` are vLLM's own. `cores`
    None means that vLLM is not pinned, as on a GPU.
    """

    model: str
    name: str
    section: Mapping[str, Any] | None
    num_speculative_tokens: int = 8
    flags: Flags = field(default_factory=lambda: Flags([]))
    cores: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.section is None:
            return
        for name in ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"):
            if self.flags.has(name):
                raise FlagError(
                    f"{name} is set by `specbranch serve`; use --draft, --gamma, --planner and --set instead"
                )

    @property
    def num_workers(self) -> int:
        """Processes among which vLLM divides the model, on this machine."""
        names = {"--tensor-parallel-size": "-tp", "--pipeline-parallel-size": "-pp", "--data-parallel-size": "-dp"}
        product = 1
        for long, short in names.items():
            product *= self.flags.number(long, short)
        return product

    @property
    def in_one_process(self) -> bool:
        """Whether we let the model run inside vLLM's engine process."""
        asked = self.flags.has(_EXECUTOR) or os.environ.get(_OWN_BIND, "auto") != "auto"
        return self.cores is not None and self.num_workers == 1 and not asked

    def arguments(self) -> list[str]:
        """The arguments of vLLM's command; what somebody gave goes through as it is."""
        ours, rest = self._with_proposer() if self.section is not None else ([], self.flags)
        if self.in_one_process:
            ours += [_EXECUTOR, "uni"]
        if self.name != self.model and not rest.has("--served-model-name"):
            ours += ["--served-model-name", self.name]
        return ["serve", self.model, *ours, *rest.words]

    def memory_flags(self, free: float | None) -> list[str]:
        """What keeps vLLM from refusing to start: on the CPU it wants its whole share of memory free beforehand.

        The draft has taken some by then. It gets a share of what is `free`, less some for the draft's cache.
        """
        is_asked = self.flags.has(_MEMORY, "--kv-cache-memory-bytes", "--kv-cache-memory") or _OWN_CACHE in os.environ
        if self.cores is None or self.section is None or is_asked or free is None:
            return []
        share = min(_USUAL_SHARE, free - _SPARE_SHARE)
        return [_MEMORY, f"{share:.2f}"] if share >= _LEAST_SHARE else []

    def _with_proposer(self) -> tuple[list[str], Flags]:
        """The arguments that bring our proposer in, and the flags that are left."""
        table, rest = self.flags.take_json("--additional-config")
        speculative = {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        ours = [
            "--speculative-config",
            json.dumps(speculative),
            "--additional-config",
            json.dumps(self._with_us(table)),
        ]
        return ours, rest

    def environment(self) -> dict[str, str]:
        """What is added to the environment, so that vLLM computes on its cores only."""
        if self.cores is None:
            return {}
        if self.in_one_process:
            # The second one: without it vLLM turns "uni" into "mp" on the CPU. The server's own process and the
            # engine's are two all the same.
            return {"OMP_NUM_THREADS": str(len(self.cores)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if os.environ.get(_OWN_BIND, "auto") != "auto":
            return {}
        return {_OWN_BIND: "|".join(",".join(str(core) for core in part) for part in self._parts(self.cores))}

    def _parts(self, cores: Sequence[int]) -> list[Sequence[int]]:
        """The cores of each worker, equally many."""
        each = len(cores) // self.num_workers
        if not each:
            have = ",".join(str(core) for core in cores)
            raise FlagError(
                f"{self.num_workers} workers need as many cores, and the target has {have}; use --target-cores"
            )
        return [cores[index * each : (index + 1) * each] for index in range(self.num_workers)]

    def _with_us(self, table: dict[str, Any]) -> dict[str, Any]:
        """Somebody's additional config with our section in it; the two may not name one setting twice."""
        theirs = table.get("specbranch", {})
        if not isinstance(theirs, dict):
            raise FlagError(f"--additional-config has {theirs!r} under 'specbranch'; give a table of settings")
        section = dict(self.section or {})
        for key in theirs:
            if key in section:
                raise FlagError(
                    f"--additional-config sets specbranch.{key}, which `specbranch serve` sets; leave one out"
                )
        merged: dict[str, Any] = {}
        merge(merged, table)
        merge(merged, {"specbranch": section})
        return merged


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server will answer, by vLLM's flags."""

    host: str
    port: int
    is_tls: bool = False
    path: str | None = None

    @classmethod
    def of(cls, flags: Flags) -> Endpoint:
        """Read from the flags; the rest is vLLM's defaults."""
        port = flags.value("--port")
        if port is not None and not port.isdecimal():
            raise FlagError(f"--port is {port!r}; give a whole number")
        host = flags.value("--host") or "127.0.0.1"
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return cls(reachable, int(port or 8000), flags.has("--ssl-certfile"), flags.value("--uds"))

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}"

    def is_healthy(self) -> bool:
        """Whether the server answers that it is well."""
        connection = self._connection()
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self.is_tls and not self.path:
            unchecked = ssl._create_unverified_context()  # it is our own child, and nothing is told to it
            return http.client.HTTPSConnection(self.host, self.port, timeout=2.0, context=unchecked)
        connection = _UnixConnection(self.path) if self.path else http.client.HTTPConnection(self.host, self.port)
        connection.timeout = 2.0
        return connection


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class VllmServer:
    """A running `vllm serve`, in a process group of its own: a Ctrl-C in the terminal does not reach it."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._arguments = options.arguments()
        self._environment = options.environment()
        self._cores = set(options.cores) if options.cores and options.in_one_process else None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_swept = False

    @property
    def returncode(self) -> int | None:
        """Its exit code; None as long as it runs."""
        assert self._process is not None, "start it first"
        return self._process.poll()

    def start(self) -> None:
        """Start the process; all that it writes goes to standard error."""
        arguments = [*self._arguments, *self._options.memory_flags(_free_memory())]
        command = [sys.executable, "-m", "specbranch.plugins.vllm.launch", *arguments]
        before = os.sched_getaffinity(0)
        try:
            # Children inherit the cores of the thread that starts them.
            os.sched_setaffinity(0, self._cores or before)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, before)

    def free_frontend(self) -> None:
        """Let the HTTP server use all of our cores; the engine's process keeps to the target's."""
        assert self._process is not None, "start it first"
        if self._cores is None:
            return
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            try:
                os.sched_setaffinity(int(task.name), os.sched_getaffinity(0))
            except ProcessLookupError:  # a thread that just ended
                continue

    def stop(self) -> None:
        """Ask it to end; make it end if it does not."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        self.kill()

    def kill(self) -> None:
        """End what is left of it."""
        if self._process is None or self._is_swept:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._is_swept = True  # from now on the number of the group may be somebody else's


def _free_memory() -> float | None:
    """The share of this host's memory that is free; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: float(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["MemAvailable"] / sizes["MemTotal"]
