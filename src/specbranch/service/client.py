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
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from specbranch.core.distribution import TEXT_LEN, Distribution, Sampling
from specbranch.core.planners import DEFAULT_PLANNER
from specbranch.core.round import Outlook
from specbranch.engines.vocabulary import VocabSample
from specbranch.service.connection import Connection
from specbranch.service.digest import Tokens
from specbranch.service.draft_probs import unpack_probs
from specbranch.service.endpoint import ClientKeys, each_address
from specbranch.service.fit import Fit
from specbranch.service.link import Link, SocketLink
from specbranch.service.outcomes import Outcomes
from specbranch.service.redraw import redraw
from specbranch.service.told import Growth, Told
from specbranch.service.wire import (
    MAX_NEW,
    MAX_ROWS,
    MAX_SEQUENCE,
    MAX_STEP_US,
    VERSION,
    Ahead,
    Beside,
    Draining,
    Hello,
    Open,
    Proposals,
    Refused,
    Reply,
    Request,
    Step,
    StepRow,
    Welcome,
    WireOutlook,
    WireSampling,
    pack,
)

log = logging.getLogger(__name__)

_AGAIN_S = 1.0  # a sequence that was sent but is still unknown is not sent again sooner
_PACE = 0.1  # of following the target's steps
_SHORTEST_WAIT_S = 0.005  # an answer that must be asked for takes a fraction of a millisecond on a quiet machine
_ASK_S = 1.0  # a service that cannot be used is asked again what it is, but not sooner
_UNASKED = (Ahead, Draining)  # what services tell by themselves


