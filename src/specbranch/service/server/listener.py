"""The service's bound socket: its file, the keys of its clients, the limit of file descriptors, frames in and out."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from specbranch.logs import RateLimitedWarning
from specbranch.service.server.fair_queue import Message
from specbranch.service.wire.addresses import (
    LINGER_MS,
    AddressError,
    ServiceKeys,
    is_trusted_socket,
    load_key,
    socket_path,
)
from specbranch.service.wire.messages import MAX_FRAME

log = logging.getLogger(__name__)

_MAX_UNREAD = 16  # frames of one client that wait in the socket
_MAX_UNSENT = 128  # replies that one client has not received yet; ZeroMQ drops more
_HANDSHAKE_MS = 3000  # a connection that has not begun ZeroMQ's handshake by then is closed
_BACKLOG = 32
_BEAT_MS, _DEAD_MS = 10_000, 30_000  # over TCP a client that is silent for so long is disconnected
_MAX_USERS = 4096  # clients whose keys are remembered
_CHECK_MS = 100  # between two checks of the descriptors
_EVENTS_A_CHECK = 8  # connections: a thousand can come in the time that Python takes to read their events


class Listener:
    """A bound ROUTER socket. One thread uses it; another one watches the number of file descriptors (`_guarded`)."""

    def __init__(self, context: zmq.Context[Any], address: str, keys: ServiceKeys | None) -> None:
        self._address = address
        self._path = socket_path(address)
        self._file: SocketFile | None = None
        self._keyring = ClientKeyring(keys.clients if keys is not None and self._path is None else None)
        self._users: OrderedDict[bytes, bytes] = OrderedDict()  # the keys that clients have proved to hold, over TCP
        self._warn = RateLimitedWarning(log)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self.socket.setsockopt(zmq.RCVHWM, _MAX_UNREAD)
        self.socket.setsockopt(zmq.SNDHWM, _MAX_UNSENT)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self.socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        with contextlib.ExitStack() as bound:
            bound.callback(self.socket.close)
            if self._path is None:
                self.socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
                self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_MS)
                bound.callback(_bind_tcp(context, self.socket, address, keys, self._keyring).stop)
            else:
                self._file = _bind_unix(self.socket, address, self._path)
                bound.callback(self._remove)
                bound.enter_context(_guarded(self.socket, self._file))
            self._bound = bound.pop_all()

    def close(self) -> None:
        """Close the socket, and delete its file unless another service has replaced the file."""
        self._bound.close()

    def receive(self) -> Message:
        """Return the next message, with the client's key where keys are used; raise `zmq.Again` if there is none.

        Drop messages of clients whose key was removed, and cut their connections.
        """
        if self._path is not None:
            client, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            return Message(client, b"", frames)
        while True:
            name, *parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            user = str(parts[-1].get("User-Id")).encode() if parts else b""
            if user in self._keyring.keys:
                self._remember(name.bytes, user)
                return Message(name.bytes, user, [part.bytes for part in parts])
            if parts:
                self._warn("a client whose key was removed is disconnected")
                _cut(parts[-1])

    def send(self, client: bytes, frame: bytes) -> None:
        """Send a frame to a client, unless its key was removed; raise `zmq.ZMQError` if that would have to wait."""
        if self._path is not None or self._users.get(client) in self._keyring.keys:
            self.socket.send_multipart((client, frame), zmq.NOBLOCK)

    def check(self) -> None:
        """Read the clients' keys again if their files have changed, and bind again if the socket's file was deleted.

        Raise `AddressError` if another service has made a new file.
        """
        self._keyring.refresh()
        if self._file is None or self._path is None or self._file.is_ours:
            return
        if self._path.exists():
            raise AddressError(
                f"{self._path} was replaced: another service listens there, and no client can reach this one any more; "
                "start one of them with another --listen"
            )
        try:
            self._file.replace(_bind_unix(self.socket, self._address, self._path))
        except (AddressError, OSError) as error:
            self._warn("the socket's file was deleted, and cannot be made again: %s", error)
        else:
            self._warn("the socket's file was deleted; the service made it again at %s", self._address)

    def _remember(self, client: bytes, user: bytes) -> None:
        self._users[client] = user
        self._users.move_to_end(client)
        if len(self._users) > _MAX_USERS:
            self._users.popitem(last=False)

    def _remove(self) -> None:
        if self._file is not None:
            self._file.remove()


class ClientKeyring:
    """The public keys of the clients that may connect, from the files of a directory.

    The thread of the `Listener` reads them again; ZeroMQ's thread that accepts connections looks them up.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._warn = RateLimitedWarning(log)
        self._files: dict[str, tuple[int, int, int]] = {}  # by name: inode, size, time of the last change
        self._by_file: dict[str, bytes] = {}
        self.keys: frozenset[bytes] = frozenset()
        self.refresh()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a key is one of these; ZeroMQ calls this at every handshake."""
        return key in self.keys

    def refresh(self) -> None:
        """Read the keys again if the directory or a file in it has changed, and log which were added or removed.

        What cannot be read now keeps its keys: it may be half written.
        """
        if self._directory is None:
            return
        try:
            files = {entry.name: _version_of(entry) for entry in os.scandir(self._directory) if _is_key(entry)}
        except OSError as error:
            self._warn("the clients' keys stay as they were, because they cannot be read: %s", error)
            return
        if files != self._files:
            self._files = files
            self._read(self._directory)

    def _read(self, directory: Path) -> None:
        before, self._by_file = self._by_file, {}
        for name in self._files:
            try:
                self._by_file[name] = zmq.auth.load_certificate(directory / name)[0]
            except (OSError, ValueError) as error:
                self._warn("%s cannot be read as a key: %s", directory / name, error)
                if name in before:
                    self._by_file[name] = before[name]
        self.keys = frozenset(self._by_file.values())
        for verb, found, other in (("added", self._by_file, before), ("removed", before, self._by_file)):
            names = sorted(name for name, _ in found.items() - other.items())
            if names and before:
                log.info("client keys %s: %s", verb, ", ".join(names))


def _is_key(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".key")


def _version_of(entry: os.DirEntry[str]) -> tuple[int, int, int]:
    found = entry.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _cut(part: zmq.Frame) -> None:
    """Shut down the connection that a message came from; its client can then only connect anew."""
    with contextlib.suppress(OSError, zmq.ZMQError):
        number = part.get(zmq.SRCFD)
        with socket.socket(fileno=os.dup(number)) as connection:
            # The connection may have gone since, and its number may be in use again.
            if connection.getpeername()[0] == part.get("Peer-Address"):
                connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def listening(context: zmq.Context[Any], address: str, keys: ServiceKeys | None = None) -> Iterator[Listener]:
    """Yield a listener at this address, and close it after the block."""
    listener = Listener(context, address, keys)
    try:
        yield listener
    finally:
        listener.close()


def raise_fd_limit() -> int:
    """Raise the limit of file descriptors to the hard limit, and return it. Every client takes one descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if limit == resource.RLIM_INFINITY else limit


