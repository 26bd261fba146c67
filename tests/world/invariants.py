"""What must be true of a simulated world at every step. Each rule has a name; what breaks it raises `Violation`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Literal

from specbranch.core.round import Stats
from specbranch.service.client.client import DraftClient
from specbranch.service.server.draft_session import DraftSession
from specbranch.service.server.store import SessionStore
from specbranch.service.wire.messages import StatsReply
from specbranch.service.wire.payloads import Digest
from tests.world.engine import VOCAB, target_token
from tests.world.ledger import Ledger
from tests.world.service import MAX_EVENTS, Service

Rule = Literal["text", "deadline", "namespace", "memory", "counters", "containment", "recovery"]
SLACK_S = 0.002  # beyond a call's deadline: a poll counts whole milliseconds, and one message is sent in any case
_NAMES = tuple(field.name for field in fields(Stats))
_SUMMED = ("rounds", "hits", "submitted", "accepted", "emitted")
_MAX_NEWS = 512  # sessions that wait to be looked at, the same one many times


class Violation(AssertionError):
    """A rule that was broken."""

    def __init__(self, rule: Rule, fact: str) -> None:
        super().__init__(f"{rule}: {fact}")
        self.rule = rule


class Invariants:
    """Sees all that happens. `num_checks` says how often the whole service was looked at."""

    def __init__(self) -> None:
        self._texts: set[tuple[bytes, bytes]] = set()  # namespace and digest of what targets have verified
        self._calls: Counter[DraftClient] = Counter()
        self._begin()

    def service_began(self, ledger: Ledger, store: SessionStore) -> None:
        self._begin()
        self.ledger = ledger
        retire = store._retire

        def retired(session: DraftSession) -> None:
            self._seen.setdefault(session, 0)  # some come and go between two looks at the whole service
            retire(session)

        store._retire = retired  # type: ignore[method-assign]

    def _begin(self) -> None:
        self._seen: dict[DraftSession, int] = {}  # every session there was, and how long its text was when it was read
        self._totals = Stats()
        self.ledger = Ledger()

    def text_grew(self, tokens: Sequence[int], num_new: int) -> None:
        """Rule `text`: every token is what the target itself says behind those before it."""
        for length in range(len(tokens) - num_new, len(tokens)):
            own = target_token(tuple(tokens[max(length - 3, 0) : length]))
            _require(tokens[length] == own, "text", f"token {length} is {tokens[length]}; the target says {own}")

    def verified(self, namespace: bytes, tokens: Sequence[int]) -> None:
        """A target is about to tell of this text."""
        self._texts.add((namespace, Digest(tokens).name))

    def call_ended(
        self, client: DraftClient, took_s: float, deadline_s: float, found: list[list[int]], num_rows: int
    ) -> None:
        """Rule `deadline`, and what else a client promises of a call."""
        _require(took_s <= deadline_s + SLACK_S, "deadline", f"a call took {took_s:.4f} s, not {deadline_s:.4f} s")
        counts = client.counts
        _require(len(found) == num_rows, "containment", f"{len(found)} proposals for {num_rows} rows")
        _require(not counts.faults, "containment", "the client has failed")
        _require(all(0 <= token < VOCAB for row in found for token in row), "text", "a token that the target lacks")
        self._calls[client] += 1
        _require(counts.calls == self._calls[client], "counters", f"{counts.calls} calls were counted")
        ended = counts.answered + counts.timeouts + counts.unreachable + counts.not_waited + counts.other_vocab
        _require(ended <= counts.calls, "counters", f"{ended} ends of {counts.calls} calls")

    def reported(self, namespace: bytes, stats: StatsReply | None) -> None:
        """Rule `counters`, as clients are told."""
        if stats is not None:
            _require(stats.hits <= stats.rounds, "counters", f"{stats.hits} hits in {stats.rounds} rounds")
            _require(stats.accepted <= stats.submitted, "counters", f"{stats.accepted} of {stats.submitted} accepted")

    def check(self, service: Service) -> None:
        """All rules that hold of a service at any moment."""
        sessions = service.server.store.snapshot()
        for session in (*sessions, *service.server.store._dropped):
            self._seen.setdefault(session, 0)
        self._check_texts(sessions)
        self._check_namespaces(sessions)
        self._check_memory(service, sessions)
        self._check_counters(service)
        self._check_sums(service)
        self._check_faults(service)

    def check_end(self, service: Service) -> None:
        """After all clients have left, and all sessions were forgotten, nothing is left of them."""
        store, engine = service.server.store, service.engine
        left = (len(store), store.num_tokens, engine.num_handles, engine.num_tokens, len(store._prefixes._holders))
        _require(not any(left), "memory", f"sessions, tokens, handles, cells, prefixes are left: {left}")
        _require(not service.server.handler._waiting.all(), "memory", "an answer is held back for nobody")

    def _check_texts(self, sessions: Sequence[DraftSession]) -> None:
        for session in sessions:
            length = len(session.core.tokens)
            if self._seen[session] == length:
                continue
            self._seen[session] = length
            name = Digest(session.core.tokens).name if session.is_draftable else session.key[1]
            is_true = name == session.key[1] and (session.namespace, name) in self._texts
            _require(is_true, "text", f"session {session.number} holds a text that no target has verified")

    def _check_namespaces(self, sessions: Sequence[DraftSession]) -> None:
        owners: dict[int, bytes] = {}
        for session in sessions:
            own, donor = session.namespace, session.prefix_donor
            _require(session.key[0] == own, "namespace", "a session is found under another namespace")
            _require(donor is None or donor[0].namespace == own, "namespace", "a cache is lent to another namespace")
            owner = owners.setdefault(id(session.core.round.costs.history), own)
            _require(owner == own, "namespace", "two namespaces share one memory of answers")

    def _check_memory(self, service: Service, sessions: Sequence[DraftSession]) -> None:
        store, engine, limits, compute = service.server.store, service.engine, service.limits, service.server.runner
        num_tokens = sum(len(session.core.tokens) for session in sessions)
        _require(store.num_tokens == num_tokens, "memory", f"{num_tokens} tokens are counted as {store.num_tokens}")
        _require(len(sessions) <= limits.max_sessions, "memory", f"{len(sessions)} sessions")
        is_within = num_tokens <= limits.max_session_tokens or len(sessions) == 1
        _require(is_within, "memory", f"{num_tokens} tokens of sequences")
        _require(engine.num_handles <= limits.max_handles, "memory", f"{engine.num_handles} handles")
        _require(engine.num_tokens <= limits.max_tokens, "memory", f"{engine.num_tokens} tokens in the cache")
        held = sum(session.tree_cache.num_handles for session in {*sessions, *store._dropped})
        _require(held == engine.num_handles, "memory", f"{engine.num_handles} handles are open, {held} are known")
        marked = set(store._prefixes._marks)
        _require(marked <= set(sessions), "memory", "a forgotten session is still known by its beginning")
        num_news = compute._news.qsize() + compute._grown.qsize()
        _require(num_news <= _MAX_NEWS, "memory", f"{num_news} sessions wait to be looked at")
        _require(len(service.timeline) <= MAX_EVENTS, "memory", f"{len(service.timeline)} events in the timeline")

    def _check_counters(self, service: Service) -> None:
        ledger, counts = self.ledger, service.server.handler.counts
        for name, counted, seen in (
            ("steps", counts.steps, ledger.num_steps),
            ("lookups", counts.lookups, ledger.num_rows),
            ("refusals", counts.refused, ledger.num_unreadable),
        ):
            _require(counted == seen, "counters", f"{counted} {name} were counted, {seen} came in")
        _require(ledger.num_unknown <= counts.unknown <= counts.lookups, "counters", f"{counts.unknown} unknown texts")
        _require(counts.opened <= ledger.num_opened, "counters", f"{counts.opened} of {ledger.num_opened} opened")
        compute, engine = service.server.runner.counts, service.engine
        under_way = engine.num_runs - compute.steps - compute.failed_steps
        _require(under_way in (0, 1), "counters", f"{under_way} draft steps are not counted")
        _require(compute.rows == engine.num_outputs, "counters", f"{compute.rows} of {engine.num_outputs} draft rows")

    def _check_sums(self, service: Service) -> None:
        store, counts = service.server.store, service.server.handler.counts
        total = store.stats()
        known = counts.lookups - counts.unknown
        _require(total.hits <= total.rounds <= known, "counters", f"{total.rounds} rounds, {known} verdicts")
        _require(total.rejected <= total.submitted - total.accepted, "counters", f"{total}: rejected")
        _require(total.emitted >= total.accepted + total.rounds, "counters", f"{total}: emitted")
        _require(total.submitted <= self.ledger.num_submitted, "counters", f"{total.submitted} were submitted")
        seen = Stats.total([Stats(), *(session.core.stats for session in self._seen)])
        for name in _SUMMED:
            summed, value = getattr(seen, name), getattr(total, name)
            _require(summed == value, "counters", f"{value} {name} are counted, {summed} were made")
        for session in self._seen:
            stats, tree = session.core.stats, session.core.tree
            fates = stats.used + stats.rolled_back + tree.num_alive
            _require(tree.num_drafted == fates, "counters", f"{tree.num_drafted} drafted tokens have {fates} fates")
        fell = [name for name in _NAMES if getattr(total, name) < getattr(self._totals, name)]
        _require(not fell, "counters", f"counters fell: {fell}")
        self._totals = total

    def _check_faults(self, service: Service) -> None:
        dispatch, compute = service.server.handler, service.server.runner
        _require(not dispatch.faults.count, "containment", "the lookup thread has met a fault")
        caused = service.engine.num_errors
        _require(compute.faults.count <= caused, "containment", f"{compute.faults.count} faults from {caused} errors")

    def check_turn(self, service: Service, now_s: float) -> None:
        """After a turn of the lookup thread nobody waits who should have been answered."""
        waiting = {pending.client for pending in service.server.handler._waiting.all()}
        _require(waiting == set(self.ledger.asked), "containment", "a step was left without an answer")
        deadline_s = service.server.handler.next_deadline_s()
        _require(deadline_s is None or deadline_s > now_s, "deadline", "an answer is held back beyond its time")


def _require(is_true: bool, rule: Rule, fact: str) -> None:
    if not is_true:
        raise Violation(rule, fact)
