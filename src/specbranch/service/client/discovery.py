"""Which draft services there are, and which of them a client uses.

Services are named in a list, in a file that is watched, or by a DNS name that is resolved again and again
(`AddressWatch`, the only part with threads: no step of the target waits for a name or a file). A client connects to a
few of the known services, the first usable ones in the rendezvous order of its identity (`ServiceSelection`). So the
number of connections grows with the clients, not with clients times services, and where services come or go, only
their clients change. Nothing here knows a socket of ZeroMQ: the simulation of a fleet runs the same code.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from specbranch.service.wire.addresses import AddressError, ClientKeys, check_address, socket_path

log = logging.getLogger(__name__)

MAX_SERVICES = 4  # that a client uses by default; three survive the loss of one, more than five share less per step
DNS_INTERVAL_S = 30.0  # between two resolutions of a name
FILE_INTERVAL_S = 1.0  # between two looks at a file
_UNRESOLVED_S = 5.0  # the interval while a name or a file has named no service yet
_MAX_KNOWN = 4096  # services of one name or file; more are a mistake
_MAX_FILE = 1 << 20  # bytes
_PAUSE_S, _MAX_PAUSE_S = 10.0, 120.0  # after a failure of a service until it is tried again; doubles with each failure


class AddressSource(ABC):
    """A name or a file that names draft services."""

    interval_s: float

    def __init__(self, address: str, keys: ClientKeys | None) -> None:
        self.address = address
        self._keys = keys

    @abstractmethod
    def read(self) -> tuple[str, ...] | None:
        """Return the addresses of the services; None if they are as before. Raise `OSError` or `AddressError`."""


class DnsSource(AddressSource):
    """A DNS name: each A and AAAA record is the address of a service."""

    interval_s = DNS_INTERVAL_S

    def __init__(
        self, address: str, keys: ClientKeys | None, resolve: Callable[[str, int], Iterable[str]] | None = None
    ) -> None:
        """Take an address like dns://name:port; raise `AddressError` if it is none or has no keys."""
        super().__init__(address, keys)
        name, port = _host_and_port(address)
        self._name, self._port = name, port
        self._resolve = resolve or resolve_name
        check_address(f"tcp://{name}:{port}", keys)

    def read(self) -> tuple[str, ...]:
        try:
            hosts = set(self._resolve(self._name, self._port))
        except UnicodeError as error:  # no name at all, for example with a label of 64 characters
            raise AddressError(f"{self._name!r} is no DNS name: {error}") from error
        shown = sorted(f"[{host}]" if ":" in host else host for host in hosts)
        return _checked([f"tcp://{host}:{self._port}" for host in shown])


class FileSource(AddressSource):
    """A file with one address per line; lines that are empty or begin with # are ignored."""

    interval_s = FILE_INTERVAL_S

    def __init__(self, address: str, keys: ClientKeys | None) -> None:
        """Take an address like file:///path; raise `AddressError` if the path is not absolute."""
        super().__init__(address, keys)
        self._path = Path(address.removeprefix("file://"))
        self._seen: tuple[int, ...] = ()
        if not self._path.is_absolute():
            raise AddressError(f"{address!r} names no file; give file:///PATH with the whole path")

    def read(self) -> tuple[str, ...] | None:
        status = self._path.stat()
        seen = (status.st_mtime_ns, status.st_ino, status.st_dev, status.st_size)
        if seen == self._seen:
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE:
            raise AddressError(f"{self._path} is no file of at most {_MAX_FILE} bytes")
        try:
            lines = [line.strip() for line in self._path.read_text().splitlines()]
        except UnicodeError as error:
            raise AddressError(f"{self._path} is no text: {error}") from error
        found = [line for line in lines if line and not line.startswith("#")]
        for address in found:
            _check_service(address, self._keys)
        addresses = _checked(found)
        self._seen = seen
        return addresses


def resolve_name(name: str, port: int) -> list[str]:
    """Return the IP addresses of a name; raise `OSError` if it does not resolve. This may take seconds."""
    return [str(entry[4][0]) for entry in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]


def is_watched(address: str) -> bool:
    """Return whether an address stands for services that may change: dns://NAME:PORT or file:///PATH."""
    return address.startswith(("dns://", "file://"))


