"""A draft service that runs already, on this machine or on another: `--draft-address` and `--draft-keys`."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from specbranch.cli.console import UsageError
from specbranch.plugins.vllm.settings import client_keys
from specbranch.service.client import ClientOptions, DraftClient
from specbranch.service.endpoint import check_reachable
from specbranch.service.wire import Welcome

_ANSWER_S = 2.0
_CONNECT_S = 1.0


@dataclass(frozen=True, slots=True)
class RemoteDraft:
    """Where it listens, and the directory of the keys, which TCP needs."""

    address: str
    keys: Path | None = None

    @property
    def section(self) -> dict[str, str]:
        """The proposer's settings that lead to it."""
        keys = {"keys": str(self.keys.absolute())} if self.keys else {}
        return {"address": self.address, **keys}

    def check(self) -> Welcome | None:
        """What the service says of itself; None if it does not run now. Raises if it does not let us in."""
        keys = client_keys(str(self.keys) if self.keys else None)
        check_reachable(self.address, keys)
        with contextlib.closing(DraftClient(ClientOptions(self.address, keys=keys))) as client:
            welcome = client.hello(_ANSWER_S)
        if welcome is None and self._is_somebody_there():
            cause = "or it does not know these keys" if self.keys else "or it is none"
            raise UsageError(
                f"--draft-address is {self.address}: somebody listens there and does not answer us. Either it is a "
                f"draft service of another version, {cause}; `specbranch keys` says which file goes where"
            )
        return welcome

    def _is_somebody_there(self) -> bool:
        parts = urlsplit(self.address)
        try:
            if parts.scheme == "tcp":
                socket.create_connection((parts.hostname, parts.port), _CONNECT_S).close()
            else:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(_CONNECT_S)
                    probe.connect(self.address.removeprefix("ipc://"))
        except (OSError, ValueError):
            return False
        return True