@dataclass(frozen=True, slots=True)
class Committed:
    """One sequence after an engine step: all its tokens, how many are new, how many drafted ones had been submitted.

    An engine that does not know the last may leave it out: then it is what the client proposed for this sequence.
    `outlook` is what the target foresees for the tokens that come next, if it has looked. `name` is the engine's own
    name for the sequence, under which it only grows: the cost of a call is then that of the tokens since the last one,
    not of the whole sequence. `sampling`: the engine tests draft tokens by what they were drawn from (`drawn_from`), so
    they may be drawn by chance; for sequences with a name only. Without a seed of its own a sequence gets a random one.
    `longest`: the most draft tokens that are wanted. `has_recurring_noise`: the tokens are sampled with random numbers
    that may come again, so nothing of them may help to draft another sequence.
    """

    tokens: Tokens
    num_new: int
    num_submitted: int | None = None
    outlook: Outlook | None = None
    name: str | None = None
    sampling: Sampling | None = None
    longest: int | None = None
    has_recurring_noise: bool = False


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Where the service is, how long to wait for it, and which planner it shall use for us.

    `address` may be several, of services with the same draft and the same keys (`pool.draft_client`).
    Clients that were given the same `namespace` share drafts for equal sequences; without one a random one is made.
    `step_share`: an answer may take this part of the target's step at most, as steps were told (`propose`, `is_whole`),
    and never more than `deadline_s`; None for planners that let the target wait on purpose.
    `vocab_len` is how many tokens the target has. An engine fails at one beyond, so drafts are cut before it; without a
    number the caller has to see to that. `vocab_sample` is of the target's tokens (`vocabulary.read_sample`). A draft
    with another vocabulary is not used; without a sample on both sides, sizes are compared.
    """

    address: str | Sequence[str]
    planner: str = DEFAULT_PLANNER
    settings: Mapping[str, Any] = field(default_factory=dict)
    predictor: str = "confidence"
    deadline_s: float = 0.05
    namespace: bytes | None = None
    keys: ClientKeys | None = None
    vocab_len: int | None = None
    vocab_sample: bytes = b""
    step_share: float | None = None


@dataclass(slots=True)
class ClientCounts:
    """What the client did, and what it gave up."""

    calls: int = 0
    answered: int = 0
    timeouts: int = 0
    unreachable: int = 0
    unawaited: int = 0  # told the service, did not wait for it
    late: int = 0
    foreseen: int = 0  # rows whose answer was here before they asked
    drawn: int = 0  # draft tokens that were drawn by chance
    refused: int = 0
    foreign: int = 0  # drafts cut before a token that the target does not have
    other_vocab: int = 0  # calls without drafts, because the draft has another vocabulary
    oversized: int = 0  # rows that were not sent: more tokens than a message may have
    faults: int = 0
    opened: int = 0
    moved: int = 0  # sequences that went on at another service
    wait_s: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """The counters by name; asked for at every step."""
        return dict(zip(self.__slots__, _COUNTS(self), strict=True))


_COUNTS = attrgetter(*ClientCounts.__slots__)


class Drafts(ABC):
    """Asks for drafts for one target. One thread at a time may use it; a forked process gets nothing from it."""

    def __init__(
        self,
        options: ClientOptions,
        told: Told | None = None,
        counts: ClientCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._clock = clock
        self._namespace = options.namespace or os.urandom(16)
        self._returned_s: float | None = None  # when the last call of `propose` ended
        self._told = told or Told()
        self._step_s: float | None = None  # of the target, smoothed
        self.counts = counts or ClientCounts()
        self.drawn_from: list[list[Distribution | None]] = []  # of the last call: for each row, for each of its tokens

    @property
    def namespace(self) -> bytes:
        """Keeps our sequences apart from those of others."""
        return self._namespace

    @property
    @abstractmethod
    def is_lagging(self) -> bool:
        """Whether nobody answers in time any more."""

    @property
    @abstractmethod
    def has_other_vocab(self) -> bool:
        """Whether the draft has another vocabulary than the target, so that nothing is drafted."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the connection; nothing that is still queued is waited for."""

    @abstractmethod
    def is_ours(self) -> bool:
        """Whether this process made the connection."""

    @abstractmethod
    def _propose(self, rows: Sequence[Committed], end_s: float, step_us: int) -> list[list[int]] | None:
        """Tokens to submit for every row, until then; None if there are none."""

    @abstractmethod
    def _expect(self, prompts: Sequence[Tokens], end_s: float) -> None:
        """Send sequences that the target begins to read."""

    def propose(self, rows: Sequence[Committed], is_whole: bool = False) -> list[list[int]]:
        """Tokens to submit for every row; empty lists where there are none in time. Never raises.

        `is_whole`: the engine's step since the last call has decoded these rows and nothing else, so that its time
        tells what verifying costs.
        """
        nothing: list[list[int]] = [[] for _ in rows]
        self.drawn_from = [[] for _ in rows]
        if not self.is_ours():
            return nothing
        self.counts.calls += 1
        start_s = self._clock()
        step_s = start_s - self._returned_s if is_whole and self._returned_s is not None else 0.0
        self._learn_step(step_s)
        try:
            step_us = int(1e6 * step_s)
            found = self._propose(rows, start_s + self._patience_s(), step_us if step_us <= MAX_STEP_US else 0)
        except Exception:
            self.counts.faults += 1
            log.exception("draft client failed; this step goes without drafts")
            found = None
        finally:
            self._returned_s = self._clock()
            self.counts.wait_s += self._returned_s - start_s
        if found is None:
            self.drawn_from = [[] for _ in rows]
            return nothing
        self.drawn_from = [drawn[: len(draft)] for drawn, draft in zip(self.drawn_from, found, strict=True)]
        return found

    def expect(self, prompts: Sequence[Tokens]) -> None:
        """Tell the service of sequences that the target begins to read; nothing is waited for. Never raises."""
        end_s = self._clock() + self._options.deadline_s
        try:
            if self.is_ours():
                self._expect([prompt for prompt in prompts if len(prompt) <= MAX_SEQUENCE], end_s)
        except Exception:
            self.counts.faults += 1
            log.exception("draft client failed; prompts will be sent with their first tokens")

    def _learn_step(self, step_s: float) -> None:
        if step_s > 0.0:
            self._step_s = step_s if self._step_s is None else self._step_s + _PACE * (step_s - self._step_s)

    def _patience_s(self) -> float:
        """How long the target may wait for an answer."""
        share, longest_s = self._options.step_share, self._options.deadline_s
        if share is None or self._step_s is None:
            return longest_s
        return min(max(share * self._step_s, _SHORTEST_WAIT_S), longest_s)

    def _fits(self, row: Committed) -> bool:
        """Whether a row can go over the wire: something new, a sequence before it, and no more than the bounds."""
        length = len(row.tokens)
        if length > MAX_SEQUENCE or row.num_new > MAX_NEW:
            if not self.counts.oversized:
                log.warning(
                    "a text of %d tokens, %d of them new, is not drafted for: the draft service takes %d, %d of them "
                    "new; further ones are only counted",
                    length,
                    row.num_new,
                    MAX_SEQUENCE,
                    MAX_NEW,
                )
            self.counts.oversized += 1
            return False
        return 0 < row.num_new < length

    def _follow(self, row: Committed) -> Growth:
        return self._told.follow(row.name, np.asarray(row.tokens, dtype="<i4"), row.num_new)


