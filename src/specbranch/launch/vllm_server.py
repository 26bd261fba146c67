"""Run `vllm serve` with our plugin as a child process, and check the health of its HTTP server.

With one worker on the CPU the model runs inside vLLM's engine process. By default vLLM starts a worker process and
spins on shared memory while it waits for the worker, which costs the model a core.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from specbranch import machine
from specbranch.errors import FlagError
from specbranch.launch.child import PIPE, Child
from specbranch.launch.placement import is_bound_by_user, omp_bind_env
from specbranch.launch.vllm_flags import Flags, layout_of
from specbranch.launch.vllm_log import FailureParser, StartupProgress
from specbranch.plugins.vllm.installed import run_command_line
from specbranch.plugins.vllm.settings import ProposerSettings, proposer_arguments

_EXECUTOR = "--distributed-executor-backend"
_OWN_CACHE = "VLLM_CPU_KVCACHE_SPACE"
_MEMORY = "--gpu-memory-utilization"  # of the host, where vLLM runs on the CPU
_USUAL_SHARE, _SPARE_SHARE, _MIN_SHARE = 0.92, 0.1, 0.1
_STOP_S = 30.0
_LAST_LINES_S = 2.0
_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class VllmServeCommand:
    """A command line of `vllm serve`: vLLM loads `model`, clients call it `name`, and `flags` are vLLM's own.

    Without `settings` vLLM runs without our proposer: bare, or with the speculative decoding that its flags configure.
    Without `cores` vLLM is not pinned, as on a GPU.
    """

    model: str
    name: str
    _: KW_ONLY
    settings: ProposerSettings | None
    num_speculative_tokens: int = 8
    flags: Flags = field(default_factory=lambda: Flags([]))
    cores: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.settings is None:
            return
        layout_of(self.flags).check_supported()
        for name in ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"):
            if self.flags.has(name):
                raise FlagError(
                    f"{name} is set by `specbranch serve`; use --draft, --gamma, --planner and --set, or --bare"
                )

    @property
    def num_workers(self) -> int:
        """The number of worker processes that vLLM starts on this machine."""
        return layout_of(self.flags).num_devices

    @property
    def in_one_process(self) -> bool:
        """Whether the model runs inside vLLM's engine process."""
        is_set_by_user = self.flags.has(_EXECUTOR) or is_bound_by_user()
        return self.cores is not None and self.num_workers == 1 and not is_set_by_user

    def arguments(self) -> list[str]:
        """Return the arguments of the command `vllm`: `serve`, the model, our flags and the user's.

        The user's `--additional-config` is merged into ours.
        """
        ours, rest = self._with_proposer(self.settings) if self.settings is not None else ([], self.flags)
        if self.in_one_process:
            ours += [_EXECUTOR, "uni"]
        if self.name != self.model and not rest.has("--served-model-name"):
            ours += ["--served-model-name", self.name]
        return ["serve", self.model, *ours, *rest.words]

    def memory_flags(self, free: float | None) -> list[str]:
        """Return a flag with its value that limits vLLM on the CPU to `free` minus a tenth of the host's memory.

        The limit is at most 0.92; the tenth is left for the draft's KV cache. vLLM refuses to start unless its whole
        share is free, and the draft has allocated memory by then. `free` is the share of the host's memory that is
        free. The list is empty if that is unknown (None) or too small, if the user has set a limit, for bare vLLM, and
        for vLLM on a GPU.
        """
        is_set = self.flags.has(_MEMORY, "--kv-cache-memory-bytes", "--kv-cache-memory") or _OWN_CACHE in os.environ
        if self.cores is None or self.settings is None or is_set or free is None:
            return []
        share = min(_USUAL_SHARE, free - _SPARE_SHARE)
        return [_MEMORY, f"{share:.2f}"] if share >= _MIN_SHARE else []

    def _with_proposer(self, settings: ProposerSettings) -> tuple[list[str], Flags]:
        """Return two groups of flags: ours, which load the proposer, and the remaining flags of the user.

        The user's `--additional-config` is merged into ours.
        """
        table, rest = self.flags.take_json("--additional-config")
        ours = proposer_arguments(settings, self.num_speculative_tokens)
        speculative, additional = ours["speculative_config"], {**table, **ours["additional_config"]}
        return ["--speculative-config", json.dumps(speculative), "--additional-config", json.dumps(additional)], rest

    def environment(self) -> dict[str, str]:
        """Return the environment variables that give vLLM one thread per core, or bind its workers to their cores.

        Empty if vLLM is not pinned, or if the user has bound its workers to cores.
        """
        if self.cores is None:
            return {}
        if self.in_one_process:
            # Without the second variable vLLM replaces "uni" by "mp" on the CPU. The HTTP server still has a process
            # of its own.
            return {"OMP_NUM_THREADS": str(len(self.cores)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return omp_bind_env(self.cores, self.num_workers)


class VllmServer:
    """A `vllm serve` process in a process group of its own, which Ctrl-C in the terminal does not reach.

    `show` is called with every line of the server's output, from another thread.
    """

    def __init__(self, options: VllmServeCommand, show: Callable[[str], None]) -> None:
        self._options = options
        self._arguments = options.arguments()
        self._environment = options.environment()
        self._cores = options.cores if options.cores and options.in_one_process else None
        self._show = show
        self._stages = StartupProgress()
        self._failure = FailureParser()
        self._child: Child | None = None
        self._listener: threading.Thread | None = None

    @property
    def returncode(self) -> int | None:
        """The server's exit code; None while it runs."""
        assert self._child is not None, "start it first"
        return self._child.returncode

    @property
    def stage(self) -> str:
        """A phrase that names the stage that the server's start has reached."""
        return self._stages.stage

    @property
    def is_up(self) -> bool:
        """Whether the server has logged that it is ready."""
        return self._stages.is_up

    def clear_failures(self) -> None:
        """Discard the errors that the server has logged so far, so that `cause` reports only later ones."""
        self._failure = FailureParser()

    def cause(self) -> str:
        """Return one sentence that says why the server ended and, if known, what to do about it."""
        if self._listener is not None:
            self._listener.join(_LAST_LINES_S)
        return self._failure.cause(self.returncode)

    def start(self) -> None:
        """Start the server's process without waiting until it is up, and a thread that reads its output."""
        arguments = [*self._arguments, *self._options.memory_flags(_free_share())]
        # vLLM uses colours only if it writes to a terminal, and here it writes to a pipe.
        colours = {"VLLM_LOGGING_COLOR": "1"} if sys.stderr.isatty() and "VLLM_LOGGING_COLOR" not in os.environ else {}
        self._child = Child(
            [sys.executable, "-m", "specbranch.launch.vllm_server", *arguments],
            environment={"PYTHONUNBUFFERED": "1", **colours, **self._environment},
            cores=self._cores,
            stdout=PIPE,
            has_one_output=True,
            has_group=True,
        )
        # Without a listener vLLM would block as soon as the pipe is full.
        self._listener = self._child.listen(self._on_line)

    def unpin_frontend(self) -> None:
        """Let the server's HTTP process use all cores of this process.

        The engine, which has a process of its own by then, keeps the target's cores.
        """
        assert self._child is not None, "start it first"
        if self._cores is None:
            return
        for task in Path(f"/proc/{self._child.pid}/task").iterdir():
            try:
                os.sched_setaffinity(int(task.name), os.sched_getaffinity(0))
            except ProcessLookupError:  # a thread that just ended
                continue

    def stop(self) -> None:
        """Send SIGTERM to the server, wait up to 30 seconds for its end, and kill the rest of its process group."""
        if self._child is not None:
            self._child.stop(_STOP_S)

    def kill(self) -> None:
        """Kill the server, with all processes that it has started."""
        if self._child is not None:
            self._child.kill()

    def _on_line(self, line: str) -> None:
        self._stages.feed(line)
        self._failure.feed(line)
        self._show(line)


def _free_share() -> float | None:
    """Return the share of this host's memory that is free; None if the system does not report it."""
    free, total = machine.free_host_memory(), machine.host_memory()
    return None if free is None or not total else free / total


@dataclass(frozen=True, slots=True)
class HttpEndpoint:
    """The address of an HTTP server: `host` and `port` over TCP or, if not None, the `path` of a Unix socket."""

    host: str
    port: int
    is_tls: bool = False
    path: str | None = None

    @classmethod
    def of(cls, flags: Flags) -> HttpEndpoint:
        """Return the address at which a vLLM server with these flags can be reached from this machine."""
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

    def check_free(self) -> None:
        """Raise `FlagError` if this address is in use or cannot be used.

        vLLM would notice that only after the models are loaded.
        """
        if self.path:
            if Path(self.path).exists():
                raise FlagError(f"--uds is {self.path}, which exists; stop the server that uses it, or remove the file")
            return
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise FlagError(
                    f"port {self.port} is in use; stop the process that listens there, or choose another by --port"
                ) from error
            raise FlagError(f"cannot listen at {self}: {error.strerror or error}; change --host or --port") from error

    def is_healthy(self) -> bool:
        """Request /health and return whether the server answers with status 200."""
        connection = self._connection()
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self.path:
            return _UnixConnection(self.path)
        if self.is_tls:
            return http.client.HTTPSConnection(self.host, self.port, timeout=_TIMEOUT_S, context=_unverified())
        return http.client.HTTPConnection(self.host, self.port, timeout=_TIMEOUT_S)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _unverified() -> ssl.SSLContext:
    # The server is our own child and receives no secret; its certificate may be for another name.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


if __name__ == "__main__":  # vLLM's processes import this module again
    run_command_line()
