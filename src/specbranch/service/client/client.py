"""The client of one draft service: one message with all verdicts of an engine step, and one reply with all drafts.

No call raises into the engine, none takes longer than its deadline, and no draft has a token that the target lacks.
While no replies come in time, the client still sends the committed tokens, but waits for nothing; the first reply that
comes turns waiting back on. When there is no service at all, a call costs microseconds.

Most drafts are prefetched, that is, they arrive before their verdict: the service sends what to submit after the
likeliest verdicts. After such a verdict the client does not wait for a reply.

The client sends `Hello` together with the first message, and a service replies in order: no draft is used before the
draft model's vocabulary was compared with the target's, and nothing waits for that comparison.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from specbranch.core.round import Draft
from specbranch.engines.vocabulary import VocabFingerprint
from specbranch.logs import RateLimitedWarning
from specbranch.service.client.filters import DraftFilter, VocabularyCheck
from specbranch.service.client.interface import NO_ANSWER, ClientCounts, ClientOptions, DraftSource, SequenceUpdate
from specbranch.service.client.sequences import (
    AdvancedSession,
    SequenceDelta,
    SessionState,
    SessionTable,
    SyncedSequences,
)
from specbranch.service.client.transport import MessageChannel, Transport, ZmqTransport
from specbranch.service.wire.addresses import normalize_addresses
from specbranch.service.wire.messages import (
    MAX_NEW,
    MAX_ROWS,
    OLDEST_VERSION,
    VERSION,
    DraftReply,
    Draining,
    ErrorReply,
    Hello,
    OpenSequences,
    OtherRows,
    PrefetchPush,
    Reply,
    Request,
    Rest,
    StepRequest,
    StepRow,
    Welcome,
    WireHint,
    WireSampling,
    knows,
    pack_tokens,
)
from specbranch.service.wire.payloads import Tokens

log = logging.getLogger(__name__)

_REOPEN_S = 1.0  # the pause before a sequence that was sent and is still unknown is sent again
_ASK_S = 1.0  # the pause between two questions to a service that cannot be used


class ServiceConnection:
    """Exchanges messages with one service; tracks whether it replies, drains and has the target's vocabulary."""

    def __init__(
        self,
        options: ClientOptions,
        namespace: bytes,
        sessions: SessionTable,
        counts: ClientCounts,
        transport: Transport | None,
        clock: Callable[[], float],
    ) -> None:
        (address,) = normalize_addresses(options.address)
        self.channel = MessageChannel(transport or ZmqTransport(address, options.keys), clock)
        self.vocabulary = VocabularyCheck(VocabFingerprint(options.vocab_len, options.vocab_fingerprint))
        self.lagging_s: float | None = None  # since when replies do not come in time; None while they do
        self.refused_s: float | None = None  # when the service last refused a message
        self.is_connected = True  # as far as is known
        self.is_draining = False  # it takes no new sequences
        self._versions = AgreedVersion()
        self._warn = RateLimitedWarning(log, clock)
        self._namespace = namespace
        self._sessions = sessions
        self._counts = counts
        self._clock = clock
        self._round = 0
        self._asked_s = 0.0

    def hello(self, end_s: float) -> Welcome | None:
        """Ask the service for its version, model and vocabulary; return None if it does not reply by `end_s`."""
        self._round += 1
        while self._clock() < end_s:
            if self.send_hello():
                reply = self.await_reply(end_s)
                return reply if isinstance(reply, Welcome) else None
            self.channel.await_writable(0.01)
        return None

    def ping(self) -> None:
        """Send `Hello` to a service that is unusable or draining; its reply may show that it can be used again.

        This does not wait: the next call that reads messages handles the reply. After a disconnection no step waits for
        the service until it has replied.
        """
        if self.is_connected:
            self.ask_again()
        elif self.send_hello():
            self.lagging_s = -math.inf  # until it replies

    def ask_again(self) -> None:
        """Send `Hello`, at most once a second, to a service that is draining, lagging, or has another vocabulary.

        The reply shows whether this is still so.
        """
        now_s = self._clock()
        if now_s - self._asked_s >= _ASK_S:
            self._asked_s = now_s
            self.send_hello()

    def send_hello(self) -> bool:
        """Send `Hello` and do not wait for the reply; return False if the service cannot be reached."""
        return self.send(self._versions.hello(self._round))

    def send_step(self, rows: list[StepRow], end_s: float, step_us: int, beside: OtherRows | None = None) -> bool:
        """Begin a round: send these rows without waiting; if the service cannot be reached, count that, return False.

        The client will wait for the reply until time `end_s`. `step_us` is the time of the engine's step, 0 if unknown,
        and `beside` sums up the rows of the step that other services draft for.
        """
        if not (self.vocabulary.is_known and self._versions.is_agreed):
            self.send_hello()  # in the round before: its reply is not the one to wait for
        self._round += 1
        wait_s = 0.0 if self.lagging_s is not None else max(end_s - self._clock(), 0.0)
        # The service replies a little before we stop to wait.
        is_sent = self.send(StepRequest(self._round, self._namespace, wait_s * 1000 * 0.9, rows, step_us, beside))
        self._counts.unreachable += not is_sent
        return is_sent

    def send_rest(self) -> None:
        """Tell the service to stop drafting until the next step, if it can be reached and knows that message."""
        if self.is_connected and self._versions.knows(Rest):
            self.send(Rest(self._namespace))

    def send(self, message: Request) -> bool:
        """Send a message without waiting and return True; if that fails, reset the connection's state and return False.

        The state is the service's vocabulary, its sessions, and whether it is draining.
        """
        version = message.version if isinstance(message, Hello) else self._versions.version
        self.is_connected = self.channel.send(message, version)
        if not self.is_connected:
            self._versions = AgreedVersion()
            self.vocabulary.reset()
            self._sessions.clear()
            self.is_draining = False
        return self.is_connected

    def drain_replies(self, end_s: float) -> None:
        """Handle all replies that have come since the last call, until time `end_s` at the latest.

        A reply shows that the service is alive, even if it comes late, so later requests wait for replies again.
        """
        pushes = []
        for reply in self._receive(end_s):
            if isinstance(reply, PrefetchPush):
                pushes.append(reply)
                continue
            self._handle(reply)
            if reply is not None and not isinstance(reply, Draining):
                self._counts.late += isinstance(reply, DraftReply)
                self.lagging_s = None
        if pushes:
            self._sessions.store(pushes)

    def poll_reply(self, end_s: float, waits: bool) -> Reply | None:
        """Handle the replies that have come, and return the one that ends this round; None if it is not among them.

        With `waits`, wait for it until `end_s`. A round ends with its reply, with an error, or with a `Welcome` that
        names another vocabulary.
        """
        while replies := self._receive(end_s, waits):
            found = None
            for reply in replies:
                self._handle(reply)
                if found is None and self._ends_round(reply):
                    found = reply
                else:
                    self._counts.late += isinstance(reply, DraftReply)
            if found is not None or not waits or self._clock() >= end_s:
                return found
        return None

    def await_reply(self, end_s: float) -> Reply | None:
        """Return the reply that ends this round; if none comes by `end_s`, mark a timeout and return None."""
        reply = self.poll_reply(end_s, waits=True)
        if reply is None:
            self.mark_timeout()
        return reply

    def may_wait(self) -> bool:
        """Return whether to wait for a reply; if not, because the service is lagging, count the call."""
        if self.lagging_s is None:
            return True
        self._counts.not_waited += 1
        return False

    def mark_timeout(self) -> None:
        """Count a timeout and mark the service as lagging: the client does not wait again until a reply has come."""
        self._counts.timeouts += 1
        self.lagging_s = self._clock()

    def _receive(self, end_s: float, waits: bool = False) -> list[Reply | None]:
        """Return the replies that have come, without refusals of our newest version: greet again in the oldest one.

        With `waits`, wait until `end_s` for the first other reply.
        """
        while replies := self.channel.receive(end_s, waits):
            others = [reply for reply in replies if not self._versions.is_refusal(reply)]
            if len(others) < len(replies):
                self.send_hello()
            if others or not waits or self._clock() >= end_s:
                return others
        return []

    def _ends_round(self, reply: Reply | None) -> bool:
        if reply is None or isinstance(reply, PrefetchPush | Draining):
            return False
        is_unusable = isinstance(reply, Welcome) and self.vocabulary.is_mismatch
        return isinstance(reply, ErrorReply) or reply.round == self._round or is_unusable

    def _handle(self, reply: Reply | None) -> None:
        """Update the service's state from a reply, in time or late; None stands for a malformed message."""
        self._counts.refused += reply is None or isinstance(reply, ErrorReply)
        if isinstance(reply, ErrorReply):
            self.refused_s = self._clock()
            self._versions = AgreedVersion()  # perhaps another service is there, which does not read this version
            self._warn("the draft service refused: %.200r", reply.reason)
        if isinstance(reply, Draining):
            self.is_draining = reply.is_on
        if isinstance(reply, PrefetchPush):
            self._sessions.store([reply])
        if isinstance(reply, Welcome):
            self.is_draining = reply.is_draining
            self._versions.agree(reply)
            self.vocabulary.update(reply)


