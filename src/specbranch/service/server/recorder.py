"""Pass on the events of a service, and write traces: verdicts with the draft's distributions.

The lookup thread, which serves the clients, calls the methods of an `EventSink`, except `drafted`, which the draft
thread calls. Callers need not know what is recorded.

A verdict is kept in memory and written after its reply has left, so no target waits for a file. A trace holds token
ids, which anyone with the model's tokenizer can read as text; so only its owner may read a new file.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from specbranch.core.distribution import Distribution
from specbranch.engines.tree_cache import EngineRow
from specbranch.private_files import open_private
from specbranch.service.server.draft_session import DraftSession
from specbranch.service.server.timeline_recorder import (
    RowVerdict,
    TimelineRecorder,
    TreeSnapshot,
    VerdictTree,
    take_snapshot,
)
from specbranch.service.wire.messages import OpenSequences, StepRequest, StepRow, unpack_tokens
from specbranch.trace import NO_DISTRIBUTION, Header, Record, encode_line, top_k_of

log = logging.getLogger(__name__)
_TOP_K = 10  # tokens of a distribution in a trace
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PreVerdictState:
    """The state of a session before a verdict changes it, as far as a trace needs it."""

    prompt: list[int]  # only at the first verdict
    distributions: list[Distribution | None]


class EventSink:
    """Passes events on to a timeline and to a trace recorder, if there are any."""

    def __init__(self, timeline: TimelineRecorder | None = None, recorder: TraceRecorder | None = None) -> None:
        self._timeline = timeline
        self._recorder = recorder
        self._trees: dict[int, TreeSnapshot] = {}  # before the verdicts of the current step, by session

    def opened(self, client: bytes, request: OpenSequences, at_s: float) -> None:
        """Record in the timeline that a client opened the sequences of this request."""
        if self._timeline is not None:
            num_tokens = sum(len(unpack_tokens(packed)) for packed in request.sequences)
            lane = (client, request.namespace)
            self._timeline.open(lane, at_s, request.planner, len(request.sequences), num_tokens)

    def before_commit(self, session: DraftSession, row: StepRow) -> PreVerdictState | None:
        """Return the state that `after_commit` needs, None if it needs none. Call this before a verdict is committed.

        Also keep a copy of the draft tree for `arrived`, if there is a timeline and it has room for more trees.
        """
        if not session.is_draftable:
            return None
        core = session.core
        if self._timeline is not None and self._timeline.takes_trees:
            with session.lock:
                self._trees[session.number] = take_snapshot(core.tree, row.num_submitted)
        if self._recorder is None:
            return None
        with session.lock:
            distributions = core.tree.distributions(row.tokens)
        return PreVerdictState(list(core.tokens) if len(core.tokens) == core.prompt_len else [], distributions)

    def after_commit(self, session: DraftSession, row: StepRow, before: PreVerdictState | None, age_s: float) -> None:
        """Record in the trace a verdict that its session has committed, unless `before` is None.

        `before` is what `before_commit` returned; `age_s` is the time since the service began.
        """
        if self._recorder is not None and before is not None:
            self._recorder.note(
                VerdictRecord(
                    session=session.number,
                    at_s=age_s,
                    prompt=before.prompt,
                    tokens=row.tokens,
                    distributions=before.distributions,
                    num_submitted=row.num_submitted,
                    is_hit=session.core.round.is_hit,
                )
            )

    def arrived(self, client: bytes, step: StepRequest, sessions: Sequence[DraftSession | None], at_s: float) -> None:
        """Record in the timeline a step whose verdicts have been committed; `sessions` has one entry for each row."""
        if self._timeline is not None:
            verdicts = [self._row_verdict(row, session) for row, session in zip(step.rows, sessions, strict=True)]
            self._timeline.arrive((client, step.namespace), at_s, verdicts)
            self._trees.clear()

    def answered(self, client: bytes, step: StepRequest, since_s: float, at_s: float, num_held: int) -> None:
        """Record in the timeline that the reply to a step, which came at `since_s`, left at `at_s`.

        `num_held` is the number of its rows that had to wait for their drafts.
        """
        if self._timeline is not None:
            self._timeline.answer((client, step.namespace), since_s, at_s, num_held)

    def drafted(self, feeds: Sequence[tuple[DraftSession, EngineRow]], start_s: float, end_s: float) -> None:
        """Record a draft step in the timeline; call this before the step's distributions are put into the trees.

        `feeds` are the rows of the step, each with its session. The step counts as prefill if it has a row that only
        prefills, or one of a session that has run no row before.
        """
        if self._timeline is not None:
            num_tokens = sum(len(feed.row.tokens) for _, feed in feeds)
            is_prefill = any(feed.nodes[0] is None or not session.core.stats.rows for session, feed in feeds)
            numbers = {session.number for session, _ in feeds}
            self._timeline.draft(start_s, end_s, len(feeds), num_tokens, is_prefill, numbers)

    def _row_verdict(self, row: StepRow, session: DraftSession | None) -> RowVerdict:
        is_hit = session.core.round.is_hit if session is not None and session.is_draftable else None
        tree = self._trees.pop(session.number, None) if session is not None else None
        met = VerdictTree(session.number, tuple(row.tokens), tree) if session is not None and tree is not None else None
        return RowVerdict(row.num_submitted, len(row.tokens), session is not None, is_hit, met)

    def flush(self) -> None:
        """Write buffered verdicts to the trace. Call after replies were sent."""
        if self._recorder is not None:
            self._recorder.flush()

    def close(self) -> None:
        """Write buffered verdicts and close the trace."""
        if self._recorder is not None:
            self._recorder.close()


@dataclass(frozen=True, slots=True)
class VerdictRecord:
    """One verdict of a session: when it came, its tokens, their distributions, and how many were submitted.

    The first record of a session also has the sequence before the verdict as `prompt`.
    """

    session: int
    at_s: float
    prompt: list[int]
    tokens: list[int]
    distributions: list[Distribution | None]
    num_submitted: int
    is_hit: bool


class TraceRecorder:
    """Writes one trace file, up to `max_bytes`. Only the thread that serves the clients uses it.

    It appends to an existing file, for example after a crash. `draft` is the name of the draft model. Tests pass
    another clock as `wall_ns` and another disk as `open_file`.
    """

    def __init__(
        self,
        path: Path,
        draft: str,
        max_bytes: int = _MAX_BYTES,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        open_file: Callable[[Path, Literal["ab"]], BinaryIO] = open_private,
    ) -> None:
        self._path = path
        self._first = wall_ns() // 1000  # added to session numbers, so that those of two runs differ
        held = _whole_len(path)
        self._file = open_file(path, "ab")
        self._file.truncate(held)
        self._left = max_bytes - held
        self._notes: list[VerdictRecord] = []
        if not held:
            self._write(encode_line(Header(draft=draft)))

    def note(self, note: VerdictRecord) -> None:
        """Buffer a verdict until `flush`, unless the trace has reached its limit."""
        if self._left > 0:
            self._notes.append(note)

    def flush(self) -> None:
        """Write buffered verdicts; if that fails, log a warning and record no more."""
        if not self._notes:
            return
        try:
            for note in self._notes:
                self._write(encode_line(_record(note, self._first)))
            self._file.flush()
        except OSError as error:
            log.warning("the trace %s ends here: %s", self._path, error)
            self._left = 0
        self._notes.clear()

    def close(self) -> None:
        """Write buffered verdicts and close the file; log a warning if its end is lost."""
        self.flush()
        try:
            self._file.close()
        except OSError as error:
            log.warning("the end of the trace %s is lost: %s", self._path, error)

    def _write(self, line: bytes) -> None:
        if self._left <= 0:
            return
        self._left -= len(line)
        if self._left <= 0:
            log.warning("the trace %s has reached its limit; later verdicts are not recorded", self._path)
            return
        self._file.write(line)


def _record(note: VerdictRecord, first: int) -> Record:
    distributions = [distribution or NO_DISTRIBUTION for distribution in note.distributions]
    return Record(
        note.tokens,
        [top_k_of(distribution, _TOP_K) for distribution in distributions],
        [round(distribution.entropy, 4) for distribution in distributions],
        note.prompt,
        session=first + note.session,
        at_s=round(note.at_s, 4),
        submitted=note.num_submitted,
        is_hit=note.is_hit,
    )


def _whole_len(path: Path) -> int:
    """Return how many bytes at the beginning of a file are whole lines; 0 if there is no file."""
    if not path.exists() or not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n") + 1
