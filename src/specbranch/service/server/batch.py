"""Plan the batch of a draft step: its sessions, the rows of each session, and the tokens to prefill.

Planning takes time too: if several tenants share the draft, the number of sessions is limited, so that planning for
them and running their rows at most about doubles the time of a step.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from specbranch.core.costs import StepCost, StepTimeModel
from specbranch.core.scheduler import MIN_PREFILL_CHUNK, RowRequest, request_rows, select_rows
from specbranch.engines.base import EngineInfo
from specbranch.engines.tree_cache import NUM_FIRST, EngineRow
from specbranch.errors import EngineFull
from specbranch.service.server.draft_session import DraftSession, State
from specbranch.service.server.fair_queue import DecayedUsage
from specbranch.service.server.prometheus import DraftRunnerCounts
from specbranch.service.server.store import FaultGuard

_MIN_SILENCE_S, _MAX_SILENCE_S = 1.0, 20.0  # after which a tenant counts as gone
_MIN_PAUSE_S = 0.05  # between two steps of a tenant; messages of one step come closer together
_PREFILL_HALF_LIFE_S = 10.0
_SMOOTHING = 0.1  # weight of a new time of planning
_MIN_WINDOW, _MAX_PREFILL_S = 256, 0.5  # tokens, and the time of a prefill while a target decodes without drafts
_WAITED_CHUNK = 256  # tokens, where all wait for a prefill: a larger chunk takes less time a token
_MIN_PLANNED = 4  # sessions, however long planning takes
_OTHERS_SHARE = 4  # one session in four may be one that no present tenant decodes
_MAX_OTHERS_PLANNING_S = 0.004  # for those sessions, per step
_REST_FACTOR, _MAX_REST_S = 16, 0.25  # then these sessions are left out for 16 times as long
_Queues = OrderedDict[bytes, OrderedDict[DraftSession, None]]  # by tenant
SessionRow = tuple[DraftSession, EngineRow]


@dataclass(slots=True)
class TenantActivity:
    """When a tenant last sent a message, and its usual pause between two steps, to tell whether it is present."""

    last_s: float = -math.inf
    pause_s: float = 0.0

    def record(self, now_s: float) -> None:
        """Record a message that came at `now_s`: update `last_s` and, after a pause of more than 50 ms, `pause_s`."""
        pause_s = now_s - self.last_s
        if _MIN_PAUSE_S < pause_s < math.inf:
            self.pause_s = max(pause_s, self.pause_s / 2)
        self.last_s = now_s

    def is_present(self, now_s: float) -> bool:
        """Return whether the tenant's last message is less than a timeout ago.

        The timeout is twice the tenant's usual pause between two steps, clamped to the range from 1 to 20 s.
        """
        return now_s - self.last_s < min(max(_MIN_SILENCE_S, 2 * self.pause_s), _MAX_SILENCE_S)


class RunnableSessions:
    """Sessions that may have rows to run, by tenant: awaited by a target, being decoded, or only opened so far."""

    def __init__(self) -> None:
        self._awaited, self._decoded, self._opened = self._kinds = _Queues(), _Queues(), _Queues()
        self._kind_of: dict[DraftSession, _Queues] = {}
        self._num_selections = 0

    def __len__(self) -> int:
        return len(self._kind_of)

    def __contains__(self, session: DraftSession) -> bool:
        return session in self._kind_of

    def all(self) -> list[DraftSession]:
        """Return all sessions: first those that a target waits for, then the decoded ones, then those only opened."""
        return list(chain.from_iterable(queue for kind in self._kinds for queue in kind.values()))

    @property
    def tenants(self) -> set[bytes]:
        """The tenants that have at least one runnable session."""
        return {tenant for kind in self._kinds for tenant in kind}

    def add(self, session: DraftSession) -> None:
        """Add a session by its present kind: awaited, decoded, or only opened; if it has changed its kind, move it."""
        if session.state is State.TARGET_WAITING:
            kind = self._awaited
        else:
            kind = self._decoded if session.has_verdict else self._opened
        if self._kind_of.get(session) is not kind:
            self.discard(session)
            kind.setdefault(session.tenant, OrderedDict())[session] = None
            self._kind_of[session] = kind

    def discard(self, session: DraftSession) -> None:
        """Remove a session, if it is among the runnable ones."""
        kind = self._kind_of.pop(session, None)
        if kind is not None:
            del kind[session.tenant][session]
            if not kind[session.tenant]:
                del kind[session.tenant]

    def select(
        self, max_sessions: int, max_others: int, present: Collection[bytes]
    ) -> tuple[list[DraftSession], list[DraftSession]]:
        """Return the sessions to plan for next, at most `max_sessions`, and at most `max_others` less important ones.

        The less important ones were only opened, or no target waits for them and their tenants are not `present`.
        Awaited sessions go first, and the first session of every tenant before a second of any tenant. Move the
        returned sessions to the end of their queues.
        """
        needed: dict[bytes, list[DraftSession]] = {}
        others: list[list[DraftSession]] = []
        for tenant, queue in self._awaited.items():
            needed[tenant] = list(islice(queue, max_sessions))
        for tenant, queue in self._decoded.items():
            if tenant in present:
                needed.setdefault(tenant, []).extend(islice(queue, max_sessions))
            else:
                others.append(list(islice(queue, max_others)))
        others += [list(islice(queue, max_others)) for queue in self._opened.values()]
        self._num_selections += max_others > 0
        first = self._num_selections % max(len(others), 1)  # another one each time, so that no queue waits for ever
        others = others[first:] + others[:first]
        selected = _interleave([*needed.values()], max_sessions), _interleave(others, max_others)
        for session in chain(*selected):
            kind = self._kind_of[session]
            kind[session.tenant].move_to_end(session)
            kind.move_to_end(session.tenant)
        return selected


def _interleave(queues: Sequence[Sequence[DraftSession]], count: int) -> list[DraftSession]:
    """Return the first session of every queue, then the second one of each, and so on, at most `count`."""
    ranks = range(max(map(len, queues), default=0))
    return list(islice((queue[rank] for rank in ranks for queue in queues if rank < len(queue)), count))


@dataclass(slots=True)
class DraftBatch:
    """The plan of one draft step: each row with its session, and the number of sessions considered for the step.

    If the engine is so full that no row could be made, `without_room` has the sessions whose nodes were chosen.
    """

    num_sessions: int
    rows: list[SessionRow] = field(default_factory=list)
    without_room: list[DraftSession] = field(default_factory=list)


class BatchPlanner:
    """Chooses sessions and rows for each draft step, and learns how long planning and prefill take.

    Only the draft thread uses it. It updates `counts`, and adds the times of draft steps without prefill to `cost`.
    """

    def __init__(
        self,
        info: EngineInfo,
        faults: FaultGuard,
        cost: StepTimeModel,
        counts: DraftRunnerCounts,
        clock: Callable[[], float],
        prefill_chunk: int,
    ) -> None:
        self._info = info
        self._faults = faults
        self._cost = cost
        self._counts = counts
        self._clock = clock
        self._prefill_chunk = prefill_chunk
        self.runnable = RunnableSessions()
        self._activity: dict[bytes, TenantActivity] = {}  # by tenant
        self._prefilled = DecayedUsage(_PREFILL_HALF_LIFE_S)  # tokens, by tenant
        self._planning_s = 0.0  # per session or row of a step, without the engine's part, smoothed
        self._is_shared = False  # by several tenants
        self._others_at_s = 0.0  # when the sessions that no present tenant decodes are planned for again
        self._may_pause = False  # there are no other sessions to plan for

    def record_activity(self, session: DraftSession) -> None:
        """Add a session to the runnable ones, and record that its tenant has sent a message."""
        self.runnable.add(session)
        activity = self._activity.get(session.tenant)
        if activity is None:
            activity = self._activity[session.tenant] = TenantActivity()
        activity.record(self._clock())

    def pause_s(self) -> float:
        """Return how long to wait for a message before the next step is planned; infinity if no session is runnable."""
        if not self.runnable:
            return math.inf
        return max(self._others_at_s - self._clock(), 0.0) if self._may_pause else 0.0

    def plan(self) -> DraftBatch:
        """Choose the rows of the next step, open or fork their engine handles, and return them as a batch."""
        sessions, others = self._select_sessions()
        requests = self._requests(sessions, others)
        cost = self._step_cost() if self._is_shared else None
        chunk = self._prefill_chunk
        if all(request.session.core.waits_for_prefill for request in requests):
            chunk = max(chunk, _WAITED_CHUNK)
        schedule = select_rows(requests, self._info.row_limit, chunk, cost, self._is_shared)
        num_granted = sum([len(request.granted) for request in schedule.requests])
        self._counts.waiting_rows = sum([len(request.nodes) for request in requests]) - num_granted
        for request in schedule.requests:  # before any row is made: its tokens are not in the engine's cache yet
            if request.session.prefix_donor is not None:
                self._adopt_prefix(request.session)
        batch = DraftBatch(len(sessions) + len(others))
        for request in schedule.requests:
            with self._faults.guard(request.session):
                rows = self._engine_rows(request, schedule.prefill_chunk)
                batch.rows += [(request.session, row) for row in rows]
        if not batch.rows:
            granted = [request.session for request in schedule.requests if request.granted]
            batch.without_room = [session for session in granted if not session.is_dropped]
        return batch

    def observe_step(self, rows: Sequence[SessionRow], num_outputs: int, step_s: float) -> None:
        """Learn the time of rows from a step or, if the step has prefilled, the time of a prefilled token.

        Prefilled tokens also count as usage of their tenants. `num_outputs` is the number of distributions that the
        step has returned.
        """
        num_prefilled = sum([len(row.row.tokens) for _, row in rows]) - num_outputs
        if not num_prefilled:
            self._cost.observe(num_outputs, step_s)
            return
        if num_prefilled >= MIN_PREFILL_CHUNK:  # the time of fewer tokens says little
            self._cost.observe_prefill(num_prefilled, num_outputs, step_s)
        now_s = self._clock()
        for session, row in rows:
            self._prefilled.add(session.tenant, len(row.row.tokens) - row.row.num_outputs, now_s)

    def observe_planning(self, batch: DraftBatch, planning_s: float) -> None:
        """Update the estimated planning time per session and row; `planning_s` is a step's time outside the engine."""
        each_s = planning_s / (batch.num_sessions + sum([len(row.nodes) for _, row in batch.rows]))
        self._planning_s += _SMOOTHING * (each_s - self._planning_s)

    def _select_sessions(self) -> tuple[list[DraftSession], list[DraftSession]]:
        """Return the sessions to plan for: all if there is one tenant, else at most as many as double a step's time.

        They come in two lists. The second one is short: it has sessions that were only opened, or that no present
        tenant decodes, for which little planning time is spent. Sessions in neither list come in a later step.
        """
        self._may_pause = self._is_shared = False
        if len(self._activity.keys() | self.runnable.tenants) > 1:
            now_s = self._clock()
            self._activity = {tenant: one for tenant, one in self._activity.items() if one.is_present(now_s)}
            self._is_shared = len(self._activity.keys() | self.runnable.tenants) > 1
        cost = self._cost.cost if self._is_shared else None
        if cost is None or self._planning_s <= 0:
            return self.runnable.all(), []
        max_sessions = max(_MIN_PLANNED, int(cost.base_s / (self._planning_s + cost.per_row_s)))
        max_others = max(1, max_sessions // _OTHERS_SHARE)
        if len(self.runnable) <= max_sessions:
            max_sessions = max_others = len(self.runnable)
        if self._clock() < self._others_at_s:
            max_others = 0
        selected = self.runnable.select(max_sessions, max_others, self._activity.keys())
        self._may_pause = not any(selected)
        return selected

    def _requests(
        self, sessions: Sequence[DraftSession], others: Sequence[DraftSession]
    ) -> list[RowRequest[DraftSession]]:
        """Return one row request for each session that has nodes whose distributions are wanted.

        `others` are less important sessions (see `RunnableSessions.select`). Stop planning for them after 4 ms, and set
        the earliest time at which a later step may plan for such sessions again.
        """
        now_s = self._clock()  # read once: all sessions of a tenant have then prefilled equally much
        requests = [self._row_request(session, now_s) for session in sessions]
        if others:
            start_s = end_s = self._clock()
            for session in others:
                if end_s - start_s < _MAX_OTHERS_PLANNING_S:
                    requests.append(self._row_request(session, now_s))
                end_s = self._clock()
            self._others_at_s = end_s + min(_REST_FACTOR * (end_s - start_s), _MAX_REST_S)
        return [request for request in requests if request is not None]

    def _row_request(self, session: DraftSession, now_s: float) -> RowRequest[DraftSession] | None:
        """Return a session's request to compute distributions; None if it needs none, or waits for its prefix donor.

        The prefix donor is another session with the same prefix; this one waits while the donor prefills it. A session
        that needs no distributions, an idle one, and a paused one that no target waits for leave the runnable sessions.
        """
        request = None
        with self._faults.guard(session), session.lock:
            self._choose_window(session)
            core, num_unprefilled = session.core, session.num_unprefilled
            state = session.state
            nodes = () if state is State.DROPPED else core.rows()
            # A planner that waits for prefill shares its cores: the target prefills there now.
            if not nodes and state is State.PREFILLING and num_unprefilled > 1 and not core.waits_for_prefill:
                nodes = (core.tree.root,)  # the planner drafts only while a target waits, and none waits for a prefill
            is_awaited = session.state is State.TARGET_WAITING
            if not nodes or session.is_idle or (session.is_paused and not is_awaited):
                self.runnable.discard(session)
                return None
            self.runnable.add(session)  # a target that waited for it may have gone on
            if session.prefix_donor is None or not self._is_donor_prefilling(session):
                num_prefilled = self._prefilled.get(session.tenant, now_s) if self._is_shared else 0.0
                request = request_rows(
                    session, core.round, nodes, is_awaited, num_unprefilled, session.tenant, num_prefilled
                )
        return request

    def _choose_window(self, session: DraftSession) -> None:
        """Limit a session's prefill to a window at its end, if its target decodes already and could use drafts now.

        Prefilling the window takes about half a second. A session that has prefilled less than half begins again. A
        planner that waits for prefill gets no windows: it weighs the time of the whole prefill.
        """
        core, cache, token_s = session.core, session.tree_cache, self._cost.prefill_token_s
        if core.waits_for_prefill or not session.has_verdict or not token_s:
            return
        window = max(_MIN_WINDOW, int(_MAX_PREFILL_S / token_s))
        if session.num_unprefilled > max(window + NUM_FIRST, core.tree.root.position // 2):
            cache.close()
            cache.window = window

    def _step_cost(self) -> StepCost | None:
        """Return the measured cost of a draft step, with planning and prefill; None before the first measurement."""
        cost = self._cost.cost
        if cost is None:
            return None
        return replace(
            cost, per_row_s=cost.per_row_s + self._planning_s, per_prefill_token_s=self._cost.prefill_token_s
        )

    def _engine_rows(self, request: RowRequest[DraftSession], prefill_chunk: int) -> list[EngineRow]:
        """Return the engine rows for the chosen nodes of a session; make their handles in the engine's cache."""
        session = request.session
        with session.lock:
            core = session.core
            if session.state is State.DROPPED:
                return []
            if core.round.index != request.round_index:
                # A verdict came in between: the old nodes may be gone.
                request.granted = list(core.rows()[: len(request.granted)])
            return session.tree_cache.rows_for(core.tokens, core.tree, request.granted, prefill_chunk)

    def _is_donor_prefilling(self, session: DraftSession) -> bool:
        """Return whether a session without handles should wait for its prefix donor, which is still prefilling.

        No session waits for a donor that is dropped, idle or not runnable. A session with a verdict does not wait for a
        donor that few steps plan for: one without a verdict or, among several tenants, one of a tenant not present.
        """
        found = session.prefix_donor  # read once: the lookup thread may drop the session meanwhile
        if found is None or session.tree_cache.num_handles:
            return False
        donor, _ = found
        if donor not in self.runnable or donor.is_dropped or donor.is_idle:
            return False
        has_turns = donor.has_verdict and (not self._is_shared or donor.tenant in self._activity)
        return donor.num_unprefilled > 1 and (has_turns or not session.has_verdict)

    def _adopt_prefix(self, session: DraftSession) -> None:
        """Clear `prefix_donor`; start the session's cache with a copy of the prefix if the donor's still holds it."""
        found, session.prefix_donor = session.prefix_donor, None
        if found is None or not session.is_draftable:
            return
        donor, length = found
        if donor.is_dropped or session.tree_cache.num_handles:
            return
        prefix = None
        with self._faults.guard(donor):
            prefix = _fork_prefix(donor, session, length)
        if prefix is not None:
            session.tree_cache.start_from(*prefix)
            self._counts.borrowed_tokens += prefix[1]


def _fork_prefix(donor: DraftSession, session: DraftSession, min_len: int) -> tuple[int, int] | None:
    """Return a new handle with the common prefix of both sequences, at least `min_len` tokens, and its length.

    Return None if no handle of the donor holds this prefix, or if the engine is full.
    """
    with donor.lock, contextlib.suppress(EngineFull):
        tokens = session.core.tokens
        length = _common_prefix_len(donor.core.tokens, tokens, min_len)
        handle = donor.tree_cache.fork_prefix(donor.core.tokens, donor.core.tree, length)
        return None if handle is None else (handle, length)
    return None


def _common_prefix_len(one: Sequence[int], other: Sequence[int], min_len: int) -> int:
    """Return how many tokens both sequences begin with, not counting the last token of `other`.

    The first `min_len` tokens are known to be equal.
    """
    length = min_len
    while length < min(len(one), len(other) - 1) and one[length] == other[length]:
        length += 1
    return length
