"""What a service tells of itself while it runs: a timeline, a trace, both or neither.

All others report here and need not know who listens. Called by the lookup thread; `drafted` by the compute thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.distribution import Distribution
from specbranch.engines.tree_cache import Feed
from specbranch.service.recorder import Note, Recorder
from specbranch.service.sessions import DraftSession
from specbranch.service.snapshot import Snapshot, take_snapshot
from specbranch.service.timeline import RowVerdict, TimelineRecorder, VerdictTree
from specbranch.service.wire import Open, Step, StepRow, unpack


@dataclass(frozen=True, slots=True)
class Before:
    """What a trace needs of a session before a verdict changes it."""

    prompt: list[int]  # only at the first verdict
    distributions: list[Distribution | None]


class Observer:
    """Passes on what happens to a timeline and to a recorder, as far as they were given."""

    def __init__(self, timeline: TimelineRecorder | None = None, recorder: Recorder | None = None) -> None:
        self._timeline = timeline
        self._recorder = recorder
        self._trees: dict[int, Snapshot] = {}  # of the step that is being taken in, by session

    def opened(self, client: bytes, request: Open, at_s: float) -> None:
        """Whole sequences came in."""
        if self._timeline is not None:
            num_tokens = sum(len(unpack(packed)) for packed in request.sequences)
            lane = (client, request.namespace)
            self._timeline.open(lane, at_s, request.planner, len(request.sequences), num_tokens)

    def before_commit(self, session: DraftSession, row: StepRow) -> Before | None:
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
        return Before(list(core.tokens) if len(core.tokens) == core.prompt_len else [], distributions)

    def after_commit(self, session: DraftSession, row: StepRow, before: Before | None, age_s: float) -> None:
        """The session has taken the verdict in; `age_s` is the service's age."""
        if self._recorder is not None and before is not None:
            self._recorder.note(
                Note(
                    session=session.number,
                    at_s=age_s,
                    prompt=before.prompt,
                    tokens=row.tokens,
                    distributions=before.distributions,
                    num_submitted=row.num_submitted,
                    is_hit=session.core.round.is_hit,
                )
            )

    def arrived(self, client: bytes, step: Step, sessions: Sequence[DraftSession | None], at_s: float) -> None:
        """A target's step came in, and its sessions have taken it in."""
        if self._timeline is not None:
            verdicts = [self._row_verdict(row, session) for row, session in zip(step.rows, sessions, strict=True)]
            self._timeline.arrive((client, step.namespace), at_s, verdicts)
            self._trees.clear()

    def answered(self, client: bytes, step: Step, since_s: float, at_s: float, num_held: int) -> None:
        """The answer to a step left; `num_held` of its rows had been waited for."""
        if self._timeline is not None:
            self._timeline.answer((client, step.namespace), since_s, at_s, num_held)

    def drafted(self, feeds: Sequence[tuple[DraftSession, Feed]], start_s: float, end_s: float) -> None:
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
