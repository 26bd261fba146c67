"""The target's side of the wire: verdicts in, proposals out, one message per engine step for the whole batch.

No call raises into the engine, none takes longer than its deadline, and no token leaves that the target does not have.
While answers do not come in time the client still tells the service what was committed, but waits for nothing; the
first answer that comes turns it back on. When there is no service at all, a call costs microseconds.

Most answers are here before they are asked for: the service tells ahead what to submit after the likeliest verdicts.
Then the verdict is posted, and nothing is waited for.

Every service is asked what it is together with the first message, and answers in order: no draft is taken before its
vocabulary has been compared with the target's, and nothing is waited for to do so.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from specbranch.core.distribution import TEXT_LEN
from specbranch.core.round import AcceptanceHint
from specbranch.engines.vocabulary import VocabFingerprint
from specbranch.service.client.filters import VocabularyCheck, resample_draft
from specbranch.service.client.interface import ClientCounts, ClientOptions, DraftSource, SequenceUpdate
from specbranch.service.client.sequences import PrefetchedDrafts, SequenceDelta, SyncedSequences
from specbranch.service.client.transport import MessageChannel, Transport, ZmqTransport
from specbranch.service.wire.addresses import normalize_addresses
from specbranch.service.wire.messages import (
    MAX_NEW,
    MAX_ROWS,
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
    StepRequest,
    StepRow,
    Welcome,
    WireHint,
    WireSampling,
    pack_tokens,
)
from specbranch.service.wire.payloads import Tokens, unpack_probs

log = logging.getLogger(__name__)

_AGAIN_S = 1.0  # a sequence that was sent but is still unknown is not sent again sooner
_ASK_S = 1.0  # a service that cannot be used is asked again what it is, but not sooner
_UNASKED = (PrefetchPush, Draining)  # what services tell by themselves


class PreparedStep(NamedTuple):
    """A step for one service: all rows of the call, and which of them it is about, as they go over the wire."""

    rows: Sequence[SequenceUpdate]
    indices: Sequence[int]
    step_rows: list[StepRow]


class DraftClient(DraftSource):
    """One connection to a draft service.

    A pool of several services calls the parts of an exchange itself: `drain_replies`, `prepare_step`, `send_step`,
    `poll_reply` while the step `needs_reply`, `finish_step`, `resend_unknown`. These may raise.
    """

    def __init__(
        self,
        options: ClientOptions,
        told: SyncedSequences | None = None,
        counts: ClientCounts | None = None,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`told` and `counts` may be shared with other clients of the same target.

        `transport` and `clock`: another transport than a socket of its own, and another time.
        """
        super().__init__(options, told, counts, clock)
        (address,) = normalize_addresses(options.address)
        self._channel = MessageChannel(transport or ZmqTransport(address, options.keys), clock)
        self._round = 0
        self._proposed: dict[bytes, int] = {}  # by digest of the sequence, of the last step only
        self._sent: dict[bytes, float] = {}  # when whole sequences went out, by the names that they have now
        self._prefetched = PrefetchedDrafts()
        self._is_vocab_told = False
        self._vocabulary = VocabularyCheck(VocabFingerprint(options.vocab_len, options.vocab_fingerprint))
        self._asked_s = 0.0
        self.lagging_s: float | None = None  # since when answers do not come in time
        self.refused_s: float | None = None  # when the service last refused something
        self.is_connected = True  # as far as is known
        self.is_draining = False  # it takes no new sequences

    @property
    def is_lagging(self) -> bool:
        return self.lagging_s is not None

    @property
    def vocab_mismatch(self) -> bool:
        return self._vocabulary.is_mismatch

    def is_owner_process(self) -> bool:
        return self._channel.is_owner_process()

    def hello(self, timeout_s: float) -> Welcome | None:
        """Ask the service what it is; None if it does not answer in time. Never raises."""
        end_s = self._clock() + timeout_s
        self._round += 1
        try:
            while self._channel.is_owner_process() and self._clock() < end_s:
                if self._send(Hello(VERSION, self._round)):
                    reply = self._await(end_s)
                    return reply if isinstance(reply, Welcome) else None
                self._channel.await_writable(0.01)
        except Exception:
            self.counts.faults += 1
            log.exception("draft client failed")
        return None

    def close(self) -> None:
        self._channel.close()

    def ping(self) -> None:
        """Ask a service that gets no new sequences what it is now; the answer is taken whenever it comes."""
        if self.is_connected:
            self._ask_again()
        elif self._send(Hello(VERSION, self._round)):
            self.lagging_s = -math.inf  # until it says something

    def drain_replies(self, end_s: float) -> None:
        """Take in replies that came too late. The service is alive, so the next step waits for it again."""
        for reply in self._channel.iter_replies(end_s, waits=False):
            self._take(reply)
            if reply is not None and not isinstance(reply, _UNASKED):
                self.counts.late += isinstance(reply, DraftReply)
                self.lagging_s = None

    def prepare_step(
        self, rows: Sequence[SequenceUpdate], indices: Sequence[int], grown: Sequence[SequenceDelta]
    ) -> PreparedStep:
        """The question for these of the rows, which have grown like this."""
        if not self._vocabulary.is_known:
            self._send(Hello(VERSION, self._round))  # the round before: its answer is not the one awaited
        self._round += 1
        step_rows = [self._step_row(rows[index], index, growth) for index, growth in zip(indices, grown, strict=True)]
        self._proposed = {}
        self._sent = self._sent_before(step_rows)
        return PreparedStep(rows, indices, step_rows)

    def send_step(self, question: PreparedStep, end_s: float, step_us: int, beside: OtherRows | None = None) -> bool:
        """Whether the question is on its way."""
        wait_s = 0.0 if self.lagging_s is not None else max(end_s - self._clock(), 0.0)
        # The service answers a little before we stop to listen.
        step = StepRequest(self._round, self._namespace, wait_s * 1000 * 0.9, question.step_rows, step_us, beside)
        if self._send(step):
            return True
        self.counts.unreachable += 1
        self._sent = {}  # whoever comes will not know them
        return False

    def needs_reply(self, question: PreparedStep) -> bool:
        """Whether there is an answer to wait for."""
        if all(row.prefetched is not None for row in question.step_rows):
            return False
        if self.lagging_s is not None:
            self.counts.not_waited += 1
            return False
        return True

    def poll_reply(self, end_s: float, waits: bool) -> Reply | None:
        """The reply of this round, or one that ends the wait; None if it is not here, or does not come until then."""
        for reply in self._channel.iter_replies(end_s, waits):
            self._take(reply)
            if isinstance(reply, _UNASKED):
                continue
            if isinstance(reply, ErrorReply) or (reply is not None and reply.round == self._round):
                return reply
            if isinstance(reply, Welcome) and self._vocabulary.is_mismatch:
                return reply
            self.counts.late += isinstance(reply, DraftReply)
        return None

    def mark_timeout(self) -> None:
        """No reply came in time: none is waited for until one comes."""
        self.counts.timeouts += 1
        self.lagging_s = self._clock()

    def finish_step(
        self, question: PreparedStep, reply: Reply | None
    ) -> tuple[dict[int, list[int]], dict[bytes, Tokens]]:
        """What to submit for the rows of a question, by their index; and the sequences that the service lacks."""
        answers, probs = self._answers(question.step_rows, reply)
        found: dict[int, list[int]] = {}
        unknown: dict[bytes, Tokens] = {}
        for index, row, answer, packed in zip(question.indices, question.step_rows, answers, probs, strict=True):
            committed = question.rows[index]
            found[index] = (
                row.prefetched if row.prefetched is not None else self._draft(index, committed, row, answer, packed)
            )
            self._proposed[row.after] = len(found[index])
            if answer is None and (self.is_draining or row.after not in self._sent):
                unknown[row.after] = committed.tokens
        return found, unknown

    def resend_unknown(self, unknown: Mapping[bytes, Tokens], end_s: float) -> None:
        """Send sequences that the service lacks, by their names."""
        num_sent = self.open(unknown.values(), end_s)
        self._sent |= dict.fromkeys(itertools.islice(unknown, num_sent), self._clock())

    def _propose(self, rows: Sequence[SequenceUpdate], end_s: float, step_us: int) -> list[list[int]] | None:
        self.drain_replies(end_s)
        if self._vocabulary.is_mismatch:
            self.counts.other_vocab += 1
            self._ask_again()
            return None
        sent = [index for index, row in enumerate(rows) if self._fits(row)][:MAX_ROWS]
        if not sent:
            return None
        question = self.prepare_step(rows, sent, [self._follow(rows[index]) for index in sent])
        step_us = step_us if len(sent) == len(rows) else 0  # rows that are left out were in the step too
        if not self.send_step(question, end_s, step_us):
            return None
        drafts, unknown = self.finish_step(question, self._await(end_s) if self.needs_reply(question) else None)
        if unknown:
            self.resend_unknown(unknown, end_s)
        return [drafts.get(index, []) for index in range(len(rows))]

    def _announce_prompts(self, prompts: Sequence[Tokens], end_s: float) -> None:
        if self._vocabulary.is_mismatch:
            self._ask_again()
        elif not self.is_lagging:
            self.open(prompts, end_s)

    def _answers(
        self, rows: Sequence[StepRow], reply: Reply | None
    ) -> tuple[Sequence[Sequence[int] | None], Sequence[bytes]]:
        """What the service says to the rows of a step, None where it knows no sequence; and what it drew from."""
        self.counts.other_vocab += self._vocabulary.is_mismatch
        certain = [b""] * len(rows)
        if not self._vocabulary.is_known or not isinstance(reply, DraftReply) or len(reply.rows) != len(rows):
            return [[] for _ in rows], certain
        self.counts.answered += 1
        return reply.rows, reply.probs if len(reply.probs) == len(rows) else certain

    def _draft(
        self, index: int, committed: SequenceUpdate, row: StepRow, told: Sequence[int] | None, packed: bytes
    ) -> list[int]:
        """What to submit for a row that was told this. What is said to be drawn by chance is drawn here."""
        told = told or ()
        draft = told[: committed.max_draft_tokens]
        if packed and row.sampling is not None:
            try:
                sampled_from = unpack_probs(packed, len(told))[: len(draft)]
            except ValueError:
                self.counts.refused += 1  # and its tokens are proposals like any others
            else:
                end, seed = committed.tokens[-TEXT_LEN:], row.sampling.seed
                text = end.tolist() if isinstance(end, np.ndarray) else end
                draft, used = resample_draft(
                    text, len(committed.tokens), draft, sampled_from, seed, self._options.vocab_len
                )
                self.sampled_from[index] = used
                self.counts.sampled += sum(q is not None for q in used)
        return self._known_tokens(draft)

    def _sent_before(self, rows: Sequence[StepRow]) -> dict[bytes, float]:
        """When the sequences of these rows were sent, if not long ago; each has grown and has another name now.

        Where two rows go on from one sequence, the first has its session, and the other is a sequence that was never
        sent.
        """
        sent: dict[bytes, float] = {}
        for row in rows:
            at_s = self._sent.pop(row.before, None)
            if at_s is not None and self._clock() - at_s < _AGAIN_S:
                sent[row.after] = at_s
        return sent

    def _known_tokens(self, draft: Sequence[int]) -> list[int]:
        """A draft up to the first token that the target does not have."""
        vocab_len = self._options.vocab_len
        if vocab_len is None or all(token < vocab_len for token in draft):
            return list(draft)
        position = next(position for position, token in enumerate(draft) if token >= vocab_len)
        if not self.counts.unknown_token:
            log.warning(
                "the draft service proposed token %d, which the target does not have; such drafts are cut. "
                "Was it started with a draft model for this target?",
                draft[position],
            )
        self.counts.unknown_token += 1
        return list(draft[:position])

    def _step_row(self, row: SequenceUpdate, index: int, growth: SequenceDelta) -> StepRow:
        before, new, after = growth
        submitted = self._proposed.get(before, 0) if row.num_submitted is None else row.num_submitted
        sampling = self._on_wire_sampling(row)
        longest = None if row.max_draft_tokens is None else min(row.max_draft_tokens, MAX_NEW)
        step_row = StepRow(
            before,
            new,
            after,
            min(submitted, MAX_NEW),
            _on_wire(row.hint),
            None,
            sampling,
            longest,
            row.has_recurring_noise,
        )
        told = self._prefetched.pop(before, new) if self._vocabulary.is_known else None
        if told is None:
            return step_row
        self.counts.prefetched += 1
        return msgspec.structs.replace(
            step_row, prefetched=self._draft(index, row, step_row, told.proposal, told.probs)
        )

    def _on_wire_sampling(self, row: SequenceUpdate) -> WireSampling | None:
        sampling = row.sampling
        if sampling is None or row.name is None:
            return None
        seed = sampling.seed or self._synced.seed_of(row.name)
        return WireSampling(sampling.temperature, sampling.top_p, sampling.top_k, seed)

    def open(self, sequences: Collection[Tokens], end_s: float) -> int:
        """Send whole sequences that the service does not know, each in a message of its own, until the time is up.

        Returns how many went out; one does in any case, so that all do in the end. A service that does not know them
        may be another one than before, so it is asked what it is; the answer is taken whenever it comes.
        """
        if self.is_draining:
            self._ask_again()
            return 0
        options = self._options
        num_sent = 0
        for tokens in sequences:
            message = OpenSequences(
                self._namespace, options.planner, dict(options.settings), options.predictor, [pack_tokens(tokens)]
            )
            if not self._send(message):
                break
            num_sent += 1
            if self._clock() >= end_s:
                break
        if num_sent:
            self._send(Hello(VERSION, self._round))
        self.counts.opened += num_sent
        return num_sent

    def _send(self, message: Request) -> bool:
        """Whether the message is on its way. If not, whoever comes may be another service than before."""
        self.is_connected = self._channel.send(message)
        if not self.is_connected:
            self._vocabulary.reset()
            self._prefetched.clear()
            self.is_draining = False
        return self.is_connected

    def _ask_again(self) -> None:
        """Ask a service that cannot be used what it is now; the answer is taken whenever it comes."""
        now_s = self._clock()
        if now_s - self._asked_s >= _ASK_S:
            self._asked_s = now_s
            self._send(Hello(VERSION, self._round))

    def _await(self, end_s: float) -> Reply | None:
        """The reply of this round, or one that ends the wait; None, and lagging from now on, if none comes in time."""
        reply = self.poll_reply(end_s, waits=True)
        if reply is None:
            self.mark_timeout()
        return reply

    def _take(self, reply: Reply | None) -> None:
        """What is to be done with a reply whenever it comes."""
        self.counts.refused += reply is None or isinstance(reply, ErrorReply)
        if isinstance(reply, ErrorReply):
            self.refused_s = self._clock()
        if isinstance(reply, Draining):
            self.is_draining = reply.is_on
        if isinstance(reply, PrefetchPush):
            self._prefetched.store(reply)
        if isinstance(reply, Welcome):
            self.is_draining = reply.is_draining
            self._vocabulary.update(reply)
            if not self._vocabulary.is_mismatch:
                self._compare_sizes(reply)

    def _compare_sizes(self, welcome: Welcome) -> None:
        """Say so, once, if the draft may propose what the target does not have."""
        vocab_len = self._options.vocab_len
        if vocab_len is not None and welcome.vocab_len > vocab_len and not self._is_vocab_told:
            self._is_vocab_told = True
            log.warning(
                "the draft %r has a vocabulary of %d tokens, the target one of %d; drafts are cut before tokens that "
                "the target does not have",
                welcome.model,
                welcome.vocab_len,
                vocab_len,
            )


def _on_wire(hint: AcceptanceHint | None) -> WireHint | None:
    return None if hint is None else WireHint(int(hint.signal))
