"""Something at a service's address that is no good service, as a process. What it does is its first argument."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from specbranch.core.round import MAX_WINDOW
from specbranch.service.wire.messages import (
    MAX_REPLY,
    VERSION,
    DraftReply,
    Drain,
    ErrorReply,
    Hello,
    OpenSequences,
    OverviewRequest,
    Rest,
    StatsRequest,
    StepRequest,
    Welcome,
    decode_request,
    encode,
)
from tests.service.harness import Service, running

FOREIGN = 49_200  # beyond the vocabulary of every target here
FLOOD_S = 1.0

Frames = Iterator[bytes]
Question = StepRequest | Drain | StatsRequest | OverviewRequest
_numbers = itertools.count()  # of the questions that came


def _foreign(question: Question) -> Frames:
    """Drafts with a token that the target does not have."""
    yield encode(DraftReply(question.round, [[5, FOREIGN, 6]] * _num_rows(question)))


def _garbage(question: Question) -> Frames:
    """For every question a second of frames that say nothing."""
    end_s = time.monotonic() + FLOOD_S
    while time.monotonic() < end_s:
        yield b"\xc1" * 32


def _late(question: Question) -> Frames:
    """For every question a second of answers to the one before."""
    answer = encode(DraftReply(question.round - 1, [[5] * MAX_WINDOW] * 200))
    end_s = time.monotonic() + FLOOD_S
    while time.monotonic() < end_s:
        yield answer


def _huge(question: Question) -> Frames:
    """First a frame beyond the bound, then good answers."""
    if next(_numbers) == 0:
        yield b"\xc1" * (MAX_REPLY + 1)
    else:
        yield encode(DraftReply(question.round, [[5]] * _num_rows(question)))


def _unknown(question: Question) -> Frames:
    """No text is known, however often it was sent."""
    yield encode(DraftReply(question.round, [None] * _num_rows(question)))


def _old(question: Question) -> Frames:
    """What a service of an older release says to a question that it does not know."""
    yield encode(ErrorReply("Invalid value 'get-overview'"))


_DEEDS: dict[str, Callable[[Question], Frames]] = {
    "foreign": _foreign,
    "garbage": _garbage,
    "late": _late,
    "huge": _huge,
    "unknown": _unknown,
    "old": _old,
}


def _num_rows(question: Question) -> int:
    return len(question.rows) if isinstance(question, StepRequest) else 1


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
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # to learn who is gone
    router.bind(args.listen)
    streams: dict[bytes, Frames] = {}
    while True:
        if router.poll(0 if streams else None):
            client, frame = router.recv_multipart()
            request = decode_request(frame)
            if isinstance(request, Hello):
                router.send_multipart((client, encode(Welcome(VERSION, request.round, "rogue", FOREIGN + 1))))
            elif not isinstance(request, OpenSequences | Rest):
                streams[client] = _DEEDS[args.deed](request)
        for client, stream in list(streams.items()):
            if not _send_on(router, client, stream):
                del streams[client]


def _send_on(router: zmq.Socket[bytes], client: bytes, stream: Frames) -> bool:
    """Send the next frame; False if there is none, or nobody to take it."""
    for frame in stream:
        try:
            router.send_multipart((client, frame), zmq.NOBLOCK)
        except zmq.Again:
            return True  # it is slow; this one is left out
        except zmq.ZMQError:
            return False
        return True
    return False


if __name__ == "__main__":
    main()
