"""What crosses the wire: small, versioned, bounded messages of token ids. MessagePack by msgspec; never pickle.

A sequence is named by its digest. A namespace keeps one client's sequences apart from another's; it is random unless
two clients were given the same one on purpose. Every exchange carries the client's round number, so a late reply can be
told from the one awaited.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct

from specbranch.core.round import MAX_WINDOW
from specbranch.engines.vocabulary import HASH_LEN, MAX_SAMPLE
from specbranch.errors import SpecBranchError
from specbranch.service.wire.payloads import DIGEST_LEN

VERSION = 11
MAX_FRAME = 1 << 20  # bytes
MAX_REPLY = 1 << 20  # bytes, enough for windows of 64 tokens in 1024 rows three times over, without probabilities
MAX_ROWS = 1024
MAX_SEQUENCE = 260_000  # tokens; a message that opens the longest one fits into a frame
MAX_NEW = 4096  # tokens committed in one step
MAX_OUTCOMES = 16  # verdicts that are answered ahead, for one sequence
MAX_WAIT_MS = 60_000
MAX_AHEAD = 64  # sequences in one message of such answers

Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Round = Annotated[int, Meta(ge=0, lt=1 << 62)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Version = Annotated[int, Meta(ge=0, lt=1 << 16)]
SequenceId = Annotated[bytes, Meta(min_length=DIGEST_LEN, max_length=DIGEST_LEN)]
Namespace = Annotated[bytes, Meta(min_length=1, max_length=64)]
ShortString = Annotated[str, Meta(min_length=1, max_length=64)]
NewTokens = Annotated[list[Token], Meta(min_length=1, max_length=MAX_NEW)]
PackedTokens = Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_SEQUENCE)]  # see `pack`
Draft = Annotated[list[Token], Meta(max_length=MAX_WINDOW)]
Probs = Annotated[bytes, Meta(max_length=1 << 17)]  # see `draft_probs`
Setting = Annotated[str, Meta(max_length=64)] | int | float | bool
MetricValue = Annotated[float, Meta(ge=0, lt=1e18)]
MAX_STEP_US = 60_000_000  # a longer one teaches nothing
T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
Reason = Literal["too_long", "foreign_token", "no_room"]
REASONS: tuple[Reason, ...] = get_args(Reason)
PREFIX = "specbranch_draft_"


class FrameError(SpecBranchError, ValueError):
    """A frame that is not a message of this protocol."""


class Hello(Struct, tag="hello", array_like=True, frozen=True, forbid_unknown_fields=True):
    """Are you there, and is this what I think you are?"""

    version: Version
    round: Round


class Welcome(Struct, tag="welcome", array_like=True, frozen=True, forbid_unknown_fields=True):
    """The answer to `Hello`: the draft, the size of its vocabulary, and a sample of its tokens if they are known.

    `is_draining`: the service takes no new sequences.
    """

    version: Version
    round: Round
    model: Annotated[str, Meta(max_length=256)]
    vocab_len: Annotated[int, Meta(ge=1)]
    vocab_fingerprint: Annotated[bytes, Meta(max_length=MAX_SAMPLE)] = b""
    is_draining: bool = False

    def __post_init__(self) -> None:
        """What the types cannot say: a sample is whole hashes."""
        if len(self.vocab_fingerprint) % HASH_LEN:
            raise ValueError("not a sample of a vocabulary")


class WireHint(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What the target foresees for the next window."""

    signal: Annotated[int, Meta(ge=0, le=2)]


