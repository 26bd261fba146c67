"""Frames: what is taken, what is refused, and that nothing else can happen."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from specbranch.engines.vocabulary import MAX_SAMPLE
from specbranch.service.wire.messages import (
    MAX_FRAME,
    MAX_NEW,
    MAX_REPLY,
    MAX_ROWS,
    MAX_SEQUENCE,
    OLDEST_VERSION,
    VERSION,
    DraftReply,
    Drain,
    Draining,
    ErrorReply,
    FrameError,
    Hello,
    OpenSequences,
    OtherRows,
    Overview,
    OverviewRequest,
    PrefetchPush,
    PrefetchRow,
    Reply,
    Request,
    Rest,
    StatsReply,
    StatsRequest,
    StepRequest,
    StepRow,
    VerdictDraft,
    Welcome,
    WireHint,
    WireSampling,
    decode_reply,
    decode_request,
    encode,
    pack_tokens,
    unpack_tokens,
)
from specbranch.service.wire.payloads import Digest

NAME = Digest([1, 2, 3]).name


def stats_reply(*values: int) -> StatsReply:
    """Stats with these values in the order of the wire."""
    return StatsReply(**dict(zip(StatsReply.__struct_fields__, values, strict=True)))


REQUESTS: list[Request] = [
    Hello(VERSION, 7),
    Hello(VERSION, 7, OLDEST_VERSION),
    StepRequest(8, b"ours", 12.5, [StepRow(NAME, [4, 5], Digest([1, 2, 3, 4, 5]).name, 2)]),
    StepRequest(9, b"x" * 64, 0.0, [StepRow(NAME, [70_000], NAME, 0)] * 3),
    StepRequest(10, b"ours", 1.0, [StepRow(NAME, [4], NAME, 0, WireHint(2)), StepRow(NAME, [4], NAME, 0)]),
    StepRequest(11, b"ours", 0.0, [StepRow(NAME, [4], NAME, 0, None, None, WireSampling(0.7, 0.9, 20, 5))]),
    StepRequest(11, b"ours", 0.0, [StepRow(NAME, [4], NAME, 0, None, [5, 6]), StepRow(NAME, [4], NAME, 0, None, [])]),
    StepRequest(12, b"ours", 0.0, [StepRow(NAME, [4], NAME, 0, None, None, None, 3)]),
    StepRequest(12, b"ours", 0.0, [StepRow(NAME, [4], NAME, 0, has_recurring_noise=True)]),
    OpenSequences(
        b"ours",
        "specbranch",
        {"gamma": 4, "confidence": 0.3, "fallback": "jit", "x": True},
        "confidence",
        [pack_tokens([1, 2, 3])],
    ),
    StepRequest(12, b"ours", 0.0, [StepRow(NAME, [4], NAME, 0)], 9000, OtherRows(3, 12, 5)),
    Drain(13),
    Drain(14, False),
    Rest(b"ours"),
    StatsRequest(10, b"ours"),
    OverviewRequest(11),
]
REPLIES: list[Reply] = [
    Welcome(VERSION, 7, "model", 49152),
    Welcome(VERSION, 7, "model", 49152, bytes(range(8))),
    Welcome(VERSION, 7, "model", 49152, b"\xff" * MAX_SAMPLE),
    Welcome(VERSION, 7, "model", 49152, b"", True),
    Draining(0, True, 5),
    DraftReply(8, [[1, 2, 3], None, []]),
    DraftReply(8, [[1, 2], []], [b"\x01\x00" + bytes(8), b""]),
    PrefetchPush(
        [PrefetchRow(NAME, [VerdictDraft([4, 5], [6]), VerdictDraft([7], []), VerdictDraft([8], [9], bytes(9))])]
    ),
    ErrorReply("because"),
    stats_reply(10, 3, 900, 800, 4000, 3500, 9000, 500, 1 << 61, 0, 70_000, 15_000, 3, 2, 1),
    Overview(11, {"model": "m" * 256, "wire": VERSION}, {"hits": 5.0, "rolled_back_tokens/cut": 0.5}),
]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_a_request_survives_the_wire(message: Request) -> None:
    assert decode_request(encode(message)) == message


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_a_reply_survives_the_wire(message: Reply) -> None:
    assert decode_reply(encode(message)) == message


def test_a_reply_is_no_request() -> None:
    with pytest.raises(FrameError):
        decode_request(encode(REPLIES[0]))


@pytest.mark.parametrize(
    "message",
    [
        StepRequest(-1, b"ours", 1.0, [StepRow(NAME, [4], NAME, 0)]),
        StepRequest(1, b"", 1.0, [StepRow(NAME, [4], NAME, 0)]),
        StepRequest(1, b"ours", -1.0, [StepRow(NAME, [4], NAME, 0)]),
        StepRequest(1, b"ours", float("nan"), [StepRow(NAME, [4], NAME, 0)]),
        StepRequest(1, b"ours", 1.0, []),
        StepRequest(1, b"ours", 1.0, [StepRow(NAME, [4], NAME, 0)] * 1025),
        StepRequest(1, b"ours", 1.0, [StepRow(b"short", [4], NAME, 0)]),
        StepRequest(1, b"ours", 1.0, [StepRow(NAME, [], NAME, 0)]),
        StepRequest(1, b"ours", 1.0, [StepRow(NAME, [-4], NAME, 0)]),
        StepRequest(1, b"ours", 1.0, [StepRow(NAME, [1 << 31], NAME, 0)]),
        StepRequest(1, b"ours", 1.0, [StepRow(NAME, [4], NAME, 0, WireHint(-1))]),
        StepRequest(1, b"ours", 1.0, [StepRow(NAME, [4], NAME, 0, WireHint(3))]),
        *(
            StepRequest(1, b"ours", 1.0, [StepRow(NAME, [4], NAME, 0, None, None, WireSampling(*wrong))])
            for wrong in (
                (0.0, 1.0, 0, 1),
                (float("nan"), 1.0, 0, 1),
                (1.0, 0.0, 0, 1),
                (1.0, 1.5, 0, 1),
                (1.0, 1.0, -1, 1),
                (1.0, 1.0, 0, -1),
                (1.0, 1.0, 0, 1 << 62),
            )
        ),
        OpenSequences(b"ours", "p" * 65, {}, "confidence", [pack_tokens([1])]),
        OpenSequences(b"ours", "pearl", {str(i): i for i in range(17)}, "confidence", [pack_tokens([1])]),
        OpenSequences(b"ours", "pearl", {}, "confidence", [b""]),
        OpenSequences(b"ours", "pearl", {}, "confidence", [pack_tokens([1] * (MAX_SEQUENCE + 1))]),
        StepRequest(1, b"ours", 1.0, [StepRow(NAME, [4], NAME, 0)], 0, OtherRows(-1, 0, 0)),
        Drain(-1),
        StatsRequest(-1, b"ours"),
        StatsRequest(1, b""),
        StatsRequest(1, b"x" * 65),
    ],
    ids=range(28),
)
def test_what_is_out_of_bounds_is_refused(message: Request) -> None:
    with pytest.raises(FrameError):
        decode_request(encode(message))


@pytest.mark.parametrize(
    "message",
    [
        DraftReply(1, [[-1]]),
        DraftReply(1, [[1 << 31]]),
        DraftReply(1, [[1] * (MAX_NEW + 1)]),
        DraftReply(1, [None] * (MAX_ROWS + 1)),
        Welcome(VERSION, 7, "model", 0),
        Welcome(VERSION, 7, "model", 5, bytes(MAX_SAMPLE + 4)),
        Overview(1, {"model": "m" * 257}, {}),
        Overview(1, {"wire": -1}, {}),
        Overview(1, {}, {"hits": -1.0}),
        Overview(1, {}, {"hits": float("nan")}),
        Overview(1, {}, {"hits": float("inf")}),
        Overview(1, {}, {str(number): 1.0 for number in range(129)}),
    ],
    ids=range(12),
)
def test_a_reply_out_of_bounds_is_refused(message: Reply) -> None:
    with pytest.raises(FrameError):
        decode_reply(encode(message))


@pytest.mark.parametrize(
    "text", [pack_tokens([1, 2])[:-1], pack_tokens([1, -1, 2])], ids=["part of a token", "negative"]
)
def test_a_text_that_is_no_sequence_of_tokens_is_refused(text: bytes) -> None:
    frame = msgspec.msgpack.encode(["open", b"ours", "pearl", {}, "confidence", [pack_tokens([1]), text]])

    with pytest.raises(FrameError, match="not a sequence of tokens"):
        decode_request(frame)


def test_a_sample_that_is_no_sequence_of_hashes_is_refused() -> None:
    frame = msgspec.msgpack.encode(["welcome", VERSION, 7, "model", 5, bytes(7)])

    with pytest.raises(FrameError, match="not a sample"):
        decode_reply(frame)


def test_a_text_survives_the_wire_also_from_an_array_of_another_kind() -> None:
    tokens = [0, 7, 70_000, (1 << 31) - 1]

    assert pack_tokens(np.array(tokens, dtype=">i8")) == pack_tokens(tokens)
    assert unpack_tokens(pack_tokens(tokens)).tolist() == tokens


def test_a_row_without_an_outlook_costs_one_byte() -> None:
    told, untold = StepRow(NAME, [4], NAME, 0, WireHint(1)), StepRow(NAME, [4], NAME, 0)
    frames = [encode(StepRequest(1, b"ours", 1.0, [row])) for row in (told, untold)]

    # No hint, nothing taken, not sampled, of any length, new noise, and of the step no time and nothing beside it.
    assert frames[1].endswith(b"\xc0\xc0\xc0\xc0\xc2\x00\xc0")
    assert len(frames[0]) - len(frames[1]) == 1


def test_a_row_of_the_first_version_is_still_understood() -> None:
    """It ended with the submission. Its sender is told to update by `Hello`, and is not misread meanwhile."""
    frame = encode(StepRequest(1, b"ours", 1.0, [StepRow(NAME, [4], NAME, 3)]))
    place = frame.index(b"\x99\xc4")  # an array of nine, a name of bytes

    old = decode_request(frame[:place] + b"\x94" + frame[place + 1 : -7] + frame[-2:])

    assert old == StepRequest(1, b"ours", 1.0, [StepRow(NAME, [4], NAME, 3)])


@pytest.mark.parametrize("value", [-1, 1 << 62, 0.5, "many", None])
@pytest.mark.parametrize("position", range(15))
def test_stats_out_of_bounds_are_refused(position: int, value: Any) -> None:
    values = [1] * 15
    values[position] = value

    with pytest.raises(FrameError):
        decode_reply(encode(stats_reply(*values)))


def test_a_frame_too_long_is_refused_unread() -> None:
    with pytest.raises(FrameError, match="too long; the limit is"):
        decode_request(b"\x00" * (MAX_FRAME + 1))
    with pytest.raises(FrameError, match="too long; the limit is"):
        decode_reply(b"\x00" * (MAX_REPLY + 1))


def mutate(frame: bytes, rng: random.Random) -> bytes:
    """A valid frame with a few bytes changed, dropped, doubled or added."""
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        place = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[place] = rng.randrange(256)
        elif kind == 1:
            del data[place : place + rng.choice((1, 2, 8))]
        elif kind == 2:
            data[place:place] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 4))))
        elif kind == 3:
            data[place:place] = data[place : place + 16]
        else:
            del data[place:]
    return bytes(data)


def test_a_million_mutated_frames_are_taken_or_refused_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(1)
    frames = [encode(message) for message in REQUESTS]
    counts = {"taken": 0, "refused": 0}
    start_s = time.monotonic()
    for number in range(1_000_000):
        frame = mutate(frames[number % len(frames)], rng)
        try:
            message = decode_request(frame)
        except FrameError:
            counts["refused"] += 1
        else:
            counts["taken"] += 1
            assert isinstance(message, Request)

    with capsys.disabled():
        print(f"\n1,000,000 mutated frames in {time.monotonic() - start_s:.0f} s: {counts}")
    assert counts["taken"] > 10_000
    assert counts["refused"] > 100_000


def test_mutated_replies_are_taken_or_refused_and_nothing_else() -> None:
    rng = random.Random(2)
    frames = [encode(message) for message in REPLIES]
    counts = {"taken": 0, "refused": 0}
    for number in range(100_000):
        try:
            message = decode_reply(mutate(frames[number % len(frames)], rng))
        except FrameError:
            counts["refused"] += 1
        else:
            counts["taken"] += 1
            assert isinstance(message, Reply)

    assert counts["taken"] > 1_000
    assert counts["refused"] > 10_000
