"""Draft services that run already, on this machine or on another: `--draft-address` and `--draft-keys`."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specbranch.errors import UsageError
from specbranch.service.client.client import DraftClient
from specbranch.service.client.interface import ClientOptions, client_keys
from specbranch.service.wire.addresses import check_reachable
from specbranch.service.wire.messages import Welcome

_ANSWER_S = 2.0
_CONNECT_S = 1.0
_GREETING = b"\xff"  # the first byte that ZeroMQ sends


@dataclass(frozen=True, slots=True)
class RemoteDraft:
    """Where they listen, and the directory of the keys, which TCP needs."""

    addresses: tuple[str, ...]
    keys: Path | None = None

    @property
    def section(self) -> dict[str, Any]:
        """The proposer's settings that lead to them."""
        keys = {"keys": str(self.keys.absolute())} if self.keys else {}
        address = self.addresses[0] if len(self.addresses) == 1 else list(self.addresses)
        return {"address": address, **keys}

    def check(self) -> list[Welcome]:
        """What those that run now say of themselves. Raises if one does not let us in."""
        welcomes = [_ask(address, self.keys) for address in self.addresses]
        return [welcome for welcome in welcomes if welcome is not None]


@cache
def _ask(address: str, directory: Path | None) -> Welcome | None:
    keys = client_keys(str(directory) if directory else None)
    check_reachable(address, keys)
    with contextlib.closing(DraftClient(ClientOptions(address, keys=keys))) as client:
        welcome = client.hello(_ANSWER_S)
    cause = why_silent(address, directory) if welcome is None else None
    if cause is not None:
        raise UsageError(cause)
    return welcome


def why_silent(address: str, keys: Path | None) -> str | None:
    """Why somebody who listens does not answer; None if nobody listens."""
    if not _speaks(address):
        return None
    cause = "or it does not know these keys" if keys else "or it is none"
    return (
        f"somebody listens at {address} and does not answer us. Either it is a draft service of another version, "
        f"{cause}; `specbranch keys` says which file goes where"
    )


def _speaks(address: str) -> bool:
    """Whether a live service of ZeroMQ is there: it greets whoever connects. A proxy without a service does not."""
    parts = urlsplit(address)
    try:
        if parts.scheme == "tcp":
            with socket.create_connection((parts.hostname, parts.port), _CONNECT_S) as probe:
                return probe.recv(1) == _GREETING
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_CONNECT_S)
            probe.connect(address.removeprefix("ipc://"))
            return probe.recv(1) == _GREETING
    except (OSError, ValueError):
        return False