def make_source(address: str, keys: ClientKeys | None) -> AddressSource:
    """Return the source that an address with dns:// or file:// stands for; raise `AddressError` if it is wrong."""
    return (DnsSource if address.startswith("dns://") else FileSource)(address, keys)


def check_addresses(addresses: Sequence[str], keys: ClientKeys | None) -> None:
    """Raise `AddressError` unless each address can be one of a service, a DNS name or a file, with keys for TCP."""
    for address in addresses:
        if is_watched(address):
            make_source(address, keys)
        elif "://" in address and not address.startswith(("ipc://", "tcp://")):
            raise AddressError(
                f"{address!r} is no address; give ipc://PATH, file:///PATH, or with keys tcp://HOST:PORT or "
                "dns://NAME:PORT"
            )
        else:
            check_address(address, keys)


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise AddressError(f"{address!r} has no name and port; give {address.partition(':')[0]}://NAME:PORT")
    return host, port


def _check_service(address: str, keys: ClientKeys | None) -> None:
    """Raise `AddressError` unless this is the address of one service, with keys if it is one of TCP."""
    if socket_path(address) is None:
        _host_and_port(address)
        if keys is None:
            check_address(address, keys)  # raises


def _checked(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses without duplicates; raise `AddressError` if there are none, or far too many."""
    found = tuple(dict.fromkeys(addresses))
    if not found:
        raise AddressError("no service is named")
    if len(found) > _MAX_KNOWN:
        raise AddressError(f"{len(found)} services are named; at most {_MAX_KNOWN} are possible")
    return found


def rendezvous_order(addresses: Iterable[str], key: bytes) -> list[str]:
    """Return the addresses in an order that depends on the key. Without one of them, the others keep their order."""
    return sorted(addresses, key=lambda one: hashlib.blake2b(one.encode(), key=key, digest_size=8).digest())


def selection_key(identity: bytes) -> bytes:
    """Return the key of the order in which a client with this identity prefers services."""
    return hashlib.blake2b(identity, person=b"services", digest_size=16).digest()


class AddressWatch:
    """Knows the services that a list of addresses stands for, in the rendezvous order of one client.

    `known` is replaced as a whole when the set changes. Each source has a thread, so that a name that takes long to
    resolve does not hold up the others. What cannot be read keeps its last services, which is logged once.
    """

    def __init__(self, addresses: Sequence[str], identity: bytes, keys: ClientKeys | None = None) -> None:
        check_addresses(addresses, keys)
        self.sources = [make_source(address, keys) for address in addresses if is_watched(address)]
        self._key = selection_key(identity)
        self._found: dict[str, tuple[str, ...]] = {
            address: () if is_watched(address) else (address,) for address in addresses
        }
        self._failing: set[str] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.known = self._ranked()

    def start(self) -> None:
        """Start to watch the sources, each on a thread of its own."""
        for source in self.sources:
            threading.Thread(target=self._watch, args=(source,), name="specbranch-discovery", daemon=True).start()

    def close(self) -> None:
        """Let the threads end; do not wait for them, as one may wait for a name."""
        self._closed.set()

    def refresh(self, source: AddressSource) -> float:
        """Read a source, update `known` if its services have changed, and return the seconds until its next turn."""
        try:
            found = source.read()
        except (OSError, AddressError) as error:
            self._log_failure(source.address, error)
        else:
            if source.address in self._failing:
                self._failing.remove(source.address)
                log.info("%s names draft services again", source.address)
            if found is not None:
                self._replace(source.address, found)
        return source.interval_s if self._found[source.address] else min(source.interval_s, _UNRESOLVED_S)

    def _watch(self, source: AddressSource) -> None:
        pause_s = 0.0
        while not self._closed.wait(pause_s):
            try:
                pause_s = self.refresh(source)
            except Exception:
                pause_s = source.interval_s
                log.exception("%s could not be read; its draft services stay as they are", source.address)

    def _replace(self, name: str, found: tuple[str, ...]) -> None:
        before = self._found[name]
        if set(before) == set(found):
            return
        num_new, num_gone = len(set(found) - set(before)), len(set(before) - set(found))
        log.info("%s names %d draft services: %d new, %d gone", name, len(found), num_new, num_gone)
        with self._lock:
            self._found[name] = found
            self.known = self._ranked()

    def _ranked(self) -> tuple[str, ...]:
        every = dict.fromkeys(address for found in self._found.values() for address in found)
        return tuple(rendezvous_order(every, self._key))

    def _log_failure(self, name: str, error: Exception) -> None:
        if name in self._failing:
            return
        self._failing.add(name)
        kept = len(self._found[name])
        rest = f"the last {kept} draft services stay in use" if kept else "vLLM runs without these draft services"
        log.warning("%s cannot be used: %s; %s, and it is tried again. Logged once", name, error, rest)


class Health(Enum):
    """The state of a service that a client is connected to."""

    UP = "up"
    DRAINING = "draining"  # it finishes its sequences and accepts no new ones
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class SelectionChange:
    """The services to connect to in the background, and the services whose connections to close."""

    connect: tuple[str, ...] = ()
    close: tuple[str, ...] = ()


@dataclass(slots=True)
class _Failure:
    """When a service may be tried again, and the pause after its next failure."""

    until_s: float
    pause_s: float


class ServiceSelection:
    """Chooses the services of one client: the first `max_services` usable ones in its rendezvous order.

    A service that cannot be used gives its place to the next one. It is tried again after a pause, and gets its place
    back once it has answered. The service that loses the place finishes its sequences first (`retiring`), and so does
    one that is draining. While there are no more services than places, no connection is closed.
    """

    def __init__(self, max_services: int = MAX_SERVICES) -> None:
        self._max_services = max_services
        self._ranks: dict[str, int] = {}
        self._trying: set[str] = set()
        self._failures: dict[str, _Failure] = {}
        self.retiring: frozenset[str] = frozenset()

    def set_known(self, ranked: Sequence[str]) -> None:
        """Replace the known services, which are in the rendezvous order of the client."""
        self._ranks = {address: rank for rank, address in enumerate(ranked)}
        self._failures = {address: one for address, one in self._failures.items() if address in self._ranks}

    def finish_attempt(self, address: str, is_connected: bool, now_s: float) -> None:
        """Record how an attempt to connect has ended."""
        self._trying.discard(address)
        if is_connected:
            self._failures.pop(address, None)
        else:
            self._pause(address, now_s)

    def update(self, health: Mapping[str, Health], idle: Collection[str], now_s: float) -> SelectionChange:
        """Return what to connect to and what to close, given the health of all connected services.

        `idle` names the services that have had no sequence of the client in the last steps.
        """
        known = sorted((address for address in health if address in self._ranks), key=self._ranks.__getitem__)
        up = [address for address in known if health[address] is Health.UP]
        surplus = up[self._max_services :]
        close = [address for address in health if address not in self._ranks]
        close += [one for number, one in enumerate(surplus) if one in idle or number >= self._max_services]
        if len(up) >= self._max_services:
            replaced = [
                address
                for address in known
                if health[address] is Health.DOWN or (health[address] is Health.DRAINING and address in idle)
            ]
            for address in replaced:
                self._pause(address, now_s)
            close += replaced
        self.retiring = frozenset(surplus).difference(close)
        return SelectionChange(self._missing(health, now_s), tuple(close))

    def _missing(self, health: Mapping[str, Health], now_s: float) -> tuple[str, ...]:
        """Return the services to connect to: those that are not connected and rank before the last place.

        Attempts count as successful until they have ended, so there are no more attempts than places.
        """
        missing: list[str] = []
        num_places = 0
        for address in self._ranks:
            if num_places >= self._max_services:
                break
            if address in health:
                num_places += health[address] is Health.UP
            elif address in self._trying:
                num_places += 1
            elif self._may_try(address, now_s):
                num_places += 1
                missing.append(address)
        self._trying.update(missing)
        return tuple(missing)

    def _may_try(self, address: str, now_s: float) -> bool:
        failure = self._failures.get(address)
        return failure is None or now_s >= failure.until_s

    def _pause(self, address: str, now_s: float) -> None:
        known = self._failures.get(address)
        pause_s = _PAUSE_S if known is None else known.pause_s
        if address in self._ranks:
            self._failures[address] = _Failure(now_s + pause_s, min(2 * pause_s, _MAX_PAUSE_S))