class AgreedVersion:
    """The version of the wire that this client speaks with one connection of a service: the oldest one at first."""

    def __init__(self) -> None:
        self.version = OLDEST_VERSION
        self.is_agreed = False
        self._is_old = False  # the service knows the oldest version only
        self._num_offers = 0  # greetings in the newest version that were not answered yet

    def knows(self, message: type[Request]) -> bool:
        """Return whether the service knows messages of this type."""
        return knows(self.version, message)

    def hello(self, round: int) -> Hello:
        """Return the next greeting, which offers both versions, unless the service has refused such a greeting."""
        if self._is_old:
            return Hello(OLDEST_VERSION, round)
        self._num_offers += not self.is_agreed
        return Hello(VERSION, round, OLDEST_VERSION)

    def agree(self, welcome: Welcome) -> None:
        """Speak the version of this message from now on."""
        self.version, self.is_agreed, self._num_offers = min(welcome.version, VERSION), True, 0
        self._is_old = self._is_old and self.version == OLDEST_VERSION

    def is_refusal(self, reply: Reply | None) -> bool:
        """Return whether a reply refuses a greeting in both versions, as services of version 12 do; if so, note that.

        A greeting is the first message of a connection and replies come in order, so an error before the `Welcome` is
        such a refusal.
        """
        if not self._num_offers or not isinstance(reply, ErrorReply):
            return False
        self._num_offers -= 1
        self._is_old = True
        return True


