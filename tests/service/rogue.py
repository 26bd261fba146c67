"""Something at a service's address that is no good service, as a process. What it does is its first argument."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from specbranch.service.wire import VERSION, Hello, Proposals, Step, Welcome, decode_request, encode
from tests.service.harness import Service, running

FOREIGN = 49_200  # beyond the vocabulary of every target here


def _foreign(step: Step) -> bytes:
    """Drafts with a token that the target does not have."""
    return encode(Proposals(step.round, [[5, FOREIGN, 6]] * len(step.rows)))


_DEEDS: dict[str, Callable[[Step], bytes]] = {"foreign": _foreign}


@contextlib.contextmanager
def rogue(directory: Path, deed: str) -> Iterator[Service]:
    """A running one, which answers greetings like a service."""
    address = f"ipc://{directory}/rogue.sock"
    with running(Service([sys.executable, "-m", "tests.service.rogue", deed, "--listen", address], address)) as service:
        yield service


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("deed", choices=_DEEDS)
    parser.add_argument("--listen", required=True)
    args = parser.parse_args()
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(args.listen)
    while True:
        client, frame = router.recv_multipart()
        request = decode_request(frame)
        if isinstance(request, Hello):
            router.send_multipart((client, encode(Welcome(VERSION, request.round, "rogue", FOREIGN + 1))))
        elif isinstance(request, Step):
            router.send_multipart((client, _DEEDS[args.deed](request)))


if __name__ == "__main__":
    main()
