"""Where a vLLM server answers, by its flags, and whether it is up."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from specbranch.errors import FlagError
from specbranch.plugins.vllm.flags import Flags

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address over TCP, or the `path` of a Unix socket."""

    host: str
    port: int
    is_tls: bool = False
    path: str | None = None

    @classmethod
    def of(cls, flags: Flags) -> Endpoint:
        """The address that vLLM's flags and defaults give."""
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

    def refuse_if_taken(self) -> None:
        """Raise if somebody else listens there already; vLLM would find out after the models are loaded."""
        if self.path:
            if Path(self.path).exists():
                raise FlagError(f"--uds is {self.path}, which exists; stop the server behind it, or remove it")
            return
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise FlagError(
                    f"port {self.port} is in use; stop what listens there, or choose another by --port"
                ) from error
            raise FlagError(f"cannot listen at {self}: {error.strerror or error}; change --host or --port") from error

    def is_healthy(self) -> bool:
        """Whether the server answers to a health check."""
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
    # The server is our own child and gets no secret; its certificate may be for another name.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
