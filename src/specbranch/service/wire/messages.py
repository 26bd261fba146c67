"""The messages between clients and services: MessagePack of bounded size, with token ids and no text, versioned.

A digest identifies a sequence. A namespace separates one client's sequences from another's; it is random unless clients
share one on purpose. Every exchange carries the client's round number, which identifies a late reply.

Clients and services speak `VERSION` and the version before it (`OLDEST_VERSION`), so that they can be updated one by
one. The client's `Hello` names both; the service answers in the newest one that it speaks too, and each side writes in
that one from then on, until then in the oldest one. A new version may only append fields with defaults to a message, or
add messages. Then one decoder reads both versions, and `encode` leaves out what the peer does not know: such fields
are counted in `_NUM_FIELDS`. New messages, listed in `_UNKNOWN`, are not sent to an old peer (`knows`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct

from specbranch.core.round import MAX_WINDOW
from specbranch.engines.vocabulary import HASH_LEN, MAX_SAMPLE
from specbranch.errors import SpecBranchError
from specbranch.service.wire.payloads import DIGEST_LEN

VERSION = 13
OLDEST_VERSION = 12
MAX_FRAME = 1 << 20  # bytes
MAX_REPLY = 1 << 20  # bytes, enough for windows of 64 tokens in 1024 rows three times over, without probabilities
MAX_ROWS = 1024
MAX_SEQUENCE = 260_000  # tokens; a message that opens the longest one fits into a frame
MAX_NEW = 4096  # tokens committed in one step
MAX_OUTCOMES = 16  # verdicts with a prefetched draft, for one sequence
MAX_WAIT_MS = 60_000
MAX_AHEAD = 64  # sequences in one push

Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Round = Annotated[int, Meta(ge=0, lt=1 << 62)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Version = Annotated[int, Meta(ge=0, lt=1 << 16)]
SequenceId = Annotated[bytes, Meta(min_length=DIGEST_LEN, max_length=DIGEST_LEN)]
Namespace = Annotated[bytes, Meta(min_length=1, max_length=64)]
ShortString = Annotated[str, Meta(min_length=1, max_length=64)]
NewTokens = Annotated[list[Token], Meta(min_length=1, max_length=MAX_NEW)]
PackedTokens = Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_SEQUENCE)]  # see `pack_tokens`
Draft = Annotated[list[Token], Meta(max_length=MAX_WINDOW)]
Probs = Annotated[bytes, Meta(max_length=1 << 17)]  # see `pack_probs`
Setting = Annotated[str, Meta(max_length=64)] | int | float | bool
MetricValue = Annotated[float, Meta(ge=0, lt=1e18)]
MAX_STEP_US = 60_000_000  # clients do not report longer steps
T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
Reason = Literal["too_long", "foreign_token", "no_room"]
REASONS: tuple[Reason, ...] = get_args(Reason)
PREFIX = "specbranch_draft_"


class FrameError(SpecBranchError, ValueError):
    """A frame that is not a message of this protocol, or a message that the service must refuse."""


class Hello(Struct, tag="hello", array_like=True, frozen=True, forbid_unknown_fields=True):
    """Handshake: the newest and the oldest version of this protocol that the client speaks.

    `oldest` is None in version 12, whose clients speak no other one.
    """

    version: Version
    round: Round
    oldest: Version | None = None


class Welcome(Struct, tag="welcome", array_like=True, frozen=True, forbid_unknown_fields=True):
    """The reply to `Hello`: the draft model, its vocabulary's size, and hashes of some of its tokens if they are known.

    `version` is the newest one that both sides speak. `is_draining`: the service accepts no new sequences.
    """

    version: Version
    round: Round
    model: Annotated[str, Meta(max_length=256)]
    vocab_len: Annotated[int, Meta(ge=1)]
    vocab_fingerprint: Annotated[bytes, Meta(max_length=MAX_SAMPLE)] = b""
    is_draining: bool = False

    def __post_init__(self) -> None:
        """Raise `ValueError` unless the length of the vocabulary sample is a multiple of the hash length."""
        if len(self.vocab_fingerprint) % HASH_LEN:
            raise ValueError("not a sample of a vocabulary")


class WireHint(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A prediction of how many draft tokens of the next window the target accepts, as a `core.round.Signal`."""

    signal: Annotated[int, Meta(ge=0, le=2)]


