"""Addresses of draft services, and the keys of services and clients.

By default a service listens at a Unix socket with owner-only rights. TCP needs CURVE keys on both sides; without them
it is refused.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

from specbranch.errors import SpecBranchError
from specbranch.private_files import DirectoryError, can_hold_sockets, runtime_directory

LINGER_MS = 0
# A network that fails does not close connections: a connection without a sign of life for `_DEAD_MS` is made anew.
_BEAT_MS, _DEAD_MS = 1000, 4000


class AddressError(SpecBranchError, RuntimeError):
    """An address or a key that cannot be used; the message says why and how to fix it."""


@dataclass(frozen=True, slots=True)
class ServiceKeys:
    """The service's secret key file, and the directory with the public keys of its clients."""

    secret: Path
    clients: Path

    def owner(self) -> bytes | None:
        """Return the public key that `make_keys` made for a client; None if `clients` has no such key."""
        with contextlib.suppress(OSError, ValueError):
            return zmq.auth.load_certificate(self.clients / "client.key")[0]
        return None


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A client's secret key file, and the service's public key file."""

    secret: Path
    service: Path


def default_address() -> str:
    """Return the address of a Unix socket that only this user can reach."""
    return f"ipc://{runtime_directory()}/specbranch-draft.sock"


def normalize_addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return one address or several as a tuple without duplicates; raise `AddressError` for anything else."""
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, Sequence) or not listed or not all(isinstance(one, str) for one in listed):
        raise AddressError(f"{given!r} is no address of a draft service, nor a list of addresses")
    return tuple(dict.fromkeys(listed))


def make_keys(directory: Path) -> list[Path]:
    """Write key pairs for a service and for a client, and return the files. Only the owner may read secret keys.

    If one of the files exists, raise `AddressError` and change nothing.
    """
    files = [directory / name for name in ("service.key", "service.key_secret", "client.key", "client.key_secret")]
    copy = directory / "clients" / "client.key"
    for path in (*files, copy):
        if os.path.lexists(path):
            raise _exists(path)
    copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".new-") as fresh:
        for name in ("service", "client"):
            zmq.auth.create_certificates(fresh, name)
        contents = {path: (Path(fresh) / path.name).read_bytes() for path in (*files, copy)}
    _write_new(contents)
    return files


def _write_new(contents: Mapping[Path, bytes]) -> None:
    """Write all of these files; if one of them exists or cannot be written, write none and raise."""
    with contextlib.ExitStack() as undone:
        for path, content in contents.items():
            mode = 0o600 if path.suffix == ".key_secret" else 0o644
            try:
                number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            except FileExistsError as error:
                raise _exists(path) from error
            undone.callback(path.unlink, missing_ok=True)
            with os.fdopen(number, "wb") as file:
                file.write(content)
        undone.pop_all()


def _exists(path: Path) -> AddressError:
    return AddressError(
        f"{path} exists already, so nothing was written: new keys would lock out every target that has the old ones; "
        "name another directory, or first delete the keys in this one yourself"
    )


def check_address(address: str, keys: ClientKeys | None = None) -> None:
    """Raise `AddressError` unless this is an ipc:// address, or a tcp:// address with keys that can be loaded."""
    if socket_path(address) is None:
        _curve_keys(address, keys)


def _curve_keys(address: str, keys: ClientKeys | None) -> tuple[bytes, bytes, bytes]:
    """Return a client's public and secret key, and the service's public key."""
    if keys is None:
        raise AddressError(f"{address}: TCP needs CURVE keys on both sides; make them with `specbranch keys DIR`")
    public, secret = load_key(keys.secret)
    try:
        service, _ = zmq.auth.load_certificate(keys.service)
    except (OSError, ValueError) as error:
        raise AddressError(f"{keys.service} cannot be read as a key: {error}") from error
    return public, secret, service


def socket_path(address: str) -> Path | None:
    """Return the socket's path in a Unix address, None for TCP; raise `AddressError` for any other address."""
    if address.startswith("ipc://") and len(address) > len("ipc://"):
        return Path(address.removeprefix("ipc://"))
    if address.startswith("tcp://"):
        return None
    raise AddressError(f"{address!r} is no address; give ipc://PATH, or tcp://HOST:PORT with keys")


def is_trusted_socket(path: Path) -> bool:
    """Return whether a socket's directory exists; raise `AddressError` if another user could make the socket in it."""
    try:
        return can_hold_sockets(path)
    except DirectoryError as error:
        raise AddressError(str(error)) from error


def load_key(path: Path) -> tuple[bytes, bytes]:
    """Read a key file, and return its public and its secret key; raise `AddressError` if it does not hold both."""
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise AddressError(f"{path} cannot be read as a key: {error}") from error
    if secret is None:
        raise AddressError(f"{path} holds no secret key; name the file that ends in .key_secret")
    return public, secret