def lowest_free_fd() -> int:
    """Return the lowest unused file descriptor; all lower numbers are in use."""
    try:
        number = os.dup(0)
    except OSError:
        number = os.open(os.devnull, os.O_RDONLY)
    os.close(number)
    return number


@contextlib.contextmanager
def _guarded(router: zmq.Socket[bytes], file: SocketFile) -> Iterator[None]:
    """During the block, hide the socket's file from new clients while few file descriptors are left.

    ZeroMQ aborts the process when no descriptor is left.
    """
    events: zmq.Socket[bytes] = router.get_monitor_socket(zmq.EVENT_ACCEPTED)
    is_over = threading.Event()
    thread = threading.Thread(target=_watch_descriptors, args=(events, file, is_over), name="descriptors", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        router.disable_monitor()
        events.close()


def _watch_descriptors(events: zmq.Socket[bytes], file: SocketFile, is_over: threading.Event) -> None:
    limit = raise_fd_limit()
    reserve = max(limit // 4, 64)
    warn = RateLimitedWarning(log)
    while not is_over.is_set():
        if events.poll(_CHECK_MS):
            with contextlib.suppress(zmq.Again):
                for _ in range(_EVENTS_A_CHECK):
                    events.recv_multipart(zmq.NOBLOCK)
        try:
            is_full = lowest_free_fd() >= limit - reserve
        except OSError:
            is_full = True
        if is_full and file.hide():
            warn(
                "more than %d file descriptors are open: new clients cannot connect until others disconnect",
                limit - reserve,
            )
        elif not is_full and file.show():
            log.info("new clients can connect again")


def _bind_unix(router: zmq.Socket[bytes], address: str, path: Path) -> SocketFile:
    if not is_trusted_socket(path):
        path.parent.mkdir(parents=True, mode=0o700)
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise AddressError(f"{path} exists and is no socket; choose another address")
        if _is_alive(path):
            raise AddressError(f"a service listens at {address} already; stop it or choose another address")
        path.unlink()
    before = os.umask(0o177)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        raise AddressError(f"cannot listen at {address}: {error}") from error
    finally:
        os.umask(before)
    path.chmod(0o600)
    return SocketFile(path)


def _is_alive(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _bind_tcp(
    context: zmq.Context[Any], router: zmq.Socket[bytes], address: str, keys: ServiceKeys | None, keyring: ClientKeyring
) -> ThreadAuthenticator:
    if keys is None:
        raise AddressError(f"{address}: TCP needs CURVE keys; make them with `specbranch keys DIR` and pass --keys DIR")
    public, secret = load_key(keys.secret)
    if not keyring.keys:
        raise AddressError(f"{keys.clients} holds no client's public key, so no client could connect; copy one there")
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=keyring)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = public, secret
    router.setsockopt(zmq.IPV6, "[" in address)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        authenticator.stop()
        raise AddressError(f"cannot listen at {address}: {error}") from error
    return authenticator


class SocketFile:
    """The file of a Unix socket, known by its inode, so that another file at the same path is never touched.

    While it is hidden no new client can connect; clients that are connected stay so.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hidden = path.with_name(f".{path.name}.{os.getpid()}")
        self._identity = _identity(path)
        self._is_hidden = False
        self._lock = threading.Lock()

    @property
    def is_ours(self) -> bool:
        """Whether the file that this service made still exists, at its public path or hidden."""
        with self._lock:
            return self._is_there()

    def replace(self, file: SocketFile) -> None:
        """Use `file`, a new file at the same path, in place of the one that was deleted."""
        with self._lock:
            self._identity, self._is_hidden = file._identity, False

    def hide(self) -> bool:
        """Hide the file from new clients; return False if it was hidden already or cannot be hidden."""
        with self._lock:
            return not self._is_hidden and self._move(self._path, self._hidden)

    def show(self) -> bool:
        """Show the file to new clients again; return False if it was not hidden or cannot be shown."""
        with self._lock:
            return self._is_hidden and self._move(self._hidden, self._path)

    def remove(self) -> None:
        """Delete the file, unless another service has replaced it."""
        with self._lock:
            if self._is_there():
                self._where.unlink(missing_ok=True)

    @property
    def _where(self) -> Path:
        return self._hidden if self._is_hidden else self._path

    def _is_there(self) -> bool:
        return _identity(self._where) == self._identity

    def _move(self, source: Path, target: Path) -> bool:
        if not self._is_there():
            return False
        with contextlib.suppress(OSError):
            if self._is_hidden:
                os.link(source, target)  # fails, unlike a rename, if another service has put its file there meanwhile
                source.unlink()
            else:
                source.rename(target)
            self._is_hidden = not self._is_hidden
            return True
        return False


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