class PreparedRow(NamedTuple):
    """One row of a step that is ready to be sent.

    `place` is its index in the call of `propose`, `wire` is `update` in its form for the wire, and `draft` is the draft
    that the service prefetched for this verdict, None if it sent none.
    """

    place: int
    update: SequenceUpdate
    wire: StepRow
    session: SessionState
    draft: Draft | None


class DraftClient(DraftSource):
    """Gets drafts from one service.

    A pool of several services calls the parts of `propose` itself: `drain_replies`, `prepare_step`, `send_step`,
    `poll_reply` for rows without a prefetched draft, `finish_step`, `resend_unknown`. These may raise.
    """

    def __init__(
        self,
        options: ClientOptions,
        synced: SyncedSequences | None = None,
        counts: ClientCounts | None = None,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to the one service of `options`.

        `synced` and `counts` may be shared with other clients of the same target. `transport` and `clock` replace the
        client's own socket and the machine's clock.
        """
        super().__init__(options, synced, counts, clock)
        self._sessions = SessionTable()
        self._filter = DraftFilter(options.vocab_len, self.counts)
        self.connection = ServiceConnection(options, self._namespace, self._sessions, self.counts, transport, clock)

    @property
    def is_lagging(self) -> bool:
        return self.connection.lagging_s is not None

    @property
    def vocab_mismatch(self) -> bool:
        return self.connection.vocabulary.is_mismatch

    def hello(self, timeout_s: float) -> Welcome | None:
        """Ask the service for its version, model and vocabulary; None if it does not reply in time. Never raise."""
        try:
            return self.connection.hello(self._clock() + timeout_s) if self._owner.is_current() else None
        except Exception:
            self.counts.faults += 1
            log.exception("the draft client failed; the service was not asked what it is")
            return None

    def close(self) -> None:
        self.connection.channel.close()

    def prepare_step(
        self, rows: Sequence[SequenceUpdate], indices: Sequence[int], deltas: Sequence[SequenceDelta]
    ) -> list[PreparedRow]:
        """Prepare the rows with these indices to be sent; return them, each with its prefetched draft, if there is one.

        `deltas` says how each row's sequence has grown; its session moves to the new sequence id.
        """
        advanced = self._sessions.advance(deltas)
        return [
            self._prepare_row(index, rows[index], delta, one)
            for index, delta, one in zip(indices, deltas, advanced, strict=True)
        ]

    def finish_step(
        self, rows: Sequence[PreparedRow], reply: Reply | None
    ) -> tuple[dict[int, Draft], dict[bytes, PreparedRow]]:
        """Return the drafts by the rows' `place`, and the rows of unknown sequences by sequence id.

        `reply` is the service's reply, None if no reply came. A row without an answer has the draft `NO_ANSWER`. Of the
        unknown sequences, those that were opened within the last second are left out unless the service is draining.
        """
        vocabulary = self.connection.vocabulary
        self.counts.other_vocab += vocabulary.is_mismatch
        drafts = {row.place: row.draft or NO_ANSWER for row in rows}
        unknown: dict[bytes, PreparedRow] = {}
        if not vocabulary.is_known or not isinstance(reply, DraftReply) or len(reply.rows) != len(rows):
            return drafts, unknown
        self.counts.answered += 1
        probs = reply.probs if len(reply.probs) == len(rows) else [b""] * len(rows)
        for index, (row, proposed, packed) in enumerate(zip(rows, reply.rows, probs, strict=True)):
            if row.draft is None and proposed:
                draft = self._filter.apply(row.update, proposed, packed, row.wire.sampling)
                row.session.num_proposed = len(draft.tokens)
                drafts[row.place] = draft
            elif row.draft is None and proposed is not None and index not in reply.undraftable:
                drafts[row.place] = Draft([])
            if proposed is None and (self.connection.is_draining or not self._was_opened(row.session)):
                unknown[row.wire.after] = row
        return drafts, unknown

    def resend_unknown(self, unknown: Mapping[bytes, PreparedRow], end_s: float) -> None:
        """Open the sequences of these rows, which the service does not know, as far as time allows until `end_s`."""
        rows = list(unknown.values())
        num_sent = self.open([row.update.tokens for row in rows], end_s)
        for row in rows[:num_sent]:
            row.session.opened_s = self._clock()

    def open(self, sequences: Collection[Tokens], end_s: float) -> int:
        """Open sequences at the service: send each whole, until `end_s` but at least one; return the number sent.

        Each sequence is a message of its own. A `Hello` goes first, because a service that does not know the sequences
        may have another draft model than before. A draining service gets no sequences.
        """
        if self.connection.is_draining:
            self.connection.ask_again()
            return 0
        options = self._options
        num_sent = 0
        if sequences:
            self.connection.send_hello()
        for tokens in sequences:
            message = OpenSequences(
                self._namespace, options.planner, dict(options.settings), options.predictor, [pack_tokens(tokens)]
            )
            if not self.connection.send(message):
                break
            num_sent += 1
            if self._clock() >= end_s:
                break
        self.counts.opened += num_sent
        return num_sent

    def _propose(self, rows: Sequence[SequenceUpdate], end_s: float, step_us: int) -> list[Draft] | None:
        self.connection.drain_replies(end_s)
        if self.connection.vocabulary.is_mismatch:
            self.counts.other_vocab += 1
            self.connection.ask_again()
            return None
        indices = [index for index, row in enumerate(rows) if self._fits(row)][:MAX_ROWS]
        if not indices:
            return None
        fitting = [rows[index] for index in indices]
        deltas = [self._synced.advance(row.name, row.tokens, row.num_new) for row in fitting]
        prepared = self.prepare_step(rows, indices, deltas)
        step_us = step_us if len(indices) == len(rows) else 0  # rows that are left out were in the step too
        if not self.connection.send_step([row.wire for row in prepared], end_s, step_us):
            return None
        is_open = any(row.draft is None for row in prepared)
        reply = self.connection.await_reply(end_s) if is_open and self.connection.may_wait() else None
        drafts, unknown = self.finish_step(prepared, reply)
        if unknown:
            self.resend_unknown(unknown, end_s)
        return [drafts.get(index, NO_ANSWER) for index in range(len(rows))]

    def _announce_prompts(self, prompts: Sequence[Tokens], end_s: float) -> None:
        if self.vocab_mismatch:
            self.connection.ask_again()
        elif not self.is_lagging:
            self.open(prompts, end_s)

    def _rest(self) -> None:
        self.connection.send_rest()

    def _prepare_row(
        self, index: int, row: SequenceUpdate, delta: SequenceDelta, advanced: AdvancedSession
    ) -> PreparedRow:
        """Return a row ready to be sent, with the prefetched draft for its verdict if there is one."""
        session, num_proposed, pushed = advanced
        asked, sampling, draft = row.sampling, None, None
        if asked is not None and row.name is not None:
            sampling = WireSampling(asked.temperature, asked.top_p, asked.top_k, asked.seed or delta.seed)
        if pushed is not None and self.connection.vocabulary.is_known:
            self.counts.prefetched += 1
            draft = self._filter.apply(row, pushed.proposal, pushed.probs, sampling)
            session.num_proposed = len(draft.tokens)
        wire = StepRow(
            delta.before,
            delta.new,
            delta.after,
            min(num_proposed if row.num_submitted is None else row.num_submitted, MAX_NEW),
            None if row.hint is None else WireHint(int(row.hint.signal)),
            None if draft is None else draft.tokens,
            sampling,
            None if row.max_draft_tokens is None else min(row.max_draft_tokens, MAX_NEW),
            row.has_recurring_noise,
        )
        return PreparedRow(index, row, wire, session, draft)

    def _was_opened(self, session: SessionState) -> bool:
        """Return whether the whole sequence was sent less than a second ago, so that it need not be sent again."""
        return session.opened_s is not None and self._clock() - session.opened_s < _REOPEN_S