class WireSampling(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How the target samples a sequence, and the seed of its draft tokens (`core/distribution.py`)."""

    temperature: Annotated[float, Meta(gt=0, le=100)]
    top_p: Annotated[float, Meta(gt=0, le=1)]
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)]
    seed: Annotated[int, Meta(ge=0, lt=1 << 62)]


class StepRow(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One sequence of an engine step: the sequence before, the tokens just committed, and the sequence with them.

    `taken`: what was told ahead for this verdict, which the target verifies already; None asks for a proposal.
    `sampling`: draft tokens may be drawn by chance, and the target tests them by what they were drawn from (rule B).
    `longest`: the most tokens that may be proposed. `has_recurring_noise`: the random numbers that made the new tokens
    may come again, so no other sequence may learn from them (`Session.seclude`).
    """

    before: SequenceId
    tokens: NewTokens
    after: SequenceId
    num_submitted: Annotated[int, Meta(ge=0, le=MAX_NEW)]
    hint: WireHint | None = None
    prefetched: Draft | None = None
    sampling: WireSampling | None = None
    max_draft_tokens: Annotated[int, Meta(ge=0, le=MAX_NEW)] | None = None
    has_recurring_noise: bool = False


class OtherRows(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What an engine step verified beside the rows of a message, because it is drafted for by other services."""

    rows: Annotated[int, Meta(ge=0, lt=1 << 31)]
    submitted: Annotated[int, Meta(ge=0, lt=1 << 31)]
    committed: Annotated[int, Meta(ge=0, lt=1 << 31)]


class StepRequest(Struct, tag="step", array_like=True, frozen=True, forbid_unknown_fields=True):
    """One engine step, all its sequences in one message. The answer may take up to `wait_ms`.

    Where every row has taken what was told ahead, there is no answer.
    `step_us` is how long the step took, if it only decoded these rows and those `beside` them; 0 if nothing can be
    learned from it.
    """

    round: Round
    namespace: Namespace
    wait_ms: Annotated[float, Meta(ge=0, le=MAX_WAIT_MS)]
    rows: Annotated[list[StepRow], Meta(min_length=1, max_length=MAX_ROWS)]
    step_us: Annotated[int, Meta(ge=0, le=MAX_STEP_US)] = 0
    beside: OtherRows | None = None


class DraftReply(Struct, tag="proposals", array_like=True, frozen=True, forbid_unknown_fields=True):
    """What to submit for every row; None where the sequence is not known and must be opened.

    `probs`: what the tokens of each row were drawn from; empty if no row has any that were drawn.
    """

    round: Round
    rows: Annotated[list[Annotated[list[Token], Meta(max_length=MAX_NEW)] | None], Meta(max_length=MAX_ROWS)]
    probs: Annotated[list[Probs], Meta(max_length=MAX_ROWS)] = []


class VerdictDraft(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What to submit if the verdict that is awaited commits these tokens."""

    committed: Annotated[list[Token], Meta(min_length=1, max_length=MAX_WINDOW + 1)]
    proposal: Draft
    probs: Probs = b""


class PrefetchRow(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The likeliest verdicts on one sequence, by the name that it has before them."""

    before: SequenceId
    outcomes: Annotated[list[VerdictDraft], Meta(max_length=MAX_OUTCOMES)]


class PrefetchPush(Struct, tag="ahead", array_like=True, frozen=True, forbid_unknown_fields=True):
    """Answers to steps that were not sent yet. What was told before of the same sequences is no longer true."""

    rows: Annotated[list[PrefetchRow], Meta(min_length=1, max_length=MAX_AHEAD)]


class OpenSequences(Struct, tag="open", array_like=True, frozen=True, forbid_unknown_fields=True):
    """Whole sequences to draft for, and the planner that shall do it. There is no answer but `Draining`."""

    namespace: Namespace
    planner: ShortString
    settings: Annotated[dict[ShortString, Setting], Meta(max_length=16)]
    predictor: ShortString
    sequences: Annotated[list[PackedTokens], Meta(min_length=1, max_length=MAX_ROWS)]

    def __post_init__(self) -> None:
        """What the types cannot say: a sequence is whole tokens, none of them negative."""
        for packed in self.sequences:
            if len(packed) % 4 or (unpack_tokens(packed) < 0).any():
                raise ValueError("not a sequence of tokens")


class Drain(Struct, tag="drain", array_like=True, frozen=True, forbid_unknown_fields=True):
    """Go on with the sequences that you know and take no new ones; or, with `is_on` False, take them again."""

    round: Round
    is_on: bool = True


class Draining(Struct, tag="draining", array_like=True, frozen=True, forbid_unknown_fields=True):
    """The answer to `Drain`, and told to every client: whether new sequences are taken, and how many are in use.

    Who did not ask for it gets round 0.
    """

    round: Round
    is_on: bool
    sessions: Count


class ErrorReply(Struct, tag="refused", array_like=True, frozen=True, forbid_unknown_fields=True):
    """Why a message could not be served."""

    reason: Annotated[str, Meta(max_length=512)]


class StatsRequest(Struct, tag="get-stats", array_like=True, frozen=True, forbid_unknown_fields=True):
    """What has become of the drafts of this namespace?"""

    round: Round
    namespace: Namespace


class StatsReply(Struct, tag="stats", array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer to `StatsRequest`: sums over all sessions of the namespace since the service began.

    What a step of one row takes now, and each further row, is of the draft for whomever it works. The last three are
    texts that were not drafted for, by reason.
    """

    round: Round
    sessions: Count  # remembered now
    rounds: Count
    hits: Count
    submitted: Count
    accepted: Count
    rows: Count
    rejected: Count
    unused: Count
    cut: Count
    first_row_us: Count
    more_row_us: Count
    too_long: Count
    foreign_token: Count
    no_room: Count


class OverviewRequest(Struct, tag="get-overview", array_like=True, frozen=True, forbid_unknown_fields=True):
    """What are you, and what have you done so far?"""

    round: Round


class Overview(Struct, tag="overview", array_like=True, frozen=True, forbid_unknown_fields=True):
    """The answer to `OverviewRequest`: how the service was started, and sums over all its targets, whom it never names.

    Figures have the names of the service's metrics (`figures.py`), so that new ones need no new message.
    """

    round: Round
    settings: Annotated[dict[ShortString, Annotated[str, Meta(max_length=256)] | Count], Meta(max_length=64)]
    figures: Annotated[dict[ShortString, MetricValue], Meta(max_length=128)]


Request = Hello | StepRequest | OpenSequences | Drain | StatsRequest | OverviewRequest
Reply = Welcome | DraftReply | PrefetchPush | Draining | ErrorReply | StatsReply | Overview

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def pack_tokens(tokens: Sequence[int] | np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """A whole sequence for the wire: four bytes a token, little end first.

    A list would take a hundred times as long.
    """
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(packed: bytes) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The tokens of a sequence from the wire."""
    return np.frombuffer(packed, dtype="<i4")


def encode(message: Request | Reply) -> bytes:
    """A message as one frame."""
    return _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    """A client's message, or `FrameError`."""
    return _decode(_requests, frame, MAX_FRAME)


def decode_reply(frame: bytes) -> Reply:
    """The service's message, or `FrameError`."""
    return _decode(_replies, frame, MAX_REPLY)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes, max_len: int) -> T:
    if len(frame) > max_len:
        raise FrameError(f"a frame of {len(frame)} bytes; at most {max_len} are taken")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(str(error)) from error
