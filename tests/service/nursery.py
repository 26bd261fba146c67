"""A process that has imported what test services need, and forks itself for each of them.

To import it all takes longer than most tests, and much longer on a busy machine; a fork takes milliseconds. A forked
service has the arguments, the environment and the output that a new process would have had.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from tests.root import ROOT

MODULES = ("tests.service.scripted_service", "tests.service.rogue")

_lock = threading.Lock()
_nursery: socket.socket | None = None


class Forked:
    """A service that runs in a fork; like `subprocess.Popen`, as far as tests need it."""

    def __init__(self, module: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self._line, theirs = socket.socketpair()
        request = json.dumps({"module": module, "arguments": list(arguments), "environment": environment}).encode()
        with theirs, _lock:
            socket.send_fds(_running_nursery(), [len(request).to_bytes(4, "big")], [theirs.fileno(), 1, 2])
            _running_nursery().sendall(request)
        self.pid = self._receive()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            self.returncode = self._receive()
            self._line.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._line], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked service", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def __del__(self) -> None:
        self._line.close()

    def _receive(self) -> int:
        data = self._line.recv(8, socket.MSG_WAITALL)
        assert data, "the nursery of test services has ended"
        return int.from_bytes(data, "big", signed=True)


def _running_nursery() -> socket.socket:
    """The line to the nursery of this process, which is started when it is first needed and ends with this process."""
    global _nursery
    if _nursery is None:
        _nursery, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "tests.service.nursery", str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            ).returncode = 0  # nobody waits for it
    return _nursery


def _serve(line: socket.socket) -> dict[str, object] | None:
    """Fork for every request. Returns the request in a fork, and None when nobody can ask any more."""
    children: dict[int, socket.socket] = {}
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([line.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _report(children)
        if line.fileno() not in ready:
            continue
        head, descriptors, _, _ = socket.recv_fds(line, 4, 3)
        if not head:
            return None
        request: dict[str, object] = json.loads(line.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        client = socket.socket(fileno=descriptors[0])
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, descriptor in enumerate(descriptors[1:], start=1):
                os.dup2(descriptor, number)
            for one in (line, client, *children.values()):
                one.close()
            for descriptor in (woken, wakes, *descriptors[1:]):
                os.close(descriptor)
            return request
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        children[child] = client
        _send(client, child)


def _report(children: dict[int, socket.socket]) -> None:
    """Tell the codes of children that have ended to who started them."""
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        with children.pop(child) as client:
            _send(client, os.waitstatus_to_exitcode(status))


def _send(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody cares any more
        client.sendall(number.to_bytes(8, "big", signed=True))


def main() -> None:
    modules = {name: importlib.import_module(name) for name in MODULES}
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        name, arguments, environment = (request[key] for key in ("module", "arguments", "environment"))
        assert isinstance(name, str) and isinstance(arguments, list) and isinstance(environment, dict)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [name, *arguments]
        modules[name].main()


if __name__ == "__main__":
    main()