class Question(NamedTuple):
    """A step for one service: all rows of the call, and which of them it is about, as they go over the wire."""

    rows: Sequence[Committed]
    indices: Sequence[int]
    step_rows: list[StepRow]


class DraftClient(Drafts):
    """One connection to a draft service.

    The parts of an exchange are there for who has several services to ask: `take_late`, `prepare`, `ask`, `hear` while
    it `awaits`, `conclude`, `open_unknown`. These may raise.
    """

    def __init__(
        self,
        options: ClientOptions,
        told: Told | None = None,
        counts: ClientCounts | None = None,
        link: Link | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`told` and `counts` may be shared with other clients of the same target.

        `link` and `clock`: another transport than a socket of its own, and another time.
        """
        super().__init__(options, told, counts, clock)
        (address,) = each_address(options.address)
        self._connection = Connection(link or SocketLink(address, options.keys), clock)
        self._round = 0
        self._proposed: dict[bytes, int] = {}  # by digest of the sequence, of the last step only
        self._sent: dict[bytes, float] = {}  # when whole sequences went out, by the names that they have now
        self._outcomes = Outcomes()
        self._is_vocab_told = False
        self._fit = Fit(VocabSample(options.vocab_len, options.vocab_sample))
        self._asked_s = 0.0
        self.lagging_s: float | None = None  # since when answers do not come in time
        self.refused_s: float | None = None  # when the service last refused something
        self.is_connected = True  # as far as is known
        self.is_draining = False  # it takes no new sequences

    @property
    def is_lagging(self) -> bool:
        return self.lagging_s is not None

    @property
    def has_other_vocab(self) -> bool:
        return self._fit.is_other

    def is_ours(self) -> bool:
        return self._connection.is_ours()

    def hello(self, timeout_s: float) -> Welcome | None:
        """Ask the service what it is; None if it does not answer in time. Never raises."""
        end_s = self._clock() + timeout_s
        self._round += 1
        try:
            while self._connection.is_ours() and self._clock() < end_s:
                if self._send(Hello(VERSION, self._round)):
                    reply = self._await(end_s)
                    return reply if isinstance(reply, Welcome) else None
                self._connection.await_writable(0.01)
        except Exception:
            self.counts.faults += 1
            log.exception("draft client failed")
        return None

    def close(self) -> None:
        self._connection.close()

    def probe(self) -> None:
        """Ask a service that gets no new sequences what it is now; the answer is taken whenever it comes."""
        if self.is_connected:
            self._ask_again()
        elif self._send(Hello(VERSION, self._round)):
            self.lagging_s = -math.inf  # until it says something

    def take_late(self, end_s: float) -> None:
        """Take in replies that came too late. The service is alive, so the next step waits for it again."""
        for reply in self._connection.replies(end_s, waits=False):
            self._take(reply)
            if reply is not None and not isinstance(reply, _UNASKED):
                self.counts.late += isinstance(reply, Proposals)
                self.lagging_s = None

    def prepare(self, rows: Sequence[Committed], indices: Sequence[int], grown: Sequence[Growth]) -> Question:
        """The question for these of the rows, which have grown like this."""
        if not self._fit.is_known:
            self._send(Hello(VERSION, self._round))  # the round before: its answer is not the one awaited
        self._round += 1
        step_rows = [self._step_row(rows[index], index, growth) for index, growth in zip(indices, grown, strict=True)]
        self._proposed = {}
        self._sent = self._sent_before(step_rows)
        return Question(rows, indices, step_rows)

    def ask(self, question: Question, end_s: float, step_us: int, beside: Beside | None = None) -> bool:
        """Whether the question is on its way."""
        wait_s = 0.0 if self.lagging_s is not None else max(end_s - self._clock(), 0.0)
        # The service answers a little before we stop to listen.
        step = Step(self._round, self._namespace, wait_s * 1000 * 0.9, question.step_rows, step_us, beside)
        if self._send(step):
            return True
        self.counts.unreachable += 1
        self._sent = {}  # whoever comes will not know them
        return False

    def awaits(self, question: Question) -> bool:
        """Whether there is an answer to wait for."""
        if all(row.taken is not None for row in question.step_rows):
            return False
        if self.lagging_s is not None:
            self.counts.unawaited += 1
            return False
        return True

    def hear(self, end_s: float, waits: bool) -> Reply | None:
        """The reply of this round, or one that ends the wait; None if it is not here, or does not come until then."""
        for reply in self._connection.replies(end_s, waits):
            self._take(reply)
            if isinstance(reply, _UNASKED):
                continue
            if isinstance(reply, Refused) or (reply is not None and reply.round == self._round):
                return reply
            if isinstance(reply, Welcome) and self._fit.is_other:
                return reply
            self.counts.late += isinstance(reply, Proposals)
        return None

    def give_up(self) -> None:
        """No reply came in time: none is waited for until one comes."""
        self.counts.timeouts += 1
        self.lagging_s = self._clock()

    def conclude(self, question: Question, reply: Reply | None) -> tuple[dict[int, list[int]], dict[bytes, Tokens]]:
        """What to submit for the rows of a question, by their index; and the sequences that the service lacks."""
        answers, probs = self._answers(question.step_rows, reply)
        found: dict[int, list[int]] = {}
        unknown: dict[bytes, Tokens] = {}
        for index, row, answer, packed in zip(question.indices, question.step_rows, answers, probs, strict=True):
            committed = question.rows[index]
            found[index] = row.taken if row.taken is not None else self._draft(index, committed, row, answer, packed)
            self._proposed[row.after] = len(found[index])
            if answer is None and (self.is_draining or row.after not in self._sent):
                unknown[row.after] = committed.tokens
        return found, unknown

    def open_unknown(self, unknown: Mapping[bytes, Tokens], end_s: float) -> None:
        """Send sequences that the service lacks, by their names."""
        num_sent = self.open(unknown.values(), end_s)
        self._sent |= dict.fromkeys(itertools.islice(unknown, num_sent), self._clock())

    def _propose(self, rows: Sequence[Committed], end_s: float, step_us: int) -> list[list[int]] | None:
        self.take_late(end_s)
        if self._fit.is_other:
            self.counts.other_vocab += 1
            self._ask_again()
            return None
        sent = [index for index, row in enumerate(rows) if self._fits(row)][:MAX_ROWS]
        if not sent:
            return None
        question = self.prepare(rows, sent, [self._follow(rows[index]) for index in sent])
        step_us = step_us if len(sent) == len(rows) else 0  # rows that are left out were in the step too
        if not self.ask(question, end_s, step_us):
            return None
        drafts, unknown = self.conclude(question, self._await(end_s) if self.awaits(question) else None)
        if unknown:
            self.open_unknown(unknown, end_s)
        return [drafts.get(index, []) for index in range(len(rows))]

    def _expect(self, prompts: Sequence[Tokens], end_s: float) -> None:
        if self._fit.is_other:
            self._ask_again()
        elif not self.is_lagging:
            self.open(prompts, end_s)

    def _answers(
        self, rows: Sequence[StepRow], reply: Reply | None
    ) -> tuple[Sequence[Sequence[int] | None], Sequence[bytes]]:
        """What the service says to the rows of a step, None where it knows no sequence; and what it drew from."""
        self.counts.other_vocab += self._fit.is_other
        certain = [b""] * len(rows)
        if not self._fit.is_known or not isinstance(reply, Proposals) or len(reply.rows) != len(rows):
            return [[] for _ in rows], certain
        self.counts.answered += 1
        return reply.rows, reply.probs if len(reply.probs) == len(rows) else certain

    def _draft(
        self, index: int, committed: Committed, row: StepRow, told: Sequence[int] | None, packed: bytes
    ) -> list[int]:
        """What to submit for a row that was told this. What is said to be drawn by chance is drawn here."""
        told = told or ()
        draft = told[: committed.longest]
        if packed and row.sampling is not None:
            try:
                drawn_from = unpack_probs(packed, len(told))[: len(draft)]
            except ValueError:
                self.counts.refused += 1  # and its tokens are proposals like any others
            else:
                end, seed = committed.tokens[-TEXT_LEN:], row.sampling.seed
                text = end.tolist() if isinstance(end, np.ndarray) else end
                draft, used = redraw(text, len(committed.tokens), draft, drawn_from, seed, self._options.vocab_len)
                self.drawn_from[index] = used
                self.counts.drawn += sum(q is not None for q in used)
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
        if not self.counts.foreign:
            log.warning(
                "the draft service proposed token %d, which the target does not have; such drafts are cut. "
                "Was it started with a draft model for this target?",
                draft[position],
            )
        self.counts.foreign += 1
        return list(draft[:position])

    def _step_row(self, row: Committed, index: int, growth: Growth) -> StepRow:
        before, new, after = growth
        submitted = self._proposed.get(before, 0) if row.num_submitted is None else row.num_submitted
        sampling = self._on_wire_sampling(row)
        longest = None if row.longest is None else min(row.longest, MAX_NEW)
        step_row = StepRow(
            before,
            new,
            after,
            min(submitted, MAX_NEW),
            _on_wire(row.outlook),
            None,
            sampling,
            longest,
            row.has_recurring_noise,
        )
        told = self._outcomes.take(before, new) if self._fit.is_known else None
        if told is None:
            return step_row
        self.counts.foreseen += 1
        return msgspec.structs.replace(step_row, taken=self._draft(index, row, step_row, told.proposal, told.probs))

    def _on_wire_sampling(self, row: Committed) -> WireSampling | None:
        sampling = row.sampling
        if sampling is None or row.name is None:
            return None
        seed = sampling.seed or self._told.seed(row.name)
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
            message = Open(self._namespace, options.planner, dict(options.settings), options.predictor, [pack(tokens)])
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
        self.is_connected = self._connection.send(message)
        if not self.is_connected:
            self._fit.forget()
            self._outcomes.clear()
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
        reply = self.hear(end_s, waits=True)
        if reply is None:
            self.give_up()
        return reply

    def _take(self, reply: Reply | None) -> None:
        """What is to be done with a reply whenever it comes."""
        self.counts.refused += reply is None or isinstance(reply, Refused)
        if isinstance(reply, Refused):
            self.refused_s = self._clock()
        if isinstance(reply, Draining):
            self.is_draining = reply.is_on
        if isinstance(reply, Ahead):
            self._outcomes.hear(reply)
        if isinstance(reply, Welcome):
            self.is_draining = reply.is_draining
            self._fit.take(reply)
            if not self._fit.is_other:
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


def _on_wire(outlook: Outlook | None) -> WireOutlook | None:
    return None if outlook is None else WireOutlook(int(outlook.signal))
