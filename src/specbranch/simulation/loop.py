"""The simulator's event loop: any planners, target and draft, in virtual time.

A lane is a model on a device of its own; draft and target compute at the same time. A draft step that is running when a
verdict arrives runs to its end, and its distributions enter the tree only then. The target starts a step when every
session has a submission or the deadline has passed. Lanes supply the durations, so the same loop runs scripted engines
and measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specbranch.core.costs import PairModel
from specbranch.core.distribution import Distribution
from specbranch.core.node import Node
from specbranch.core.round import Verdict
from specbranch.core.scheduler import request_rows, select_rows
from specbranch.core.session import Session


class TargetLane(Protocol):
    """Interface of the target model on its device: the methods that the event loop calls."""

    def step_s(self, sessions: Sequence[Session]) -> float:
        """Return the virtual time that one step takes to verify the submissions of these sessions."""
        ...

    def verify(self, session: Session) -> Verdict:
        """Return the verdict on a session's submission; the loop calls this when the step ends."""
        ...


class DraftLane(Protocol):
    """Interface of the draft model on its device, as the event loop uses it. A step has at most `row_limit` rows."""

    row_limit: int

    def run(self, rows: Sequence[tuple[Session, Node]]) -> tuple[list[Distribution], float]:
        """Compute the distributions after these nodes in one draft step; return them, and the step's virtual time."""
        ...


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A finished step of the draft: when it began and ended, and the nodes after which it computed distributions."""

    start_s: float
    end_s: float
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStep:
    """A finished step of the target; each tuple has one entry per session.

    `wait_s` is how long the target waited for drafts before the step, and `submitted` the number of submitted tokens.
    `hits`: before the verdict, the draft had computed its distribution after the verdict's last token.
    """

    start_s: float
    end_s: float
    wait_s: float
    submitted: tuple[int, ...]
    verdicts: tuple[Verdict, ...]
    hits: tuple[bool, ...]


Step = DraftStep | TargetStep


@dataclass(slots=True)
class _Drafting:
    start_s: float
    end_s: float
    rows: list[tuple[Session, Node]]
    distributions: list[Distribution]


@dataclass(slots=True)
class _Verifying:
    start_s: float
    end_s: float
    wait_s: float
    batch: list[Session]


class Loop:
    """Runs sessions to their end in virtual time, and calls `observe` with each step when it ends.

    The target waits for drafts up to `deadline_s` before a step. `costs` learns from all steps.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        target: TargetLane,
        draft: DraftLane,
        costs: PairModel,
        deadline_s: float = math.inf,
        observe: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self._sessions = sessions
        self._target = target
        self._draft = draft
        self._costs = costs
        self._deadline_s = deadline_s
        self._observe = observe
        self._drafting: _Drafting | None = None
        self._verifying: _Verifying | None = None
        self._idle_since_s = 0.0
        self.now_s = 0.0

    def run(self) -> float:
        """Run until every session is finished; return the virtual time at the end."""
        while active := [session for session in self._sessions if not session.is_finished]:
            self._start_target(active)
            self._start_draft(active)
            if self._verifying is None and self._drafting is None:
                self._stand_aside(active)
                continue
            self._advance()
        return self.now_s

    def _start_target(self, active: list[Session]) -> None:
        if self._verifying is not None:
            return
        wait_s = self.now_s - self._idle_since_s
        ready = [session.propose() is not None for session in active]
        if not all(ready):
            if self.now_s < self._idle_since_s + self._deadline_s:
                return
            self._stand_aside(active)
        end_s = self.now_s + self._target.step_s(active)
        self._verifying = _Verifying(self.now_s, end_s, wait_s, active)

    def _stand_aside(self, active: list[Session]) -> None:
        for session in active:
            session.skip_round()

    def _start_draft(self, active: list[Session]) -> None:
        if self._drafting is not None:
            return
        requests = [
            request_rows(session, session.round, nodes, is_awaited=session.round.is_waiting)
            for session in active
            if (nodes := session.rows())
        ]
        # No session is ever in prefill here, so the size of the chunk does not matter.
        granted = select_rows(requests, self._draft.row_limit, prefill_chunk=1).requests
        rows = [(request.session, node) for request in granted for node in request.granted]
        if rows:
            distributions, step_s = self._draft.run(rows)
            self._drafting = _Drafting(self.now_s, self.now_s + step_s, rows, distributions)

    def _advance(self) -> None:
        """Advance the time to the next event, a deadline or the end of a step, and finish the step that ends then.

        If a draft step and a target step end at the same time, finish the draft step; the next call finishes the other.
        """
        draft_s = self._drafting.end_s if self._drafting else math.inf
        target_s = self._verifying.end_s if self._verifying else self._idle_since_s + self._deadline_s
        self.now_s = min(draft_s, target_s)
        if self._drafting and draft_s <= target_s:
            self._finish_draft(self._drafting)
        elif self._verifying:
            self._finish_target(self._verifying)

    def _finish_draft(self, step: _Drafting) -> None:
        self._drafting = None
        for (session, node), distribution in zip(step.rows, step.distributions, strict=True):
            session.add_distribution(node, distribution)
        self._costs.draft.observe(len(step.rows), step.end_s - step.start_s)
        self._observe(DraftStep(step.start_s, step.end_s, tuple(node for _, node in step.rows)))

    def _finish_target(self, step: _Verifying) -> None:
        self._verifying = None
        self._idle_since_s = self.now_s
        submitted = tuple(len(session.submitted) for session in step.batch)
        verdicts = tuple(self._target.verify(session) for session in step.batch)
        step_s = step.end_s - step.start_s
        for session, verdict in zip(step.batch, verdicts, strict=True):
            session.commit(verdict.committed(session.submitted))
            session.stats.target_s += step_s
            session.stats.wait_s += step.wait_s
            session.count_rollback()
        committed = sum(1 + verdict.accepted for verdict in verdicts)
        self._costs.observe_step(len(submitted), sum(submitted), committed, step_s)
        hits = tuple(session.round.is_hit for session in step.batch)
        self._observe(
            TargetStep(
                start_s=step.start_s,
                end_s=step.end_s,
                wait_s=step.wait_s,
                submitted=submitted,
                verdicts=verdicts,
                hits=hits,
            )
        )
