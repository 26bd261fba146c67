"""Where events of a service go: traces of verdicts with the draft's distributions.

All others report here and need not know who listens. Called by the lookup thread; `drafted` by the draft thread.

A verdict is noted with what is at hand and written once its answer has gone out, so no target waits for a file. What is
written are token ids: whoever has the model's tokenizer can read the text. So a new file is its owner's alone.
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
_TOP_K = 10
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PreVerdictState:
    """What a trace needs of a session before a verdict changes it."""

    prompt: list[int]  # only at the first verdict
    distributions: list[Distribution | None]


class EventSink:
    """Passes on what happens to a timeline and to a recorder, as far as they were given."""

    def __init__(self, timeline: TimelineRecorder | None = None, recorder: TraceRecorder | None = None) -> None:
        self._timeline = timeline
        self._recorder = recorder
        self._trees: dict[int, TreeSnapshot] = {}  # of the step that is being taken in, by session

    def opened(self, client: bytes, request: OpenSequences, at_s: float) -> None:
        """Whole sequences came in."""
        if self._timeline is not None:
            num_tokens = sum(len(unpack_tokens(packed)) for packed in request.sequences)
            lane = (client, request.namespace)
            self._timeline.open(lane, at_s, request.planner, len(request.sequences), num_tokens)

    def before_commit(self, session: DraftSession, row: StepRow) -> PreVerdictState | None:
        """A session is about to take in a verdict."""
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
        """The session has taken the verdict in; `age_s` is the service's age."""
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
        """A target's step came in, and its sessions have taken it in."""
        if self._timeline is not None:
            verdicts = [self._row_verdict(row, session) for row, session in zip(step.rows, sessions, strict=True)]
            self._timeline.arrive((client, step.namespace), at_s, verdicts)
            self._trees.clear()

    def answered(self, client: bytes, step: StepRequest, since_s: float, at_s: float, num_held: int) -> None:
        """The answer to a step left; `num_held` of its rows had been waited for."""
        if self._timeline is not None:
            self._timeline.answer((client, step.namespace), since_s, at_s, num_held)

    def drafted(self, feeds: Sequence[tuple[DraftSession, EngineRow]], start_s: float, end_s: float) -> None:
        """A draft step is over; its distributions are not in the trees yet. A session without any is in prefill."""
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
        """Answers have gone out: there is time to write."""
        if self._recorder is not None:
            self._recorder.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._recorder is not None:
            self._recorder.close()


@dataclass(frozen=True, slots=True)
class VerdictRecord:
    """One verdict of a session: when it came, its tokens, their distributions, and how many had been submitted.

    The first one of a session has the sequence before it as well.
    """

    session: int
    at_s: float
    prompt: list[int]
    tokens: list[int]
    distributions: list[Distribution | None]
    num_submitted: int
    is_hit: bool


class TraceRecorder:
    """One trace file, which ends at `max_bytes`. Used by the lookup thread alone.

    An existing file, for example after a crash, is appended to. `wall_ns` and `open_file`: another clock and another
    disk, for tests.
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
        self._first = wall_ns() // 1000  # sessions of another run have other numbers
        held = _whole_len(path)
        self._file = open_file(path, "ab")
        self._file.truncate(held)
        self._left = max_bytes - held
        self._notes: list[VerdictRecord] = []
        if not held:
            self._write(encode_line(Header(draft=draft)))

    def note(self, note: VerdictRecord) -> None:
        """Take in a verdict."""
        if self._left > 0:
            self._notes.append(note)

    def flush(self) -> None:
        """Write what was noted; to be called when answers have gone out."""
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
        """Write what is left; what finds no room is lost, and nothing else."""
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
            log.warning("the trace %s has reached its limit; what comes now is not recorded", self._path)
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
    """How many bytes of a file are whole lines."""
    if not path.exists() or not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n") + 1
