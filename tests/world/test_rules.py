"""Every rule of a simulated world can be broken: with a fault put into the real code, some world finds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specbranch.core.round import Verdict
from specbranch.core.session import Session
from specbranch.core.tree import Tree
from specbranch.service.client.client import DraftClient, ServiceConnection
from specbranch.service.client.transport import MessageChannel
from specbranch.service.server.draft_runner import DraftRunner
from specbranch.service.server.draft_session import DraftSession
from specbranch.service.server.handler import RequestHandler
from specbranch.service.server.lookup import SessionLookup
from specbranch.service.server.recorder import TraceRecorder
from specbranch.service.server.store import FaultGuard, PrefixIndex, SessionStore
from specbranch.service.server.tenants import Tenants
from specbranch.service.wire.messages import Reply
from specbranch.simulation import scripted
from tests.world.invariants import Rule, Violation
from tests.world.test_world import NUM_WORLDS
from tests.world.world import World

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


def accept_everything(patch: Patch) -> None:
    patch.setattr(scripted, "match", lambda submitted, sample: Verdict(len(submitted), sample(len(submitted))))


def keep_what_was_submitted(patch: Patch) -> None:
    commit = Session.commit

    def wrong(self: Session, tokens: list[int], *rest: Any) -> list[int]:
        return commit(self, [*self.submitted[:1], *tokens], *rest)

    patch.setattr(Session, "commit", wrong)


def wait_longer(patch: Patch) -> None:
    patch.setattr(DraftClient, "_reply_timeout_s", lambda self, step_s: 2 * self._options.deadline_s)


def wait_again_for_every_reply(patch: Patch) -> None:
    receive = MessageChannel.receive

    def wrong(self: MessageChannel, end_s: float, waits: bool = False) -> list[Reply | None]:
        return receive(self, max(end_s, self._clock() + 0.05), waits)

    patch.setattr(MessageChannel, "receive", wrong)


def hold_answers_back(patch: Patch) -> None:
    patch.setattr(RequestHandler, "answer_overdue", lambda self: [])


def find_by_text_alone(patch: Patch) -> None:
    find = SessionStore.find
    key = property(lambda self: (b"", self.digest.name), lambda self, key: None)
    patch.setattr(DraftSession, "key", key, raising=False)
    patch.setattr(SessionStore, "find", lambda self, key: find(self, (b"", key[1])))


def find_in_all_namespaces(patch: Patch) -> None:
    """The session is filed rightly and looked for wrongly: only what is answered tells."""

    def find(self: SessionStore, key: tuple[bytes, bytes]) -> DraftSession | None:
        return next((session for session in self.snapshot() if session.key[1] == key[1]), None)

    patch.setattr(SessionStore, "find", find)


def lend_to_anybody(patch: Patch) -> None:
    add, find = PrefixIndex.add, PrefixIndex.find
    patch.setattr(PrefixIndex, "add", lambda self, holder, namespace, tokens: add(self, holder, b"", tokens))
    patch.setattr(PrefixIndex, "find", lambda self, namespace, tokens: find(self, b"", tokens))


def remember_for_all(patch: Patch) -> None:
    tenant = Tenants._tenant
    patch.setattr(Tenants, "_tenant", lambda self, namespace: tenant(self, b""))


def never_evict(patch: Patch) -> None:
    patch.setattr(SessionStore, "_shrink", lambda self: None)


def never_close(patch: Patch) -> None:
    patch.setattr(SessionStore, "pop_dropped", lambda self: self._dropped.clear() or [])


def keep_prefixes(patch: Patch) -> None:
    patch.setattr(PrefixIndex, "remove", lambda self, holder: None)


def never_take_what_has_grown(patch: Patch) -> None:
    patch.setattr(RequestHandler, "_take_grown", lambda self: None)


def never_retract(patch: Patch) -> None:
    patch.setattr(Tree, "unsubmit", lambda self, length: None)


def retire_twice(patch: Patch) -> None:
    retire = SessionStore._retire

    def twice(self: SessionStore, session: DraftSession) -> None:
        retire(self, session)
        retire(self, session)

    patch.setattr(SessionStore, "_retire", twice)


def count_lookups_twice(patch: Patch) -> None:
    session_of = SessionLookup.commit_row

    def twice(self: SessionLookup, *row: Any) -> DraftSession | None:
        self.counts.lookups += 1
        return session_of(self, *row)

    patch.setattr(SessionLookup, "commit_row", twice)


def let_faults_out(patch: Patch) -> None:
    def drop(self: FaultGuard, session: DraftSession, error: Exception) -> None:
        raise error

    patch.setattr(FaultGuard, "drop", drop)
    patch.setattr(DraftRunner, "run_once", DraftRunner.run_step)


def end_with_the_disk(patch: Patch) -> None:
    def close(self: TraceRecorder) -> None:
        self.flush()
        self._file.close()

    patch.setattr(TraceRecorder, "close", close)


def answer_some(patch: Patch) -> None:
    ready = RequestHandler.answer_ready
    patch.setattr(RequestHandler, "answer_ready", lambda self: ready(self)[1:])


def lag_for_ever(patch: Patch) -> None:
    take_late = ServiceConnection.drain_replies

    def wrong(self: ServiceConnection, end_s: float) -> None:
        since_s = self.lagging_s
        take_late(self, end_s)
        self.lagging_s = since_s

    patch.setattr(ServiceConnection, "drain_replies", wrong)


def never_renew(patch: Patch) -> None:
    patch.setattr(MessageChannel, "_reconnect", lambda self: None)


MUTATIONS: list[tuple[Rule, Mutation]] = [
    ("text", accept_everything),
    ("text", keep_what_was_submitted),
    ("deadline", wait_longer),
    ("deadline", wait_again_for_every_reply),
    ("deadline", hold_answers_back),
    ("namespace", find_by_text_alone),
    ("namespace", find_in_all_namespaces),
    ("namespace", lend_to_anybody),
    ("namespace", remember_for_all),
    ("memory", never_evict),
    ("memory", never_close),
    ("memory", keep_prefixes),
    ("memory", never_take_what_has_grown),
    ("counters", never_retract),
    ("counters", retire_twice),
    ("counters", count_lookups_twice),
    ("containment", let_faults_out),
    ("containment", end_with_the_disk),
    ("containment", answer_some),
    ("recovery", lag_for_ever),
    ("recovery", never_renew),
]


def first_broken(rule: Rule) -> int | None:
    """The first of the worlds of CI that breaks this rule."""
    for seed in range(NUM_WORLDS):
        try:
            World(seed).run()
        except Violation as violation:
            assert f"--seed {seed} " in str(violation), "the message says how to replay it"
            if violation.rule == rule:
                return seed
    return None


@pytest.mark.parametrize(("rule", "mutate"), MUTATIONS, ids=lambda part: getattr(part, "__name__", part))
def test_a_fault_in_the_code_is_found(rule: Rule, mutate: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    found = first_broken(rule)

    assert found is not None, f"no world breaks the rule {rule!r}"