class WireSampling(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The sampling parameters of a sequence, and the seed that samples its draft tokens (`core/distribution.py`)."""

    temperature: Annotated[float, Meta(gt=0, le=100)]
    top_p: Annotated[float, Meta(gt=0, le=1)]
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)]
    seed: Annotated[int, Meta(ge=0, lt=1 << 62)]


class StepRow(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The verdict on one sequence in an engine step: its digests before and after, and the tokens just committed.

    `prefetched`: the draft that the service sent before this verdict came, and that the target is already verifying;
    None asks for a draft. `sampling`: the request's sampling parameters, with which the draft may sample its tokens for
    rejection sampling; None if it must not. `max_draft_tokens`: the maximum length of a draft. `has_recurring_noise`:
    the target may draw the same random numbers again, for example from a seed, so the tokens must not help to draft
    another sequence (`Session.seclude`).
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
    """Totals of the rows of an engine step that other services draft for."""

    rows: Annotated[int, Meta(ge=0, lt=1 << 31)]
    submitted: Annotated[int, Meta(ge=0, lt=1 << 31)]
    committed: Annotated[int, Meta(ge=0, lt=1 << 31)]


class StepRequest(Struct, tag="step", array_like=True, frozen=True, forbid_unknown_fields=True):
    """One engine step: all its sequences that the service drafts for. The reply may take up to `wait_ms`.

    The service sends no `DraftReply` if every row has a prefetched draft. `beside` sums up the step's rows that other
    services draft for. `step_us` is the step's duration; 0 if it is unknown or the step decoded any other rows.
    """

    round: Round
    namespace: Namespace
    wait_ms: Annotated[float, Meta(ge=0, le=MAX_WAIT_MS)]
    rows: Annotated[list[StepRow], Meta(min_length=1, max_length=MAX_ROWS)]
    step_us: Annotated[int, Meta(ge=0, le=MAX_STEP_US)] = 0
    beside: OtherRows | None = None


class DraftReply(Struct, tag="proposals", array_like=True, frozen=True, forbid_unknown_fields=True):
    """The reply to `StepRequest`: a draft for every row, None where the sequence is unknown and must be opened.

    `probs`: the packed distributions that each row's tokens were sampled from; empty if no row has a sampled token.
    `undraftable`: the indices of rows whose sequences the service cannot draft for, such as too long ones.
    """

    round: Round
    rows: Annotated[list[Annotated[list[Token], Meta(max_length=MAX_NEW)] | None], Meta(max_length=MAX_ROWS)]
    probs: Annotated[list[Probs], Meta(max_length=MAX_ROWS)] = []
    undraftable: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_ROWS)]], Meta(max_length=MAX_ROWS)] = []


class VerdictDraft(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The draft to submit (`proposal`) if the next verdict commits the tokens `committed`."""

    committed: Annotated[list[Token], Meta(min_length=1, max_length=MAX_WINDOW + 1)]
    proposal: Draft
    probs: Probs = b""


class PrefetchRow(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Prefetched drafts for one sequence: one draft for each of its likeliest next verdicts.

    `before` is the digest of the sequence as it is before any of these verdicts.
    """

    before: SequenceId
    outcomes: Annotated[list[VerdictDraft], Meta(max_length=MAX_OUTCOMES)]


class PrefetchPush(Struct, tag="ahead", array_like=True, frozen=True, forbid_unknown_fields=True):
    """Prefetched drafts: sent before the verdicts that they answer, in place of earlier ones for the same sequences."""

    rows: Annotated[list[PrefetchRow], Meta(min_length=1, max_length=MAX_AHEAD)]


class OpenSequences(Struct, tag="open", array_like=True, frozen=True, forbid_unknown_fields=True):
    """Whole sequences to draft for, with their planner, its settings, and the predictor of acceptance.

    The service replies only if it declines them, with `Draining`, or cannot serve the message, with `ErrorReply`.
    """

    namespace: Namespace
    planner: ShortString
    settings: Annotated[dict[ShortString, Setting], Meta(max_length=16)]
    predictor: ShortString
    sequences: Annotated[list[PackedTokens], Meta(min_length=1, max_length=MAX_ROWS)]

    def __post_init__(self) -> None:
        """Raise `ValueError` unless each packed sequence consists of whole tokens, none of them negative."""
        for packed in self.sequences:
            if len(packed) % 4 or (unpack_tokens(packed) < 0).any():
                raise ValueError("not a sequence of tokens")


class Drain(Struct, tag="drain", array_like=True, frozen=True, forbid_unknown_fields=True):
    """A request to decline new sequences from then on or, with `is_on` False, to accept them again."""

    round: Round
    is_on: bool = True


class Draining(Struct, tag="draining", array_like=True, frozen=True, forbid_unknown_fields=True):
    """The reply to `Drain`: whether new sequences are declined, and how many sequences are being decoded.

    It is also sent with round 0: to every client when `is_on` changes, and to a client whose sequences are declined.
    """

    round: Round
    is_on: bool
    sessions: Count


class ErrorReply(Struct, tag="refused", array_like=True, frozen=True, forbid_unknown_fields=True):
    """The reply to a message that was refused or failed: why it could not be served."""

    reason: Annotated[str, Meta(max_length=512)]


class Rest(Struct, tag="rest", array_like=True, frozen=True, forbid_unknown_fields=True):
    """Word that the client asks for no drafts for now: the service stops drafting for it until its next step.

    There is no reply. It came with version 13.
    """

    namespace: Namespace


class StatsRequest(Struct, tag="get-stats", array_like=True, frozen=True, forbid_unknown_fields=True):
    """A request for the counters of one namespace."""

    round: Round
    namespace: Namespace


class StatsReply(Struct, tag="stats", array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reply to `StatsRequest`: sums over all sessions of the namespace since the service began.

    The times of a draft step, for one row and for each further row, are those of the service as a whole. The last three
    fields count sequences that got no drafts, by reason.
    """

    round: Round
    sessions: Count  # in the store now
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
    """A request for the settings and the metrics of the service."""

    round: Round


class Overview(Struct, tag="overview", array_like=True, frozen=True, forbid_unknown_fields=True):
    """The reply to `OverviewRequest`: the settings that the service was started with, and its metrics over all targets.

    Figures have the names of the service's metrics (`server/prometheus.py`), so a new metric needs no new message.
    """

    round: Round
    settings: Annotated[dict[ShortString, Annotated[str, Meta(max_length=256)] | Count], Meta(max_length=64)]
    figures: Annotated[dict[ShortString, MetricValue], Meta(max_length=128)]


Request = Hello | StepRequest | OpenSequences | Drain | Rest | StatsRequest | OverviewRequest
Reply = Welcome | DraftReply | PrefetchPush | Draining | ErrorReply | StatsReply | Overview
# By version, the messages that have got further fields since, and how many fields they have in that version.
_NUM_FIELDS: Mapping[int, Mapping[type[Request | Reply], int]] = {12: {Hello: 2}}
# By version, the messages that a peer which speaks it does not know.
_UNKNOWN: Mapping[int, Collection[type[Request | Reply]]] = {12: {Rest}}

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def pack_tokens(tokens: Sequence[int] | np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """Return a whole sequence as bytes, four per token, little-endian: a hundred times as fast to encode as a list."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def unpack_tokens(packed: bytes) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the tokens of a packed sequence."""
    return np.frombuffer(packed, dtype="<i4")


def encode(message: Request | Reply, version: int = VERSION) -> bytes:
    """Return a message as one frame for a peer that speaks this version, without the fields that are newer."""
    num_fields = _NUM_FIELDS.get(version, {}).get(type(message))
    if num_fields is None:
        return _encoder.encode(message)
    return _encoder.encode((message.__struct_config__.tag, *msgspec.structs.astuple(message)[:num_fields]))


def knows(version: int, message: type[Request | Reply]) -> bool:
    """Return whether a peer that speaks this version knows messages of this type."""
    return message not in _UNKNOWN.get(version, ())


def common_version(hello: Hello) -> int | None:
    """Return the newest version that the sender of `hello` speaks and this package too; None if there is none."""
    newest = min(hello.version, VERSION)
    oldest = hello.version if hello.oldest is None else hello.oldest
    return newest if newest >= max(oldest, OLDEST_VERSION) else None


def decode_request(frame: bytes) -> Request:
    """Return the message in a client's frame; raise `FrameError` if it holds no valid message."""
    return _decode(_requests, frame, MAX_FRAME)


def decode_reply(frame: bytes) -> Reply:
    """Return the message in a service's frame; raise `FrameError` if it holds no valid message."""
    return _decode(_replies, frame, MAX_REPLY)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes, max_len: int) -> T:
    if len(frame) > max_len:
        raise FrameError(f"a frame of {len(frame)} bytes is too long; the limit is {max_len}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(str(error)) from error
